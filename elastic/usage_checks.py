"""Checks of the script's use of the library. Each raises `UsageError`, which says what to change.

The last check finds losses that are sums over the batch, from the autograd graph. A group uses a
worker's loss as a mean over its samples. With a sum that is not divided, gradients would depend on
the division of the batch. So the check walks the graph from the loss through operations that keep
the value (added terms, casts, views, a scaler's factor) to the operation that computed the value.
Any other factor on the way might be the script's own division, so such losses are accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from elastic.training_errors import UsageError
from schemas.sweeps import MAX_EPOCH_METRICS, MAX_METRIC

LOAD_EXAMPLE: Final = (
    "write agent.load(lambda: Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), "
    "train_set, ...)"
)


def build(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[list[nn.Parameter]], Any],
    place: Callable[[nn.Module], nn.Module],
) -> tuple[nn.Module, Any]:
    """Return the model of `build_model` and the result of `build_optimizer` for its parameters.

    Before the second call, `place` checks the model and moves it to its device.
    """
    if isinstance(build_model, torch.optim.Optimizer) or isinstance(build_optimizer, nn.Module):
        problem = "load() got build_model and build_optimizer in the wrong order"
        raise UsageError(problem, LOAD_EXAMPLE, "build_model")
    _refuse_call("build_model", build_model)
    model: Any = build_model()
    if not isinstance(model, nn.Module):
        problem = f"build_model() returned {_kind(model)}, not one torch.nn.Module"
        raise UsageError(problem, f"return the model, several as one nn.ModuleDict; {LOAD_EXAMPLE}")
    model = place(model)
    parameters = list(model.parameters())
    _refuse_call("build_optimizer", build_optimizer, parameters)
    try:
        return model, build_optimizer(parameters)
    except AttributeError as error:
        if error.obj is not parameters:
            raise
        problem = f"build_optimizer reads {error.name!r} of its argument, which is no model"
        raise UsageError(problem, LOAD_EXAMPLE, "build_optimizer") from error


def _refuse_call(name: str, function: Any, *arguments: Any) -> None:
    if isinstance(function, nn.Module | torch.optim.Optimizer) or not callable(function):
        problem = f"{name} is {_kind(function)}, not a function that builds one"
        raise UsageError(problem, LOAD_EXAMPLE, name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the function is not written in Python
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = "the model's parameters" if arguments else "nothing"
        problem = f"{name}({', '.join(signature.parameters)}) is called with {given}: {error}"
        raise UsageError(problem, LOAD_EXAMPLE, name) from None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def refuse_inexact(option: str, remedy: str, *, found: bool) -> None:
    """Refuse an option of a framework's trainer if `found`; `option` may end in "=value"."""
    if found:
        raise UsageError(f"{option} cannot be kept exact", remedy, option.partition("=")[0])


def refuse_sharded(model: nn.Module) -> None:
    """Refuse models that torch distributes: a worker needs the whole model to reduce gradients."""
    others = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    for part in model.modules():
        if isinstance(part, nn.SyncBatchNorm):
            problem = (
                "the model has a SyncBatchNorm, which would not synchronise in the job's group"
            )
            raise UsageError(problem, "use BatchNorm, of each worker's share, or GroupNorm")
        found = others & {kind.__name__ for kind in type(part).__mro__}
        if found or any(type(p).__name__ == "DTensor" for p in part.parameters(recurse=False)):
            problem = f"build_model() returned a model that {min(found or {'DTensor'})} distributes"
            raise UsageError(problem, "give the plain module: the agent's group reduces gradients")


def refuse_lazy(model: nn.Module) -> None:
    """Refuse layers with parameters that get their shapes only in the first pass."""
    for name, part in model.named_modules():
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            problem = (
                f"layer {name or 'itself'!r} of the model ({type(part).__name__}) has no shape yet"
            )
            hint = "run one batch through the model in build_model, before it returns it"
            raise UsageError(problem, f"{hint}, or give the layer's sizes", "build_model")


