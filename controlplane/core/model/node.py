"""Node model, with phases, their transition table, and drains."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from controlplane.core.commands import IllegalTransitionError
from controlplane.core.model.job import JobOwner
from schemas.ids import BootId, JobId, NodeId, Seconds, SlotId, Version, WorkerId
from schemas.nodes import NodeSpec, Reservation


class Drain(msgspec.Struct, kw_only=True):
    """Drain of a node, with its reason, deadline and progress."""

    user: str
    reason: str
    since: Seconds
    deadline: Seconds | None  # when remaining jobs are stopped and wait for slots; None: never
    deadline_passed: bool = False  # the deadline has passed
    cordon: bool = False  # jobs stay, and only new ones do not come
    until: Seconds | None = None  # when it ends by itself; None: an operator ends it
    announced_empty: bool = False  # the node has no jobs, and this was announced
    noticed: bool = False  # by the node itself; ends when the node's agent was started again
    moved: dict[JobId, Version] = {}  # jobs that grew to other nodes, with their versions before
    window: Reservation | None = None  # the reservation for which jobs leave

    def concerns(self, owner: JobOwner) -> bool:
        """True if jobs of this owner leave the node."""
        return not self.cordon and not (self.window is not None and self.window.admits(*owner))

    @property
    def text(self) -> str:
        """Description of the drain for users: the user that requested it, and the reason."""
        if self.window is not None and self.window.purpose != "maintenance":
            return f"kept for {self.window.text}"
        what = "cordoned" if self.cordon else "drained"
        return f"{what} by {self.user}" + (f": {self.reason}" if self.reason else "")


MAX_STRIKES: Final = 3  # jobs that failed on a node in a row before training


class NodePhase(Enum):
    """Phase of a node, as the controller sees it."""

    AWAITED = "awaited"  # known to an earlier controller, but has not greeted this controller yet
    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


class NodeTrigger(Enum):
    """Events that move a node along its table."""

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
    """Node as the controller knows it."""

    node: NodeId
    spec: NodeSpec
    boot: BootId
    phase: NodePhase = NodePhase.UP
    since: Seconds = Seconds(0.0)
    committed: int = 0  # number of the last handled event of `boot`
    former_boots: dict[BootId, int] = {}  # the latest boots before `boot`, with their `committed`
    foreign_workers: dict[
        SlotId, WorkerId
    ] = {}  # slots with workers that this controller did not order
    drain: Drain | None = None  # None: not draining
    keeps: list[Drain] = []  # reservations that are about to begin or have begun; members may start
    windows: list[Reservation] = []  # reservations that have not begun, in order
    problems: tuple[str, ...] = ()  # the agent's reasons why the node cannot start workers
    strikes: dict[JobId, str] = {}  # jobs that failed here before training, with their users
    is_suspected: bool = False  # True: the node may be the cause of these failures
    run_id: str = ""  # id of the agent's run folder, which buffers the output of workers

    def committed_of(self, boot: BootId) -> int:
        """Return the number of the last handled event of a boot."""
        return self.committed if boot == self.boot else self.former_boots.get(boot, 0)

    @property
    def drains(self) -> list[Drain]:
        """All drains, also those of jobs that a reservation does not admit."""
        return [*self.keeps, self.drain] if self.drain is not None else self.keeps

    @property
    def reservations(self) -> list[Reservation]:
        """Reservations that have begun, then those to come."""
        return [*(one.window for one in self.drains if one.window is not None), *self.windows]

    @property
    def usable(self) -> bool:
        """True if new workers may be ordered on the node."""
        return self.phase is NodePhase.UP and not (self.problems or self.drain or self.is_suspected)

    @property
    def suspicion(self) -> str:
        """Why the node is suspected, for all users; empty if it is not."""
        if not self.is_suspected:
            return ""
        remedy = f"repair it, then `ones node undrain {self.node}`"
        return f"jobs failed here before training: {', '.join(self.strikes)}; {remedy}"


def advance(node: Node, trigger: NodeTrigger, now: Seconds) -> bool:
    """Move `node` along the transition table. Return True if its phase changed."""
    try:
        phase = NEXT[node.phase, trigger]
    except KeyError:
        raise IllegalTransitionError(node.node, node.phase.value, trigger.value) from None
    changed = phase is not node.phase
    if changed:
        node.phase, node.since = phase, now
    return changed
