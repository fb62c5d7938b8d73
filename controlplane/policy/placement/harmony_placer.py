"""The placer `harmony`: puts a job of fixed size where interference costs the least speed.

`LayoutSearch` finds the nodes. `ReportedSpeeds` matches reported speeds with the neighbours at that
time, from which the costs of neighbours are learnt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.policy.api import ClusterView, EpochSeen, JobView, PolicyEvent, StepsSeen
from controlplane.policy.placement.free_slots import Moves, Placer, by_node
from controlplane.policy.placement.occupancy import (
    Layout,
    NeighbourCosts,
    Occupancy,
    Place,
    SpeedShares,
    crowds_of,
    gain_of,
)
from controlplane.policy.placement.slot_partition import Partition
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

MAX_FIRST_NODES: Final = 6  # starting nodes of the search, the best ones for a single worker
DIGITS: Final = 6  # rounding of normalised speed, for ties between layouts


class LayoutSearch:
    """Greedy search for the layout with the largest sum of normalised speeds.

    Ties go to few and well-filled nodes. Workers are added one by one, starting from each of a few
    first nodes: once with one worker there, and once with as many as fit. `occupancy` is unchanged
    afterwards.
    """

    def __init__(
        self, free: Mapping[NodeId, int], occupancy: Occupancy, shares: SpeedShares
    ) -> None:
        self._free = {node: room for node, room in free.items() if room}
        self._occupancy, self._shares = occupancy, shares

    def best(self, job: JobId, size: int, own: Layout | None = None) -> Layout:
        """Return the best layout found for `size` workers, of which `own` stay in place."""
        kept = Counter(own or {})
        need = size - kept.total()
        if need <= 0:
            return dict(kept)
        nodes = self._distinct(kept)
        worth = {node: self._worth(job, kept + Counter({node: 1})) for node in nodes}
        first = sorted(nodes, key=lambda node: (-worth[node], self._free[node]))[:MAX_FIRST_NODES]
        layouts = [
            self._filled(job, size, kept + Counter({node: many}), kept, first)
            for node in first
            for many in sorted({1, min(self._free[node], need)})
        ]
        best = min(layouts, key=lambda one: (-self._worth(job, one), *self._spare(one)))
        return dict(best)

    def _filled(
        self, job: JobId, size: int, layout: Counter[NodeId], kept: Counter[NodeId],
        first: list[NodeId],
    ) -> Counter[NodeId]:  # fmt: skip
        """Return `layout` with workers added one by one, each where it costs least."""
        while layout.total() < size:
            open_ = [n for n, room in self._free.items() if room > layout[n] - kept[n]]
            near = [node for node in open_ if node in first or layout[node]]
            grown = [layout + Counter({node: 1}) for node in near or open_[:MAX_FIRST_NODES]]
            layout = min(grown, key=lambda one: (-self._worth(job, one), *self._spare(one)))
        return layout

    def _spare(self, layout: Layout) -> tuple[int, int]:
        return len(layout), sum(self._free.get(node, 0) for node in layout)

    def _distinct(self, kept: Layout) -> list[NodeId]:
        """Return the candidate nodes; of equal empty nodes no more than could be needed."""
        found: list[NodeId] = []
        empty: Counter[int] = Counter()
        for node, room in self._free.items():
            if not self._occupancy.on(node) and node not in kept:
                empty[room] += 1
                if empty[room] > MAX_FIRST_NODES:
                    continue
            found.append(node)
        return found

    def _worth(self, job: JobId, layout: Layout) -> float:
        return round(gain_of({job: dict(layout)}, self._occupancy, self._shares), DIGITS)


SETTLED_S: Final = 4.0  # wait after a change of neighbours: two windows of a worker's speed


class ReportedSpeeds:
    """Learns from telemetry, and from epochs with constant neighbours."""

    def __init__(self, costs: NeighbourCosts) -> None:
        self._costs = costs
        self._types: dict[SlotId, str] = {}
        self._view: ClusterView | None = None
        self._places: dict[JobId, tuple[Place, Seconds]] = {}  # of training jobs: place, since when
        self._groups: dict[JobId, int] = {}  # group version of the last telemetry

    def update(self, view: ClusterView, now: Seconds) -> None:
        """Take the places of jobs from this view."""
        if view is self._view:
            return
        if self._view is None or view.slots is not self._view.slots:
            self._types = {slot.slot: slot.model for slot in view.slots}
        self._view = view
        occupancy, before = Occupancy.of(view), self._places
        self._places = {}
        for name, job in view.jobs.items():
            if job.running_on and self._is_steady(job, view, occupancy):
                place = self._place(job, occupancy)
                same = before.get(name, (None, now))
                self._places[name] = (place, same[1] if same[0] == place else now)
        self._groups = {name: at for name, at in self._groups.items() if name in view.jobs}

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from a speed if its job is still where it was measured."""
        match event:
            case StepsSeen():
                again = self._groups.get(event.job) == event.group
                self._groups[event.job] = event.group
                if again and event.samples_per_s:  # the first may be of a forming group
                    self._measured(event, now)
            case EpochSeen(beside=beside) if beside is not None and event.whole and event.slots:
                local = max(1, round(event.global_batch / event.slots))
                place = (event.slots, local, "", beside)
                self._costs.add(event.family, place, event.global_batch, event.samples_per_s)

    def _measured(self, event: StepsSeen, now: Seconds) -> None:
        place, since = self._places.get(event.job, (None, now))
        if place is None or now - since < SETTLED_S or place[0] != event.slots:
            return
        self._costs.add(event.family, place, event.global_batch, event.samples_per_s)

    def _is_steady(self, job: JobView, view: ClusterView, occupancy: Occupancy) -> bool:
        return job.movable and all(view.jobs[one].movable for one in occupancy.neighbours(job.job))

    def _place(self, job: JobView, occupancy: Occupancy) -> Place:
        slots = len(job.running_on)
        local = max(1, round(sum(job.running_on.values()) / slots))
        models = sorted({self._types.get(slot, "") for slot in job.running_on})
        return slots, local, "+".join(models), crowds_of(job.job, occupancy)


