"""What one job would do on 1, 2, ... slots: with which batch, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray
from controlplane.prediction.statistical_efficiency import statistical_efficiency
from controlplane.prediction.throughput import SpeedModel


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job may have, and how its speed is read."""

    limit: int  # min(R, what its user allows), samples per step
    local_limit: int
    local: int  # batch of one slot that it began with
    first: int  # global batch that it began with
    most: int  # slots
    widest: int  # slots of the largest node
    noise_scale: float  # phi, samples
    speed: Literal["mean", "model", "goodput"]
    batch: Literal["kept", "goodput"]
    slot_rate: float  # measured mean of one slot, samples per second; 0: never measured


@dataclass(frozen=True, slots=True)
class SizeTable:
    """By slots, 0 to C."""

    batches: IntArray  # global, shape (C + 1,), samples per step; 0 at 0
    rates: FloatArray  # X, shape (C + 1, 2), samples/s: on as few nodes as possible, on more


def size_table(model: SpeedModel, bounds: Bounds) -> SizeTable:
    """Batch and speed at each size; for `goodput` a sample counts as one at the first batch."""
    slots = np.arange(1, bounds.most + 1)
    if not len(slots):
        return SizeTable(np.zeros(1, dtype=np.int64), np.zeros((1, 2)))
    nodes = -(-slots // bounds.widest)
    choices = _choices(slots, bounds)
    fits = (choices >= slots[:, None]) & (choices <= slots[:, None] * bounds.local_limit)
    shown = np.broadcast_to(nodes[:, None], choices.shape)
    value = np.where(fits, _rates(model, bounds, shown, slots[:, None], choices), -1.0)
    best = value.shape[1] - 1 - value[:, ::-1].argmax(axis=1)  # the larger one of equals
    rows = np.arange(len(slots))
    batches = choices[rows, best]
    far = np.where(slots > 1, np.maximum(nodes + 1, 2), 1)
    spread = np.minimum(value[rows, best], _rates(model, bounds, far, slots, batches))
    rates = np.column_stack([value[rows, best], spread])
    rates[~fits[rows, best]] = 0.0
    batches = np.where(fits[rows, best], batches, 0)
    return SizeTable(np.append(0, batches), np.vstack([np.zeros((1, 2)), rates]))


def rate_of(model: SpeedModel, bounds: Bounds, slots: int, batch: int) -> float:
    """X of a size and batch that it need not choose by itself, on as few nodes as possible.

    Args:
        batch: global, samples per step.

    Returns:
        Samples per second.
    """
    many = np.array([slots])
    found = _rates(model, bounds, -(-many // bounds.widest), many, np.array([batch]))
    return float(found[0])


def _choices(slots: IntArray, bounds: Bounds) -> IntArray:
    """Batches that are tried, shape (C, B), ascending."""
    fullest = np.minimum(bounds.limit, slots * bounds.local_limit)[:, None]
    if bounds.batch == "kept":  # every slot as at the beginning, as far as R allows
        return np.minimum(fullest, (slots * bounds.local)[:, None])
    doublings = max(0, (bounds.limit // bounds.first).bit_length() - 1)
    grid = bounds.first * np.exp2(np.arange(doublings + 1)).astype(np.int64)
    return np.concatenate([np.minimum(grid[None, :], fullest), fullest], axis=1)


def _rates(
    model: SpeedModel, bounds: Bounds, nodes: IntArray, slots: IntArray, batches: IntArray
) -> FloatArray:
    if bounds.speed == "mean":
        return np.asarray(np.broadcast_to(slots, batches.shape) * (bounds.slot_rate or 1.0))
    local = np.ceil(batches / slots)
    steps = model.step_s(nodes, np.broadcast_to(slots, local.shape), local)
    if bounds.speed == "model":
        return np.asarray(batches / steps)
    sizes = batches.astype(np.float64)
    return np.asarray(
        batches / steps * statistical_efficiency(sizes, bounds.first, bounds.noise_scale)
    )
