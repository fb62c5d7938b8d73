"""What each size is worth to a job, and which sizes are worth most to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray
from controlplane.prediction.statistical_efficiency import statistical_efficiency
from controlplane.prediction.throughput import SpeedModel

STARVED: Final = 1e-3  # speed-up of a job without slots: its share of a mean is finite
PRICES: Final = 60  # halvings in the search for the price of a slot


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job may have."""

    first_batch: int  # global, samples per step
    batch_limit: int
    local_limit: int
    most: int  # slots
    widest: int  # slots of the largest node


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The best batch and its goodput on 1, 2, ... slots, close together."""

    batches: IntArray  # shape (N,), samples per step; 0: there is none
    goodputs: FloatArray  # shape (N,), samples per second, each worth one at the first batch

    @property
    def fewest(self) -> int:
        """Slots on which it can train at all; 1 also where it cannot on any."""
        return 1 + int(np.argmax(self.goodputs > 0))

    @property
    def speedups(self) -> FloatArray:
        """Goodput relative to the fewest slots, shape (N,); 0 where there is no batch."""
        least = float(self.goodputs[self.fewest - 1])
        return self.goodputs / least if least else np.zeros_like(self.goodputs)


def size_table(
    model: SpeedModel, bounds: Bounds, noise_scale: float, per_doubling: int
) -> SizeTable:
    """Pollux eq. 6-8: the batch on a geometric grid that has the greatest goodput at each size."""
    batches = _grid(bounds.first_batch, bounds.batch_limit, per_doubling)
    slots = np.arange(1, bounds.most + 1)[:, None]
    each = goodputs(model, bounds, slots, batches[None, :], noise_scale)
    best = each.argmax(axis=1)
    value = each[np.arange(bounds.most), best]
    return SizeTable(batches=np.where(value > 0, batches[best], 0), goodputs=value)


def goodputs(
    model: SpeedModel,
    bounds: Bounds,
    slots: IntArray,
    batches: IntArray,
    noise_scale: float,
    *,
    nodes: int | None = None,
) -> FloatArray:
    """Speed times efficiency; 0 where a batch does not go with the slots.

    Args:
        slots: shape (..., 1).
        batches: shape (1, B), global, samples per step.
        nodes: that the slots are on; None: as few as possible.

    Returns:
        Shape (..., B), samples per second, each worth one at the first batch.
    """
    local = np.ceil(batches / slots)
    spans = -(-slots // bounds.widest) if nodes is None else np.full_like(slots, nodes)
    steps = model.step_s(
        np.broadcast_to(spans, local.shape), np.broadcast_to(slots, local.shape), local
    )
    efficiency = statistical_efficiency(batches.astype(np.float64), bounds.first_batch, noise_scale)
    fits = (local <= bounds.local_limit) & (batches >= slots)
    return np.where(fits, batches / steps * efficiency, 0.0)


def utilities(speedups: FloatArray, power: float) -> FloatArray:
    """What speed-ups add to the sum that has the same maximum as their mean of that power.

    Pollux eq. 17: (1/J sum s^p)^(1/p); the geometric mean for p = 0.

    Args:
        speedups: shape (...); one of nothing counts as `STARVED`.
        power: p, at most 1.
    """
    bounded = np.maximum(speedups, STARVED)
    if power == 0:
        return np.log(bounded)
    return np.asarray(np.sign(power) * np.power(bounded, power))


def best_sizes(value: Sequence[FloatArray], room: int) -> list[int]:
    """Slots of each job, so that what they are worth in all is as much as possible.

    Each takes the size that is worth most to it at one price for a slot, the lowest at which
    there are enough; what is left over then goes piece by piece to whom it is worth most. Pollux
    searches with a genetic algorithm over whole placements; this has no chance in it, and finds
    the best sizes but for the last few slots.

    Args:
        value: of each job the value of 0, 1, ... slots, -inf for sizes it may not have.
    """
    if not value:
        return []
    widest = max(map(len, value))
    table = np.full((len(value), widest), -np.inf)
    for row, values in enumerate(value):
        table[row, : len(values)] = values
    counts = np.arange(widest)
    sizes = table.argmax(axis=1)
    if sizes.sum() > room:
        gains = (table[:, 1:] - table[:, :1]) / counts[1:]
        low, high = 0.0, 1.0 + max(0.0, float(gains.max(initial=0.0)))
        sizes = np.zeros_like(sizes)
        for _ in range(PRICES):
            price = (low + high) / 2
            asked = (table - price * counts).argmax(axis=1)
            if asked.sum() > room:
                low = price
            else:
                high, sizes = price, asked
    return _fill_up(table, [int(size) for size in sizes], room)


def _fill_up(table: FloatArray, sizes: list[int], room: int) -> list[int]:
    """Give what is left over to whom it is worth most, slot for slot."""
    left = room - sum(sizes)
    heap = [(-gain, row, more) for row in range(len(sizes))
            for gain, more in [_next_gain(table[row], sizes[row], left)]]  # fmt: skip
    heapify(heap)
    while left and heap:
        loss, row, more = heappop(heap)
        if loss >= 0:
            break
        if more <= left:
            sizes[row] += more
            left -= more
        gain, more = _next_gain(table[row], sizes[row], left)
        heappush(heap, (-gain, row, more))
    return sizes


def _next_gain(values: FloatArray, size: int, left: int) -> tuple[float, int]:
    """The greatest gain per slot of up to `left` further ones, and how many those are."""
    further = values[size + 1 : size + 1 + left]
    if not len(further):
        return 0.0, 0
    gains = (further - values[size]) / np.arange(1, len(further) + 1)
    best = int(gains.argmax())
    return float(gains[best]), best + 1


def _grid(first: int, limit: int, per_doubling: int) -> IntArray:
    """Batches from the first to the limit in equal ratios, both among them."""
    many = int(np.ceil(np.log2(max(limit, first) / first) * per_doubling))
    steps = np.exp2(np.arange(many) / per_doubling) * first
    return np.unique(np.append(np.floor(steps).astype(np.int64), max(limit, first)))
