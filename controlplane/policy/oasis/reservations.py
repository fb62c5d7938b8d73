"""Which job is promised how many slots of which node in which interval."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.prediction.array_types import IntArray
from schemas.ids import NodeId

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