PRIOR: Final = 0.3  # prior share of its speed that a job loses by a neighbour
RIDGE: Final = 0.5  # weight of the prior, in measurements
SPREAD: Final = 0.1  # prior share that a job loses by being on several nodes


class HarmonyPlacer(Placer):
    """Moves as few jobs as any placer; starts and growths go where the least speed is lost.

    Without `shares`, normalised speeds are learnt from reported speeds.
    """

    def __init__(
        self,
        shares: SpeedShares | None = None,
        costs: NeighbourCosts | None = None,
        moves: Moves = "elastic",
    ) -> None:
        super().__init__(moves=moves)
        self.costs = costs or NeighbourCosts(PRIOR, RIDGE, SPREAD)
        self.shares: SpeedShares = self.costs if shares is None else shares
        self.reports = ReportedSpeeds(self.costs)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from reported speeds."""
        self.reports.observe(event, now)

    def free_slots(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> InterferenceFreeSlots:
        """Return the free slots beside the current workers."""
        self.reports.update(partition.view, partition.now)
        return InterferenceFreeSlots(partition, placed, self.shares)


class InterferenceFreeSlots:
    """Free slots by node, beside the workers of all jobs placed so far."""

    def __init__(
        self,
        partition: Partition,
        placed: Mapping[JobId, Sequence[SlotId]],
        shares: SpeedShares,
    ) -> None:
        self._free = partition.free  # used up
        self._shares = shares
        self._occupancy = Occupancy.of(partition.view)
        for job in partition.running:
            self._occupancy.put(job.job, Counter(map(node_of, placed.get(job.job, ()))))

    def start(self, job: JobView, size: int) -> list[SlotId]:
        """Take slots where the sum of normalised speeds is largest."""
        return self._take(job, [], self._best(job, size, {}))

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Take `own`, and slots where the sum of normalised speeds is largest."""
        return self._take(job, own, self._best(job, size, Counter(map(node_of, own))))

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Take slots where the sum of normalised speeds is largest, the job's own ones first."""
        mine = set(own)
        for slots in self._free.values():
            slots.sort(key=lambda slot: slot not in mine)
        return self._take(job, [], self._best(job, size, {}))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> bool:
        """Take exactly these slots, or none."""
        if any(slot not in self._free.get(node_of(slot), ()) for slot in slots):
            return False
        for slot in slots:
            self._free[node_of(slot)].remove(slot)
        layout = Counter(self._occupancy.nodes.get(job.job, {}))
        self._occupancy.put(job.job, layout + Counter(map(node_of, slots)))
        return True

    def _best(self, job: JobView, size: int, own: Layout) -> Layout:
        free: Mapping[NodeId, int] = {node: len(slots) for node, slots in self._free.items()}
        self._occupancy.take(job.job)
        return LayoutSearch(free, self._occupancy, self._shares).best(job.job, size, own)

    def _take(self, job: JobView, own: list[SlotId], layout: Layout) -> list[SlotId]:
        taken, have = list(own), Counter(map(node_of, own))
        for node, many in layout.items():
            more = many - have[node]
            taken += self._free[node][:more]
            del self._free[node][:more]
        self._occupancy.put(job.job, layout)
        return by_node(taken)