SPARSE_REMEDY: Final = "use sparse=False: groups reduce dense gradients"


def refuse_unreduced(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse complex parameters, and parameters on several devices: they do not fit one bucket."""
    held = list(parameters)
    places = sorted({str(parameter.device) for parameter in held})
    if len(places) > 1:
        problem = f"parameters lie on several devices: {', '.join(places)}"
        raise UsageError(problem, "leave them on the device of build_model: load() moves the model")
    if any(parameter.is_complex() for parameter in held):
        problem = "the model has complex parameters"
        raise UsageError(problem, "keep the real view (torch.view_as_real) as the parameter")


def refuse_sparse(model: nn.Module) -> None:
    """Refuse layers with sparse gradients, such as `nn.Embedding(..., sparse=True)`."""
    for name, part in model.named_modules():
        if getattr(part, "sparse", None) is True:
            layer = f"layer {name or 'itself'!r} of the model ({type(part).__name__})"
            raise UsageError(f"{layer} has sparse gradients", SPARSE_REMEDY, "build_model")


def without_sampling_options(options: Mapping[str, Any], *, shuffled: bool) -> dict[str, Any]:
    """Return the DataLoader options without those that only repeat what the agent does.

    An option that selects samples differently is refused.
    """
    happens = {"shuffle": (shuffled, None), "sampler": (None,), "batch_sampler": (None,)}
    happens |= {"drop_last": (False, True), "in_order": (True,)}
    chosen = sorted(
        f"{name}={options[name]!r}"[:60]
        for name, values in happens.items()
        if name in options and not any(options[name] is value for value in values)
    )
    if chosen:
        problem = f"load() got {', '.join(chosen)}: the agent decides the order of samples"
        order = "shuffled by the job's seed" if shuffled else "in the order of train_set's __iter__"
        hint = f"leave it out: every epoch has every sample once, {order}; put weights and filters"
        hint = f"{hint}{'' if shuffled else ', and shuffling,'} into the dataset"
        raise UsageError(problem, hint)
    return {name: value for name, value in options.items() if name not in happens}


def min_step_samples(model: nn.Module) -> int:
    """Return the minimum samples of a step or share: 2 with batch normalisation, else 1."""
    whole = any(isinstance(part, _BatchNorm) for part in model.modules())
    return 2 if whole else 1


def refuse_single_samples(samples: int, bound: int, min_samples: int) -> None:
    """Refuse single samples for models with batch normalisation, which need two or more.

    `samples` is the number of samples in a step, and `bound` is the maximum for one pass.
    """
    if min(samples, bound) >= min_samples:
        return
    name = "batch_size" if samples < min_samples else "max_local_batch"
    problem = (
        f"a step of {samples} samples, at most {bound} at once: "
        f"batch normalisation needs {min_samples}"
    )
    hint = (
        f"raise {name} to {min_samples} or more, or normalise each sample by itself (nn.GroupNorm)"
    )
    raise UsageError(problem, hint, name)


def refuse_columns(columns: int | None, batch: int) -> None:
    """Refuse a `batch` with two samples of one column, because the second continues the first."""
    if columns is not None and not 1 <= batch <= columns:
        problem = f"batches may have {batch} samples, the data has {columns} columns"
        hint = f'set {columns} or "keep" in the job file, or cut the data into {batch} columns'
        raise UsageError(problem, hint, "max_batch_size")


def dataset_size(dataset: Dataset[Any]) -> int:
    """Return ||D||, the number of samples in a map-style or iterable dataset with a length."""
    if isinstance(dataset, IterDataPipe | DataLoader):
        problem = f"train_set is a {type(dataset).__name__}, which selects samples itself"
        hint = "give a map-style dataset or an IterableDataset, and load() its options"
        raise UsageError(problem, hint, "train_set")
    try:
        size = len(dataset)  # type: ignore[arg-type] # most have a length
    except (TypeError, NotImplementedError):
        hint = "give a map-style dataset, with __len__ and __getitem__"
        if inspect.isroutine(dataset) or isinstance(dataset, type):
            hint = f"it is a function or class: call it, and {hint}"
        if isinstance(dataset, IterableDataset):
            hint = "give it __len__: the number of samples of one pass through __iter__"
        raise UsageError("train_set has no length", hint, "train_set") from None
    if size < 1:
        raise UsageError("train_set is empty", "give at least one sample", "train_set")
    return size


def metric_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an epoch as numbers."""
    if len(metrics) > MAX_EPOCH_METRICS:
        problem = f"report() got {len(metrics)} metrics"
        raise UsageError(problem, f"give {MAX_EPOCH_METRICS} at most")
    for name in metrics:
        if not (0 < len(name) <= MAX_METRIC and name.isprintable()):
            problem = f"report() got a metric named {name[:MAX_METRIC]!r}"
            raise UsageError(problem, f"name it with 1 to {MAX_METRIC} printable characters")
    return {name: metric_value(name, value) for name, value in metrics.items()}


def metric_value(name: str, value: Any) -> float:
    """Return a metric, a number or a tensor with one element, as a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        problem = f"report({name}=...) got {type(value).__name__}"
        raise UsageError(problem, "give a number or a tensor with one element", name) from None


ADDED: Final = ("AddBackward", "SubBackward")
UNCHANGED: Final = (
    "NegBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "AliasBackward",
    "SqueezeBackward", "UnsqueezeBackward", "ToCopyBackward", "CloneBackward", "FlattenBackward",
)  # fmt: skip
REDUCED: Final = ("SumBackward", "MeanBackward")
SCALED: Final = ("MulBackward", "DivBackward", *REDUCED, "VarBackward", "StdBackward")
LAYERS: Final = (
    "AddmmBackward", "MmBackward", "BmmBackward", "BaddbmmBackward", "LinearBackward",
    "ConvolutionBackward", "MkldnnRnnLayerBackward", "CudnnRnnBackward", "MkldnnLinearBackward",
)  # fmt: skip
NO_REDUCTION: Final = 0  # codes of `reduction` in torch's loss functions
SUM: Final = 2


class SumCertainty(IntEnum):
    """Certainty that a loss is an undivided sum over the batch."""

    NO = 0  # no sum, or none that is visible in the graph
    POSSIBLE = 1
    CERTAIN = 2


def sum_certainty(loss: torch.Tensor, samples: int, scale: float) -> SumCertainty:
    """Return the certainty that some term of `loss`, shape (), is a sum over the batch.

    `scale` is the factor of the script's gradient scaler, or 1 if there is no scaler.
    """
    return max(
        (_term_certainty(node, samples) for node in _terms(loss.grad_fn, scale)),
        default=SumCertainty.NO,
    )


def _terms(root: Any, scale: float) -> Iterator[Any]:
    """Yield the nodes that add up to the loss, multiplied only by the scaler's factor."""
    pending = [root]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if (smoothed := _smoothed(node)) is not None:
            yield smoothed
        elif _is_kind(node, ADDED):
            below = _inputs(node)
            pending += below if getattr(node, "_saved_alpha", 1) == 1 else below[:1]
        elif _is_kind(node, UNCHANGED) or _is_scaling(node, scale):
            pending += _inputs(node)[:1]
        else:
            yield node


def _term_certainty(node: Any, samples: int) -> SumCertainty:
    reduction = _saved(node, "_saved_reduction")
    if reduction == SUM:
        return _samples_certainty(node, samples)
    if not _is_kind(node, ("SumBackward",)):
        return SumCertainty.NO
    inner = _inputs(node)[0]
    while inner is not None and (_is_kind(inner, UNCHANGED) or _reduces_others(inner)):
        inner = _inputs(inner)[0]
    if inner is None or _is_kind(inner, ("DivBackward", "MeanBackward")):
        return SumCertainty.NO
    if _saved(inner, "_saved_reduction") == NO_REDUCTION:
        return _samples_certainty(inner, samples)
    seen = _has_samples(_shape(node, 0), samples) and _depends_on_data(inner)
    return SumCertainty.POSSIBLE if seen else SumCertainty.NO


def _samples_certainty(node: Any, samples: int) -> SumCertainty:
    """Return the certainty that a summing loss function adds one value per sample."""
    made = _inputs(node)[0] if node.next_functions else None
    if made is None or not _depends_on_data(made):
        return SumCertainty.NO  # a loss of parameters alone does not grow with the batch
    weighed = _saved(node, "_saved_weight") is not None
    if weighed or not _has_samples(_shape(node, 0), samples):
        return SumCertainty.POSSIBLE
    while _is_kind(made, UNCHANGED) or _reduces_others(made):
        made = _inputs(made)[0]
    return SumCertainty.POSSIBLE if _is_kind(made, SCALED) else SumCertainty.CERTAIN


def _smoothed(node: Any) -> Any | None:
    """Return the node of the plain loss if `node` is torch's sum for label smoothing; else None.

    For smoothing s, torch adds (1 - s) times the loss and s / classes times all classes' losses.
    """
    below = _inputs(node)
    if not _is_kind(node, ("AddBackward",)) or len(below) < 2 or not all(below):  # noqa: PLR2004
        return None
    hit, every = (_saved(part, "_saved_other") for part in below)
    loss = _inputs(below[0])[0] if below[0].next_functions else None
    if not (isinstance(hit, float) and isinstance(every, float) and _is_kind(loss, ("NllLoss",))):
        return None
    shape = _shape(loss, 0)
    whole = hit + every * shape[1] if len(shape) > 1 else 0.0
    return loss if abs(whole - 1.0) < 1e-6 else None  # noqa: PLR2004 - rounding error


def _depends_on_data(root: Any) -> bool:
    """Return whether a layer below `root` has an input that is not a parameter."""
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction) or _is_kind(node, ("Embedding",)):
            return True  # the script's function, a compiled module, or an embedding
        below = _inputs(node)
        if _is_kind(node, LAYERS) and None in below:
            return True
        for part in below:
            if part is not None and part not in seen:
                seen.add(part)
                pending.append(part)
    return False


