"""Placers by name, and `ScoredPlacer`, which puts each worker on the node with the lowest score."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal, Protocol, cast

from controlplane.policy.api import ClusterView, JobView, PolicyEvent
from controlplane.policy.placement.free_slots import Mode, Moves, Placer, by_node
from controlplane.policy.placement.slot_partition import Partition
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of

Score = tuple[float, ...]  # compared lexicographically; the least is best


@dataclass(slots=True)
class NodeLoad:
    """Workers and free slots of a node in the plan that is being made."""

    node: NodeId
    slots: int  # all slots of the node, used or not
    free: list[SlotId]  # usable slots first
    workers: dict[JobId, int] = field(default_factory=dict)  # job -> workers on this node


class NodeScorer(Protocol):
    """Scorer of nodes for one more worker of a job."""

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from an event; by default do nothing."""

    def begin(self, view: ClusterView, loads: Sequence[NodeLoad], now: Seconds) -> None:
        """Start a plan for this view; `loads` are updated while jobs are placed."""

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Return the cost of one more worker of `job` on this node, which has a free slot.

        The cost must not depend on anything that the plan changes on other nodes.
        """
        ...


class ScoredPlacer(Placer):
    """Placer that puts each worker on the node with the least score and moves few jobs.

    Ties are won by a node that the job already uses, then by the first node in the view. Scores
    decide on nodes, never on whether a job runs.
    """

    def __init__(self, scorer: NodeScorer, moves: Moves = "elastic") -> None:
        super().__init__(moves=moves)
        self._scorer = scorer

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the scorer."""
        self._scorer.observe(event, now)

    def free_slots(
        self, partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]
    ) -> ScoredFreeSlots:
        """Return the free slots, which are chosen by score."""
        loads = node_loads(partition, placed)
        self._scorer.begin(partition.view, loads, partition.now)
        return ScoredFreeSlots(loads, self._scorer)


class ScoredFreeSlots:
    """The free slots, which are assigned one by one on the node with the least score."""

    def __init__(self, loads: Sequence[NodeLoad], scorer: NodeScorer) -> None:
        self._loads = loads
        self._scorer = scorer
        self._by_node = {load.node: load for load in loads}

    def grow(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return `own` and the free slots with the least scores."""
        return by_node([*own, *self._take(job, size - len(own), own)])

    def pack(self, job: JobView, own: list[SlotId], size: int) -> list[SlotId]:
        """Return the slots with the least scores; the job's own slots win ties."""
        return by_node(self._take(job, size, own))

    def claim(self, job: JobView, slots: Sequence[SlotId]) -> None:
        """Remove exactly these free slots."""
        for slot in slots:
            self._enter(job, self._by_node[node_of(slot)], slot)

    def _take(self, job: JobView, size: int, own: Collection[SlotId]) -> list[SlotId]:
        """Take slots one by one; after each, only the node of the last worker is scored again."""
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
        present = job.job in load.workers or any(slot in own for slot in load.free)
        return self._scorer.score(job, load), not present, place

    def _enter(self, job: JobView, load: NodeLoad, slot: SlotId) -> None:
        load.free.remove(slot)
        load.workers[job.job] = load.workers.get(job.job, 0) + 1


def node_loads(partition: Partition, placed: Mapping[JobId, Sequence[SlotId]]) -> list[NodeLoad]:
    """Return the load of every node: free slots, and workers of jobs that stay as in `placed`."""
    sizes = Counter(slot.node for slot in partition.view.slots)
    loads = {node: NodeLoad(node, sizes[node], free) for node, free in partition.free.items()}
    may_move = {job.job for job in partition.running}
    for name, job in partition.view.jobs.items():
        stays = placed.get(name, ()) if name in may_move else job.running_on
        for node, many in Counter(map(node_of, stays)).items():
            if node in loads:
                loads[node].workers[name] = many
    return list(loads.values())


class LeastLoaded(NodeScorer):
    """Scorer that spreads workers as Kubernetes does, to the node with the least share in use.

    A slot that is unused but cannot be assigned is treated as unused, unlike in mode `spread`.
    """

    def score(self, job: JobView, load: NodeLoad) -> Score:
        """Return the share of the node's slots that are in use."""
        return (sum(load.workers.values()) / load.slots,)


PlacerName = Literal[
    "roomiest", "consolidate", "spread", "tetris", "tetris-resources", "emptiest",
    "load-balancing", "lif-linear", "lif-quadratic", "harmony",
]  # fmt: skip
SCORERS: Final[Mapping[str, str]] = {  # for `ScoredPlacer`: module:class, made without arguments
    "load-balancing": "placers:LeastLoaded",
    "tetris-resources": "usage_placers:AlignedPacking",
    "lif-linear": "usage_placers:LinearInterference",
    "lif-quadratic": "usage_placers:QuadraticInterference",
}
LEARNING_PLACERS: Final[frozenset[str]] = frozenset(  # these need telemetry
    {"harmony", "lif-linear", "lif-quadratic", "tetris-resources"}
)


def make_placer(name: PlacerName, moves: Moves = "elastic") -> Placer:
    """Return a new placer with this name."""
    if name == "harmony":
        placer: Placer = _load("harmony_placer:HarmonyPlacer")(moves=moves)
        return placer
    if name in SCORERS:
        return ScoredPlacer(_load(SCORERS[name])(), moves)
    return Placer(cast("Mode", name), moves)


def _load(location: str) -> Any:
    return pkgutil.resolve_name(f"controlplane.policy.placement.{location}")
