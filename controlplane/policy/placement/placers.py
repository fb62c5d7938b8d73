"""Who places: every placer by its name, imported when it is asked for.

Free slots by node, taken worker by worker where a score is least.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal, Protocol, cast

from controlplane.policy.api import ClusterView, JobView, PolicyEvent
from controlplane.policy.placement.free_slots import Mode, Moves, Placer, by_node
from controlplane.policy.placement.slot_partition import Partition
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

Score = tuple[float, ...]  # compared place by place; the least is best


@dataclass(slots=True)
class NodeLoad:
    """Who would be on a node by the plan so far."""

    node: NodeId
    slots: int  # that it has, whoever is on them
    free: list[SlotId]  # usable ones first
    workers: dict[JobId, int] = field(default_factory=dict)  # of every job there


class NodeScorer(Protocol):
    """Says how good a node is for one more worker of a job."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from what happened, if there is something to learn.

        Args:
            now: seconds on the controller's clock.
        """
        ...

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """A plan for this view is being made.

        Args:
            loads: of every node; who is placed enters them, so that they are as planned at last.
            now: seconds on the controller's clock.
        """
        ...

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """How bad it is to put one more worker of `job` on this node; the least is chosen.

        May depend on nothing else that the plan changes.

        Args:
            job: that is being placed; workers of it may be there already.
            load: with at least one free slot.
        """
        ...


class ScoredPlacer(Placer):
    """Moves as little as any placer, and puts every worker where a score is least.

    Among equals a node that the job is on, then the first in the view. Scores say which nodes,
    never whether a job runs.
    """

    def __init__(self, scorer: NodeScorer, moves: Moves = "elastic") -> None:
        """Begin without reservations."""
        super().__init__(moves=moves)
        self._scorer = scorer

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Let the scorer learn."""
        self._scorer.observe(event, now)

    def rooms(self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]) -> ScoredRooms:
        """What is free, by score."""
        loads = node_loads(partition, placed)
        self._scorer.begin(partition.view, loads, partition.now)
        return ScoredRooms(loads, self._scorer)


class ScoredRooms:
    """Nodes with what is free and who is there; worker by worker to the least score."""

    def __init__(self, loads: Sequence[NodeLoad], scorer: NodeScorer) -> None:
        """Begin before the first start.

        Args:
            loads: of every node, in the order of the view.
        """
        self._loads = loads
        self._scorer = scorer
        self._by_node = {load.node: load for load in loads}

    def start(self, job: JobView, size: int) -> list[SlotId]:
        """Where scores are least."""
        return by_node(self._take(job, size, ()))

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """`own`, and where scores are least."""
        return by_node([*own, *self._take(job, size - len(own), own)])

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Where scores are least; its own where others are no better."""
        return by_node(self._take(job, size, own))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> bool:
        """Take exactly these, or nothing."""
        loads = [self._by_node.get(node_of(slot)) for slot in slots]
        if any(
            load is None or slot not in load.free for load, slot in zip(loads, slots, strict=True)
        ):
            return False
        for slot in slots:
            self._enter(job, self._by_node[node_of(slot)], slot)
        return True

    def _take(self, job: JobView, size: int, own: Collection[SlotId]) -> list[SlotId]:
        """Only the node that took a worker is scored again: the others are as they were."""
        heap = [
            (self._key(job, load, place, own), place)
            for place, load in enumerate(self._loads)
            if load.free and size
        ]
        heapify(heap)
        taken: list[SlotId] = []
        while len(taken) < size:
            _, place = heappop(heap)
            load = self._loads[place]
            slot = next((slot for slot in load.free if slot in own), load.free[0])
            self._enter(job, load, slot)
            taken.append(slot)
            if load.free:
                heappush(heap, (self._key(job, load, place, own), place))
        return taken

    def _key(
        self, job: JobView, load: NodeLoad, place: int, own: Collection[SlotId]
    ) -> tuple[Score, bool, int]:
        there = job.job in load.workers or any(slot in own for slot in load.free)
        return self._scorer.score(job, load), not there, place

    def _enter(self, job: JobView, load: NodeLoad, slot: SlotId) -> None:
        load.free.remove(slot)
        load.workers[job.job] = load.workers.get(job.job, 0) + 1


def node_loads(partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]) -> list[NodeLoad]:
    """Every node with what is free, and the workers of those who stay.

    Args:
        partition: with the slots that jobs gave up.
        placed: slots of those `running` jobs that keep some. Who runs and is not `running` stays.
    """
    sizes = Counter(slot.node for slot in partition.view.slots)
    loads = {node: NodeLoad(node, sizes[node], free) for node, free in partition.free.items()}
    may_move = {job.job for job in partition.running}
    for name, job in partition.view.jobs.items():
        stays = placed.get(name, ()) if name in may_move else job.running_on
        for node, many in Counter(map(node_of, stays)).items():
            if node in loads:
                loads[node].workers[name] = many
    return list(loads.values())


class LeastLoaded:
    """Kubernetes' spreading: the node whose slots are used least by the workers of all jobs.

    A slot that nobody uses and that cannot be given out counts as unused, other than for `spread`.
    """

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """There is nothing to learn."""

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """There is nothing to prepare."""

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """The share of its slots that is in use."""
        return (sum(load.workers.values()) / load.slots,)


PlacerName = Literal[
    "roomiest",
    "consolidate",
    "spread",
    "tetris",
    "tetris-resources",
    "emptiest",
    "load-balancing",
    "lif-linear",
    "lif-quadratic",
    "harmony",
]
_ROOM: Final = "controlplane.policy.placement"
SCORERS: Final[Mapping[str, str]] = {  # of `ScoredPlacer`s: module:class, made without arguments
    "load-balancing": f"{_ROOM}.placers:LeastLoaded",
    "tetris-resources": f"{_ROOM}.usage_placers:AlignedPacking",
    "lif-linear": f"{_ROOM}.usage_placers:LinearInterference",
    "lif-quadratic": f"{_ROOM}.usage_placers:QuadraticInterference",
}
PLACERS: Final[Mapping[str, str]] = {  # that know nodes as a whole: module:class, called with moves
    "harmony": f"{_ROOM}.harmony_placer:HarmonyPlacer",
}
LEARNING_PLACERS: Final[frozenset[str]] = frozenset(  # they have to hear of steps
    {"harmony", "lif-linear", "lif-quadratic", "tetris-resources"}
)


class SlotPlacer(Protocol):
    """From sizes to slots, for policies that decide only how many; it may learn."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from what happened.

        Args:
            now: seconds on the controller's clock.
        """
        ...

    def place(
        self, partition: Partition, sizes: Mapping[JobId, int], packed: Collection[JobId] = ()
    ) -> dict[JobId, list[SlotId]]:
        """Slots of each job, in order of rank, node by node.

        Args:
            sizes: slots of its `running` and `waiting` jobs, in the order in which those are
                placed that do not keep theirs; at most its `room` in all. Absent: none.
            packed: running jobs that may give up their slots for better ones.
        """
        ...

    def restarts(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> tuple[JobId, ...]:
        """Jobs that have to stop to get what they were given.

        Args:
            partition: what of the view can be given out.
            placed: slots of each job, as `place` gave them.
        """
        ...


def placer_of(name: PlacerName, moves: Moves = "elastic") -> SlotPlacer:
    """A new placer of that name.

    Args:
        name: as options of policies have it.
    """
    if name in PLACERS:
        placer: SlotPlacer = _load(PLACERS[name])(moves=moves)
        return placer
    if name in SCORERS:
        return ScoredPlacer(_load(SCORERS[name])(), moves)
    return Placer(cast("Mode", name), moves)


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
