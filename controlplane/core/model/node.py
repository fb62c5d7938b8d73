"""Node phases and their transition table.

An operator empties a node: what trains there goes elsewhere, and nothing new comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.commands import IllegalTransitionError
from schemas.ids import BootId, JobId, NodeId, Seconds, SlotId, Version, WorkerId
from schemas.nodes import NodeSpec


class Drain(msgspec.Struct, kw_only=True):
    """Why a node is emptied, and until when that may take."""

    user: str
    reason: str
    since: Seconds
    deadline: Seconds | None  # what remains is stopped then, and waits for slots; None: never
    over: bool = False  # the deadline has passed
    empty: bool = False  # nothing is left there, and that was announced
    moved: dict[JobId, Version] = {}  # jobs that grew elsewhere first, and when they had

    @property
    def why(self) -> str:
        """In words, for users."""
        return f"drained by {self.user}" + (f": {self.reason}" if self.reason else "")


class NodePhase(Enum):
    """What the controller thinks of a node."""

    AWAITED = "awaited"  # known from before this controller began, has not greeted it yet
    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


class NodeTrigger(Enum):
    """What can happen to a node."""

    GREETED = "greeted"
    HEARD = "heard"
    SUSPECTED = "suspected"
    LOST = "lost"
    CONTROLLER_STARTED = "controller started"


NEXT: Final[Mapping[tuple[NodePhase, NodeTrigger], NodePhase]] = {
    (NodePhase.AWAITED, NodeTrigger.GREETED): NodePhase.UP,
    (NodePhase.AWAITED, NodeTrigger.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.AWAITED, NodeTrigger.LOST): NodePhase.LOST,
    (NodePhase.AWAITED, NodeTrigger.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.UP, NodeTrigger.GREETED): NodePhase.UP,
    (NodePhase.UP, NodeTrigger.HEARD): NodePhase.UP,
    (NodePhase.UP, NodeTrigger.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.UP, NodeTrigger.LOST): NodePhase.LOST,
    (NodePhase.UP, NodeTrigger.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.SUSPECT, NodeTrigger.GREETED): NodePhase.UP,
    (NodePhase.SUSPECT, NodeTrigger.HEARD): NodePhase.UP,
    (NodePhase.SUSPECT, NodeTrigger.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.SUSPECT, NodeTrigger.LOST): NodePhase.LOST,
    (NodePhase.SUSPECT, NodeTrigger.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.LOST, NodeTrigger.GREETED): NodePhase.UP,
    (NodePhase.LOST, NodeTrigger.SUSPECTED): NodePhase.LOST,
    (NodePhase.LOST, NodeTrigger.LOST): NodePhase.LOST,
    (NodePhase.LOST, NodeTrigger.CONTROLLER_STARTED): NodePhase.LOST,
}


class Node(msgspec.Struct, kw_only=True):
    """Everything the controller knows of one node."""

    node: NodeId
    spec: NodeSpec
    boot: BootId
    phase: NodePhase = NodePhase.UP
    since: Seconds = Seconds(0.0)
    committed: int = 0  # events of `boot` that were taken
    former: list[BootId] = []  # lives before `boot`, the latest few
    foreign: dict[SlotId, WorkerId] = {}  # slots with workers of jobs unknown here
    drain: Drain | None = None  # an operator empties it
    problems: tuple[str, ...] = ()  # why it cannot start workers, as its agent says
    run_id: str = ""  # of the agent's run folder, where what workers print waits to be shipped

    @property
    def usable(self) -> bool:
        """Whether new workers may be ordered there."""
        return self.phase is NodePhase.UP and not self.problems and self.drain is None


def advance(node: Node, trigger: NodeTrigger, now: Seconds) -> bool:
    """Move `node` along the table.

    Args:
        node: it is changed in place.
        now: when, seconds since the epoch.

    Returns:
        Whether its phase changed.

    Raises:
        IllegalTransitionError: if the arrow is not drawn.
    """
    try:
        phase = NEXT[node.phase, trigger]
    except KeyError:
        raise IllegalTransitionError(node.node, node.phase.value, trigger.value, "") from None
    changed = phase is not node.phase
    if changed:
        node.phase, node.since = phase, now
    return changed