def _reduces_others(node: Any) -> bool:
    """Return whether `node` reduces dimensions within each sample, and not over the samples."""
    dims, sizes = _saved(node, "_saved_dim"), _saved(node, "_saved_self_sym_sizes")
    if not _is_kind(node, REDUCED) or not isinstance(dims, tuple) or not sizes:
        return False
    signed = [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims]
    return bool(dims) and all(dim % len(sizes) for dim in signed)


def _has_samples(shape: tuple[int, ...], samples: int) -> bool:
    """Return whether one of the first two dimensions can be the samples, alone or combined."""
    return any(size and size % samples == 0 for size in shape[:2])


def _is_scaling(node: Any, scale: float) -> bool:
    factor = _saved(node, "_saved_other") if _is_kind(node, ("MulBackward",)) else None
    return isinstance(factor, torch.Tensor) and factor.numel() == 1 and float(factor) == scale


def _is_kind(node: Any, kinds: tuple[str, ...]) -> bool:
    return node is not None and str(node.name()).startswith(kinds)


def _inputs(node: Any) -> list[Any]:
    """Return the nodes that produced the inputs of `node`; None for inputs without gradient."""
    return [part for part, _ in node.next_functions]


def _shape(node: Any, index: int) -> tuple[int, ...]:
    """Return the shape of an input of `node`, from metadata: hooks can replace saved tensors."""
    part, place = node.next_functions[index]
    if part is None:
        return ()
    if hasattr(part, "variable"):
        return tuple(part.variable.shape)
    return tuple(int(size) for size in part._input_metadata[place].shape)  # noqa: SLF001


def _saved(node: Any, name: str) -> Any:
    """Return the value `name` that autograd saved with `node`; None if missing or changed since."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None
