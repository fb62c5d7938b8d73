"""Prices of slots by interval, and the schedules that promise slots to jobs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import NodeId

LOW_SHARE: Final = 0.25  # L over the least density: 1 / (2 eta) of the paper, with eta = 2
HIGH_QUANTILE: Final = 0.98  # quantile of the densities for U; excludes outliers
MIN_RATIO: Final = 10.0  # minimum of U / L: without a spread the price would not rise
INITIAL_BOUNDS: Final = (1e-4, 1e-1)  # L and U before the first job; value per slot second


def price(share: FloatArray, low: float, high: float) -> FloatArray:
    """Return the value per slot second, from `low` to `high`, on a node with this share promised.

    OASiS (Bao et al., INFOCOM '18): p_h^r(t) = L (U / L)^(g_h^r(t) / c_h^r). The resource r is the
    slot: a GPU, or a CPU slot with its share of the node's cores; jobs request no other resources.
    At L every job of any worth is admitted.
    """
    return np.asarray(low * np.power(high / low, share), dtype=np.float64)


class PriceBounds:
    """L and U, estimated online from the value per slot second of the jobs seen, unless given.

    Paper: U is the greatest value of a unit of resource, and L the least over 2 eta, over all jobs
    that will ever come. Here: over the latest jobs seen, since future jobs are unknown; and U is a
    high quantile of them.
    """

    def __init__(self, window: int, low: float | None, high: float | None) -> None:
        self._seen: deque[float] = deque(maxlen=window)
        self._low, self._high = low, high

    def add(self, density: float) -> None:
        """Add a job, by its value per slot second on its best size."""
        if np.isfinite(density) and density > 0.0:
            self._seen.append(density)

    def now(self) -> tuple[float, float]:
        """Return L and U, value per slot second, with L below U."""
        low, high = INITIAL_BOUNDS
        if self._seen:
            seen = np.array(self._seen)
            low, high = LOW_SHARE * float(seen.min()), float(np.quantile(seen, HIGH_QUANTILE))
        low = self._low if self._low is not None else low
        high = self._high if self._high is not None else max(high, low * MIN_RATIO)
        if low >= high:  # one of them is fixed, and the estimate of the other is beyond it
            low = high / MIN_RATIO if self._low is None else low
        return low, max(high, low)


@dataclass(frozen=True, slots=True)
class SlotPrices:
    """Prices of every node in every interval, before one more job is planned.

    Paper: a job pays for all its slots the price from before its arrival. Here: each further slot
    on a node costs the price that the slots before it cause, at the middle of the step, since one
    job may take a whole node and not a small part of it.
    """

    used: IntArray
    capacity: IntArray
    low: float
    high: float

    def on_one_node(self, slots: int) -> FloatArray:
        """Return the cost of the slots on the cheapest node with enough room, in each interval.

        Shape (intervals,), value per second; infinite if no node has room.
        """
        return np.asarray(self._of_each_node(self.used, slots).min(axis=1))

    def on_any(self, slots: int) -> FloatArray:
        """Return the cost of the cheapest slots on any nodes, in each interval.

        Shape (intervals,), value per second; infinite if too few slots are free.
        """
        costs, free = self._by_level()
        before = np.cumsum(free, axis=1) - free
        taken = np.clip(slots - before, 0, free)
        total = (taken * costs).sum(axis=1)
        return np.where(free.sum(axis=1) >= slots, total, np.inf)

    def place(self, interval: int, slots: int, *, together: bool) -> list[tuple[int, int]]:
        """Return the cheapest free slots as (number of the node, slots); ties by the first node."""
        used = self.used[interval]
        if together:
            return [(int(np.argmin(self._of_each_node(used[None, :], slots)[0])), slots)]
        found: dict[int, int] = {}
        for _ in range(slots):
            taken = np.array([found.get(node, 0) for node in range(len(used))]) + used
            share = (taken + 0.5) / np.maximum(self.capacity, 1)
            node = int(np.argmin(np.where(taken < self.capacity, share, np.inf)))
            found[node] = found.get(node, 0) + 1
        return sorted(found.items())

    def _of_each_node(self, used: IntArray, slots: int) -> FloatArray:
        """Return the value per second of so many slots of each node, of the shape of `used`."""
        steps = np.arange(slots) + 0.5
        share = (used[:, :, None] + steps) / np.maximum(self.capacity, 1)[None, :, None]
        cost = price(np.minimum(share, 1.0), self.low, self.high).sum(axis=2)
        return np.where(used + slots <= self.capacity, cost, np.inf)

    def _by_level(self) -> tuple[FloatArray, IntArray]:
        """Return rising prices, shape (levels,), and free slots at each, (intervals, levels)."""
        shares: list[float] = []
        free: list[IntArray] = []
        for capacity in sorted({int(each) for each in self.capacity if each}):
            nodes = self.used[:, self.capacity == capacity]
            for step in range(capacity):
                shares.append((step + 0.5) / capacity)
                free.append((nodes <= step).sum(axis=1))
        order = np.argsort(shares, kind="stable")
        costs = price(np.array(shares)[order], self.low, self.high)
        return costs, np.stack(free, axis=1)[:, order]


Spread = tuple[tuple[NodeId, int], ...]  # slots of each node


@dataclass(frozen=True, slots=True)
class Schedule:
    """Slots reserved for one job, by interval; intervals are numbered from time 0."""

    first: int  # interval of the first entry of `spreads`
    spreads: tuple[Spread, ...]  # per interval; empty: no slots

    @property
    def end(self) -> int:
        """Number of the interval after its last one."""
        return self.first + len(self.spreads)

    def size(self, interval: int) -> int:
        """Return the slots in an interval; 0 outside the schedule."""
        place = interval - self.first
        if not 0 <= place < len(self.spreads):
            return 0
        return sum(slots for _, slots in self.spreads[place])

    def next_size(self, interval: int) -> int:
        """Return the slots in the first non-empty interval from this one on; 0 if there is none."""
        later = range(max(interval, self.first), self.end)
        return next((size for at in later if (size := self.size(at))), 0)

    def cut(self, first: int, end: int) -> Schedule:
        """Return the part within these intervals."""
        begin, over = max(0, first - self.first), max(0, end - self.first)
        return replace(self, first=max(first, self.first), spreads=self.spreads[begin:over])


@dataclass(frozen=True, slots=True)
class IntervalGrid:
    """Planned intervals, and the slots of nodes that can be promised."""

    first: int  # current interval
    now: float  # seconds
    interval_s: float
    horizon: int
    nodes: tuple[NodeId, ...]
    capacity: tuple[int, ...]  # slots of each node that jobs have or may get

    @property
    def slots(self) -> int:
        """Total number of slots that can be promised."""
        return sum(self.capacity)

    @property
    def left_s(self) -> float:
        """Remaining seconds of the first interval."""
        return self.end_of(self.first) - self.now

    def end_of(self, interval: int) -> float:
        """Return the end of an interval, seconds on the controller's clock."""
        return (interval + 1) * self.interval_s

    @property
    def capacities(self) -> IntArray:
        """Slots of each node, shape (nodes,)."""
        return np.array(self.capacity, dtype=np.int64)

    def nothing_used(self) -> IntArray:
        """Return zeros for the promised slots, shape (horizon, nodes)."""
        return np.zeros((self.horizon, len(self.nodes)), dtype=np.int64)

    def take(self, used: IntArray, schedule: Schedule) -> bool:
        """Add a schedule to `used` if all of it fits; return False and add nothing otherwise.

        It does not fit either if a node is gone. Intervals beyond the horizon are ignored.
        """
        number = {node: place for place, node in enumerate(self.nodes)}
        added = self.nothing_used()
        inside = schedule.cut(self.first, self.first + self.horizon)
        for place, spread in enumerate(inside.spreads, start=inside.first - self.first):
            for node, slots in spread:
                if node not in number:
                    return False
                added[place, number[node]] += slots
        if (used + added > self.capacities).any():
            return False
        used += added
        return True


def grid_of(view: ClusterView, now: float, interval_s: float, horizon: int) -> IntervalGrid:
    """Return the grid of a view.

    Slots count that are free, leaving, or held by jobs in the view, on nodes that are up; other
    slots belong to jobs that an operator holds.
    """
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    capacity: dict[NodeId, int] = {}
    for slot in view.slots:
        counts = slot.up and (slot.usable or slot.leaving or slot.slot in held)
        capacity[slot.node] = capacity.get(slot.node, 0) + counts
    return IntervalGrid(
        first=int(now // interval_s),
        now=now,
        interval_s=interval_s,
        horizon=horizon,
        nodes=tuple(capacity),
        capacity=tuple(capacity.values()),
    )
