"""Check whether a loss is a sum over the batch, from its autograd graph.

A group takes a worker's loss as a mean over its samples. A sum that is not divided gives gradients
that depend on how the batch was split. So the graph is walked from the loss through operations that
do not change the value (added terms, casts, views, a gradient scaler's factor) to the one that made
it. Any other factor on the way may be the script's own division: such losses are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction

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
NO_REDUCTION: Final = 0  # code in torch's loss functions
SUM: Final = 2


class SumCertainty(IntEnum):
    """Certainty that a loss is an undivided sum over the batch."""

    NO = 0  # or not visible in the graph
    POSSIBLE = 1
    CERTAIN = 2


def sum_certainty(loss: torch.Tensor, samples: int, scale: float) -> SumCertainty:
    """Return whether some term of `loss`, shape (), is a sum over the batch.

    `scale` is the factor of the script's gradient scaler; 1 without one.
    """
    return max(
        (_term_certainty(node, samples) for node in _terms(loss.grad_fn, scale)),
        default=SumCertainty.NO,
    )


def _terms(root: Any, scale: float) -> Iterator[Any]:
    """Yield the nodes whose results are added, with no factor but the scaler's."""
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
    """Return whether a loss function that sums its values has one value per sample."""
    made = _inputs(node)[0] if node.next_functions else None
    if made is None or not _depends_on_data(made):
        return SumCertainty.NO  # of parameters alone: does not grow with the batch
    weighed = _saved(node, "_saved_weight") is not None
    if weighed or not _has_samples(_shape(node, 0), samples):
        return SumCertainty.POSSIBLE
    while _is_kind(made, UNCHANGED) or _reduces_others(made):
        made = _inputs(made)[0]
    return SumCertainty.POSSIBLE if _is_kind(made, SCALED) else SumCertainty.CERTAIN


def _smoothed(node: Any) -> Any | None:
    """Return the loss's own node if `node` is torch's sum for `label_smoothing`; else None.

    The sum is (1 - s) of the loss, and s over the number of classes of the loss of all classes.
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
    """Return whether a layer below takes an input that is no parameter."""
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
    """Return whether `node` reduces dimensions of each sample, not the samples themselves."""
    dims, sizes = _saved(node, "_saved_dim"), _saved(node, "_saved_self_sym_sizes")
    if not _is_kind(node, REDUCED) or not isinstance(dims, tuple) or not sizes:
        return False
    signed = [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims]
    return bool(dims) and all(dim % len(sizes) for dim in signed)


def _has_samples(shape: tuple[int, ...], samples: int) -> bool:
    """Return whether one of the first two dimensions may hold the samples, alone or combined."""
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
    """Return the shape of an input of `node`; hooks may have packed the saved tensor."""
    part, place = node.next_functions[index]
    if part is None:
        return ()
    if hasattr(part, "variable"):
        return tuple(part.variable.shape)
    return tuple(int(size) for size in part._input_metadata[place].shape)  # noqa: SLF001


def _saved(node: Any, name: str) -> Any:
    """Return what autograd saved with `node`; None if nothing, or if it changed since."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None
