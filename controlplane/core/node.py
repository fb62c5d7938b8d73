"""Node phases and their transition table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.errors import IllegalTransitionError
from schemas.cluster import NodeSpec
from schemas.ids import BootId, NodeId, Seconds, SlotId, WorkerId


class NodePhase(Enum):
    """What the controller thinks of a node."""

    AWAITED = "awaited"  # known from before this controller began, has not greeted it yet
    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


class NodeTurn(Enum):
    """What can happen to a node."""

    GREETED = "greeted"
    HEARD = "heard"
    SUSPECTED = "suspected"
    LOST = "lost"
    CONTROLLER_STARTED = "controller started"


NEXT: Final[Mapping[tuple[NodePhase, NodeTurn], NodePhase]] = {
    (NodePhase.AWAITED, NodeTurn.GREETED): NodePhase.UP,
    (NodePhase.AWAITED, NodeTurn.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.AWAITED, NodeTurn.LOST): NodePhase.LOST,
    (NodePhase.AWAITED, NodeTurn.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.UP, NodeTurn.GREETED): NodePhase.UP,
    (NodePhase.UP, NodeTurn.HEARD): NodePhase.UP,
    (NodePhase.UP, NodeTurn.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.UP, NodeTurn.LOST): NodePhase.LOST,
    (NodePhase.UP, NodeTurn.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.SUSPECT, NodeTurn.GREETED): NodePhase.UP,
    (NodePhase.SUSPECT, NodeTurn.HEARD): NodePhase.UP,
    (NodePhase.SUSPECT, NodeTurn.SUSPECTED): NodePhase.SUSPECT,
    (NodePhase.SUSPECT, NodeTurn.LOST): NodePhase.LOST,
    (NodePhase.SUSPECT, NodeTurn.CONTROLLER_STARTED): NodePhase.AWAITED,
    (NodePhase.LOST, NodeTurn.GREETED): NodePhase.UP,
    (NodePhase.LOST, NodeTurn.SUSPECTED): NodePhase.LOST,
    (NodePhase.LOST, NodeTurn.LOST): NodePhase.LOST,
    (NodePhase.LOST, NodeTurn.CONTROLLER_STARTED): NodePhase.LOST,
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


def advance(node: Node, turn: NodeTurn, now: Seconds) -> bool:
    """Move `node` along the table; returns whether its phase changed.

    Raises:
        IllegalTransitionError: if the arrow is not drawn.
    """
    try:
        phase = NEXT[node.phase, turn]
    except KeyError:
        raise IllegalTransitionError(node.node, node.phase.value, turn.value, "") from None
    changed = phase is not node.phase
    if changed:
        node.phase, node.since = phase, now
    return changed
