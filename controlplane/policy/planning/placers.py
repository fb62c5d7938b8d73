"""Who places: every placer by its name, imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, cast

from controlplane.policy.api import PolicyEvent
from controlplane.policy.planning.node_rooms import Mode
from controlplane.policy.planning.scored_rooms import ScoredPlacer
from controlplane.policy.planning.slot_partition import Partition
from controlplane.policy.planning.slot_placer import Moves, Placer
from schemas.ids import JobId, Seconds, SlotId

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
_ROOM: Final = "controlplane.policy.planning.interference"
SCORERS: Final[Mapping[str, str]] = {  # of `ScoredPlacer`s: module:class, made without arguments
    "load-balancing": "controlplane.policy.planning.scored_rooms:LeastLoaded",
    "tetris-resources": f"{_ROOM}.aligned_packing:AlignedPacking",
    "lif-linear": f"{_ROOM}.least_interference:LinearInterference",
    "lif-quadratic": f"{_ROOM}.least_interference:QuadraticInterference",
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
