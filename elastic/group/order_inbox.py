"""The controller's orders as a state machine: orders in, what is to be done about them out.

No thread, no clock, no socket: `order_listener` is the shell around it. Orders come in on the
channel's thread; the training thread takes them out where a step begins or gradients are summed.

    order            stage     what happens
    START            SWITCH    kept for the training thread, which waits to join
    JOIN, born for   SWITCH    the same
    JOIN             PREPARE   rank 0 opens the store that the new group meets at
    JOIN, SUSPEND    SWITCH    replaces what was pending; the next group is built in the background
    RECOVER          PREPARE   waits are called off; kept for the training thread
    RECOVER          SWITCH    kept for the training thread
    any              SETTLED   what is pending up to this version is withdrawn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.wire.agent import JOIN, PREPARE, RECOVER, SETTLED, START, SWITCH
from schemas.wire.worker import GroupOrder


@dataclass(slots=True)
class PendingGroup:
    """The group that follows, from its order to its boundary."""

    order: GroupOrder
    builds: bool  # a process group; else the processes stay as they are, or this worker leaves
    boundary: int | None = None  # last step of the present group; None: not agreed on yet
    transfer_steps: int = 0  # in which the state goes to newcomers
    withdrawn: bool = False  # while its ready flag counts in a reduction that is under way

    @property
    def version(self) -> int:
        """Of the group; never used again."""
        return self.order.version


@dataclass(frozen=True, slots=True)
class CallOffWaits:
    """The training thread must not wait for the present group any longer."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Serve the store that the members of this version meet at."""

    version: int


@dataclass(frozen=True, slots=True)
class BuildGroup:
    """Begin to meet the members of `order`, while training goes on."""

    order: GroupOrder


@dataclass(frozen=True, slots=True)
class DropBuild:
    """The process group of this version is not wanted any more."""

    version: int


Effect = CallOffWaits | OpenStore | BuildGroup | DropBuild


class OrderInbox:
    """Orders that were heard, and the group that follows."""

    def __init__(self, me: WorkerId, born: int) -> None:
        """Begin without orders.

        Args:
            born: version of the group that it was started for.
        """
        self._me = me
        self._born = born
        self._latest = (0, 0)  # version, stage
        self._orders: deque[GroupOrder] = deque()  # for the training thread, when it waits
        self.pending: PendingGroup | None = None
        self._flagged: PendingGroup | None = None  # a reduction says that this one is ready

    # --- orders in

    def receive(
        self, order: GroupOrder, *, version: int, workers: tuple[WorkerId, ...]
    ) -> tuple[Effect, ...]:
        """Take in an order; one that is older than the last, or the same, changes nothing."""
        if (order.version, order.stage) <= self._latest:
            return ()
        self._latest = (order.version, order.stage)
        if order.kind == RECOVER and order.stage < SETTLED:
            self._orders.append(order)
            return (CallOffWaits(),) if order.stage == PREPARE else ()
        if order.stage >= SETTLED:
            return self._withdraw(order.version, version)
        if order.kind == START:
            if order.stage == SWITCH:
                self._orders.append(order)
            return ()
        if order.stage == SWITCH and order.version > version:
            return self._follow(order, version, workers)
        if order.stage == PREPARE and order.kind == JOIN and self._serves(order):
            return (OpenStore(order.version),)
        return ()

    def _serves(self, order: GroupOrder) -> bool:
        members = order.group.members
        first = members[0].worker if members else None
        return first == self._me and order.version != self._born

    def _follow(
        self, order: GroupOrder, version: int, workers: tuple[WorkerId, ...]
    ) -> tuple[Effect, ...]:
        if order.version == self._born and order.kind == JOIN:
            self._orders.append(order)
            return ()
        effects = self._withdraw(order.version, version)
        same = tuple(member.worker for member in order.group.members) == workers
        builds = order.group.member(self._me) is not None and not same
        self.pending = PendingGroup(order, builds)
        return (*effects, BuildGroup(order)) if builds else effects

    def _withdraw(self, up_to: int, version: int) -> tuple[Effect, ...]:
        """Forget what is pending, unless its boundary is agreed on."""
        pending = self.pending
        if pending is None or pending.version > up_to:
            return ()
        if pending.boundary is not None or version >= pending.version:
            return ()
        pending.withdrawn = True
        if pending is self._flagged:
            return ()  # it counts in a reduction that is under way
        return self._drop(pending)

    def _drop(self, pending: PendingGroup) -> tuple[Effect, ...]:
        if self.pending is pending:
            self.pending = None
        return (DropBuild(pending.version),) if pending.builds else ()

    # --- orders out

    def first(self) -> GroupOrder | None:
        """The oldest order that waits, left where it is."""
        return self._orders[0] if self._orders else None

    def take(self) -> GroupOrder:
        """The oldest order that waits.

        Raises:
            IndexError: if there is none.
        """
        return self._orders.popleft()

    # --- the ready flag, in each reduction

    def raise_flag(self, built: Callable[[int], bool]) -> bool:
        """Whether this worker says in the coming reduction that it is ready.

        Args:
            built: whether the process group of a version is there.
        """
        pending = self.pending
        ready = (
            pending is not None
            and pending.boundary is None
            and (not pending.builds or built(pending.version))
        )
        self._flagged = pending if ready else None
        return ready

    def lower_flag(
        self, *, unanimous: bool, boundary: int
    ) -> tuple[PendingGroup | None, tuple[Effect, ...]]:
        """The reduction is over.

        Args:
            unanimous: every rank said that it is ready.
            boundary: the last step of the present group, if they did.

        Returns:
            The group whose boundary is agreed on now, if any, and what is to be done.
        """
        flagged, self._flagged = self._flagged, None
        if flagged is None:
            return None, ()
        if not unanimous:
            return None, self._drop(flagged) if flagged.withdrawn else ()
        effects: tuple[Effect, ...] = ()
        if self.pending is not flagged:
            effects = self._drop(self.pending) if self.pending is not None else ()
            self.pending = flagged
        flagged.boundary = boundary
        return flagged, effects

    # --- the end of what is pending

    def cross(self, pending: PendingGroup) -> None:
        """The boundary is reached: `pending` is present.

        Args:
            pending: whose boundary was agreed on; a newer one that follows it stays.
        """
        if self.pending is pending:
            self.pending = None

    def abandon(self) -> tuple[Effect, ...]:
        """The present group broke: nothing follows it but what recovery brings."""
        pending, self.pending, self._flagged = self.pending, None, None
        return (DropBuild(pending.version),) if pending is not None and pending.builds else ()
