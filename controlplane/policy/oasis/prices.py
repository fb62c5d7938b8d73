"""What a slot costs for an interval, by how much of its node is promised already.

What so many slots cost in each interval, at best: on one node, or on any.

Which job is promised how many slots of which node in which interval.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import NodeId

BELOW: Final = 0.25  # of the least density seen: 1 / (2 eta) of the paper, with eta = 2
HIGH_SHARE: Final = 0.98  # of the densities seen lie below U; what is above is one strange job
LEAST_RATIO: Final = 10.0  # of U to L: without a spread the price would not rise
FIRST: Final = (1e-4, 1e-1)  # L and U before any job was seen; value per slot second


def price(share: FloatArray, low: float, high: float) -> FloatArray:
    """Value per slot second of a slot on a node of which so much is taken.

    OASiS (Bao et al., INFOCOM '18): p_h^r(t) = L (U / L)^(g_h^r(t) / c_h^r). The resource r is the
    slot: a GPU, or a CPU slot with its share of the node's cores; no job asks for others.

    Args:
        share: g / c, shape (...), in [0, 1].
        low: L, at which everybody is admitted who is worth anything.

    Returns:
        Shape (...), from `low` to `high`.
    """
    return np.asarray(low * np.power(high / low, share), dtype=np.float64)


class PriceBounds:
    """L and U, estimated online from what the jobs seen are worth for each slot second.

    Paper: U is the greatest value of a unit of resource, and L the least over 2 eta, over all jobs
    that will ever come. Here: over the latest jobs seen, since nobody knows those to come; and U is
    a high quantile of them.

    Args:
        low: L; None: estimated.
        high: U; None: estimated.
    """

    def __init__(self, window: int, low: float | None, high: float | None) -> None:
        self._seen: deque[float] = deque(maxlen=window)
        self._low, self._high = low, high

    def add(self, density: float) -> None:
        """One more job came.

        Args:
            density: its value for each slot second that it needs on its best size.
        """
        if np.isfinite(density) and density > 0.0:
            self._seen.append(density)

    def now(self) -> tuple[float, float]:
        """L and U, value per slot second, with L below U."""
        low, high = FIRST
        if self._seen:
            seen = np.array(self._seen)
            low, high = BELOW * float(seen.min()), float(np.quantile(seen, HIGH_SHARE))
        low = self._low if self._low is not None else low
        high = self._high if self._high is not None else max(high, low * LEAST_RATIO)
        if low >= high:  # one of them was fixed, and the other was seen beyond it
            low = high / LEAST_RATIO if self._low is None else low
        return low, max(high, low)


@dataclass(frozen=True, slots=True)
class SlotPrices:
    """The prices of every node in every interval, before one more job is planned.

    Paper: a job pays for all its slots the price of the moment before it came. Here: each further
    slot on a node costs what the ones before it make of the price, at the middle of the step, since
    one job may take a whole node and not a small part of it.

    Args:
        used: slots that are promised, shape (intervals, nodes).
        capacity: slots of each node, shape (nodes,).
        low: L, value per slot second.
    """

    used: IntArray
    capacity: IntArray
    low: float
    high: float

    def on_one_node(self, slots: int) -> FloatArray:
        """The cheapest node that has so many free, in each interval.

        Args:
            slots: 1 or more.

        Returns:
            Shape (intervals,), value per second; infinite where no node has room.
        """
        return np.asarray(self._of_each_node(self.used, slots).min(axis=1))

    def on_any(self, slots: int) -> FloatArray:
        """The cheapest slots wherever they are, in each interval.

        Args:
            slots: 1 or more.

        Returns:
            Shape (intervals,), value per second; infinite where so many are not free.
        """
        costs, free = self._by_level()
        before = np.cumsum(free, axis=1) - free
        taken = np.clip(slots - before, 0, free)
        total = (taken * costs).sum(axis=1)
        return np.where(free.sum(axis=1) >= slots, total, np.inf)

    def place(self, interval: int, slots: int, *, together: bool) -> list[tuple[int, int]]:
        """Where these cheapest slots are.

        Args:
            interval: from 0 on.
            slots: that are free, as the costs say.

        Returns:
            Numbers of nodes, and slots on them; the first node among equals.
        """
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
        """Value per second of so many slots of each node, of the shape of `used`."""
        steps = np.arange(slots) + 0.5
        share = (used[:, :, None] + steps) / np.maximum(self.capacity, 1)[None, :, None]
        cost = price(np.minimum(share, 1.0), self.low, self.high).sum(axis=2)
        return np.where(used + slots <= self.capacity, cost, np.inf)

    def _by_level(self) -> tuple[FloatArray, IntArray]:
        """Prices in rising order, shape (levels,), and free slots at each, (intervals, levels)."""
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
    """The slots that are kept for one job, by interval; times are whole intervals since 0."""

    first: int  # interval of the first entry
    spreads: tuple[Spread, ...]  # empty where it has no slots

    @property
    def end(self) -> int:
        """The interval behind its last one."""
        return self.first + len(self.spreads)

    def size(self, interval: int) -> int:
        """Slots in an interval; 0 before its first and behind its last.

        Args:
            interval: since 0.
        """
        place = interval - self.first
        if not 0 <= place < len(self.spreads):
            return 0
        return sum(slots for _, slots in self.spreads[place])

    def next_size(self, interval: int) -> int:
        """Slots in the first interval from this one on that has some; 0 behind its last.

        Args:
            interval: since 0.
        """
        later = range(max(interval, self.first), self.end)
        return next((size for at in later if (size := self.size(at))), 0)

    def cut(self, first: int, end: int) -> Schedule:
        """What lies within these intervals.

        Args:
            first: since 0.
        """
        begin, over = max(0, first - self.first), max(0, end - self.first)
        return replace(self, first=max(first, self.first), spreads=self.spreads[begin:over])


@dataclass(frozen=True, slots=True)
class Grid:
    """The intervals that are planned now, and the nodes that can be promised."""

    first: int  # interval of now, since 0
    now: float  # seconds
    interval_s: float
    horizon: int
    nodes: tuple[NodeId, ...]
    capacity: tuple[int, ...]  # slots of each node that jobs in the view have or may get

    @property
    def slots(self) -> int:
        """All slots that can be promised."""
        return sum(self.capacity)

    @property
    def left_s(self) -> float:
        """What is left of the first interval, seconds."""
        return self.end_of(self.first) - self.now

    def end_of(self, interval: int) -> float:
        """When an interval is over, seconds on the controller's clock.

        Args:
            interval: since 0.
        """
        return (interval + 1) * self.interval_s

    @property
    def capacities(self) -> IntArray:
        """Slots of each node, shape (nodes,)."""
        return np.array(self.capacity, dtype=np.int64)

    def nothing_used(self) -> IntArray:
        """Slots that are promised before anybody was promised any, shape (horizon, nodes)."""
        return np.zeros((self.horizon, len(self.nodes)), dtype=np.int64)

    def take(self, used: IntArray, schedule: Schedule) -> bool:
        """Add a schedule to what is promised, if there is room for all of it.

        Args:
            used: shape (horizon, nodes); changed in place.
            schedule: of a job; what lies beyond the horizon is passed over.

        Returns:
            False where there is no room, or a node is gone: then nothing is added.
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


def grid_of(view: ClusterView, now: float, interval_s: float, horizon: int) -> Grid:
    """The grid of a view.

    Slots count that are free, that somebody is leaving, or that jobs in the view have, on nodes
    that are up: others belong to jobs which an operator holds.

    Args:
        now: seconds on the controller's clock.
    """
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    capacity: dict[NodeId, int] = {}
    for slot in view.slots:
        counts = slot.up and (slot.usable or slot.leaving or slot.slot in held)
        capacity[slot.node] = capacity.get(slot.node, 0) + counts
    return Grid(
        first=int(now // interval_s),
        now=now,
        interval_s=interval_s,
        horizon=horizon,
        nodes=tuple(capacity),
        capacity=tuple(capacity.values()),
    )
