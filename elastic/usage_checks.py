"""What a script may get wrong, said in words that help."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic.training_errors import UsageError


def refuse_sharded(model: nn.Module) -> None:
    """Workers hold whole models: gradients are reduced here, and nowhere else.

    Args:
        model: what `build_model` gave.

    Raises:
        UsageError: if something else of torch distributes the model already.
    """
    others = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    for part in model.modules():
        found = others & {kind.__name__ for kind in type(part).__mro__}
        if found or any(type(p).__name__ == "DTensor" for p in part.parameters(recurse=False)):
            what = f"build_model() gave a model that {min(found or {'DTensor'})} distributes"
            raise UsageError(what, "give the plain module: the agent's group reduces gradients")


def refuse_unreduced(parameters: Iterable[torch.Tensor]) -> None:
    """Gradients are summed as real numbers, in one piece of memory.

    Args:
        parameters: of model and optimizer.

    Raises:
        UsageError: if they lie on several devices, or some are complex.
    """
    held = list(parameters)
    places = sorted({str(parameter.device) for parameter in held})
    if len(places) > 1:
        what = f"parameters lie on several devices: {', '.join(places)}"
        raise UsageError(what, "leave them where build_model makes them: load() moves the model")
    if any(parameter.is_complex() for parameter in held):
        what = "the model has complex parameters"
        raise UsageError(what, "keep the real view (torch.view_as_real) as the parameter")


def dataset_size(dataset: Dataset[Any]) -> int:
    """||D||, samples.

    Args:
        dataset: map-style.

    Raises:
        UsageError: if `dataset` has no length or is empty.
    """
    try:
        size = len(dataset)  # type: ignore[arg-type] # a map-style dataset has a length
    except TypeError:
        hint = "give a map-style dataset, with __len__ and __getitem__"
        raise UsageError("train_set has no length", hint, "train_set") from None
    if size < 1:
        raise UsageError("train_set is empty", "give at least one sample", "train_set")
    return size


def metric_value(name: str, value: Any) -> float:
    """A metric as a number.

    Args:
        name: of the metric.
        value: a number, or a tensor with one element.

    Raises:
        UsageError: if `value` is neither.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        what = f"report({name}=...) got {type(value).__name__}"
        raise UsageError(what, "give a number or a tensor with one element", name) from None
