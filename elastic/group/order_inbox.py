"""State machine for the controller's orders: it receives orders and returns effects.

It has no thread, clock or socket: `order_listener` is the shell around it. Orders arrive in the
connection's thread. The training thread removes them at the start of a step or when gradients are
reduced.

    order                     stage     effect
    START                     SWITCH    kept for the training thread, which waits to join
    JOIN of the start version SWITCH    kept for the training thread, which waits to join
    JOIN                      PREPARE   rank 0 opens the store for the rendezvous of the new group
    JOIN, SUSPEND             SWITCH    replaces the pending group, which is built in the background
    RECOVER                   PREPARE   waits are cancelled; kept for the training thread
    RECOVER                   SWITCH    kept for the training thread
    any                       SETTLED   a group pending up to this version is withdrawn
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
    """The next group, from the arrival of its order until the switch at its boundary."""

    order: GroupOrder
    needs_build: bool  # False if the processes stay the same, or this worker leaves
    boundary: int | None = None  # last step of the current group; None: not agreed yet
    transfer_steps: int = 0  # number of steps in which newcomers receive the state
    withdrawn: bool = False  # withdrawn during a reduction in which this worker votes for it

    @property
    def version(self) -> int:
        """Version of the group. Versions are never reused."""
        return self.order.version


@dataclass(frozen=True, slots=True)
class CancelWaits:
    """Cancel all waits of the training thread for the current group."""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Serve the store for the rendezvous of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class BuildGroup:
    """Start to connect to the members of `order`, while training continues."""

    order: GroupOrder


@dataclass(frozen=True, slots=True)
class DropBuild:
    """Drop the process group of this version, which is no longer needed."""

    version: int


Effect = CancelWaits | OpenStore | BuildGroup | DropBuild


class OrderInbox:
    """Received orders and the pending group.

    `start_version` is the version of the group for which the worker was started.
    """

    def __init__(self, own_id: WorkerId, start_version: int) -> None:
        self._own_id = own_id
        self._start_version = start_version
        self._latest = (0, 0)  # version, stage
        self._orders: deque[GroupOrder] = deque()  # orders that wait for the training thread
        self.pending: PendingGroup | None = None
        self._voted_for: PendingGroup | None = None  # vote in the running reduction

    # --- orders in

    def receive(
        self, order: GroupOrder, *, version: int, workers: tuple[WorkerId, ...]
    ) -> tuple[Effect, ...]:
        """Process an order and return its effects; an order that is not new has no effect."""
        if (order.version, order.stage) <= self._latest:
            return ()
        self._latest = (order.version, order.stage)
        if order.kind == RECOVER and order.stage < SETTLED:
            self._orders.append(order)
            return (CancelWaits(),) if order.stage == PREPARE else ()
        if order.stage >= SETTLED:
            return self._withdraw(order.version, version)
        if order.kind == START:
            if order.stage == SWITCH:
                self._orders.append(order)
            return ()
        if order.stage == SWITCH and order.version > version:
            return self._set_pending(order, version, workers)
        if order.stage == PREPARE and order.kind == JOIN and self._hosts_store(order):
            return (OpenStore(order.version),)
        return ()

    def _hosts_store(self, order: GroupOrder) -> bool:
        members = order.group.members
        first = members[0].worker if members else None
        return first == self._own_id and order.version != self._start_version

    def _set_pending(
        self, order: GroupOrder, version: int, workers: tuple[WorkerId, ...]
    ) -> tuple[Effect, ...]:
        if order.version == self._start_version and order.kind == JOIN:
            self._orders.append(order)
            return ()
        effects = self._withdraw(order.version, version)
        same = tuple(member.worker for member in order.group.members) == workers
        needs_build = order.group.member(self._own_id) is not None and not same
        self.pending = PendingGroup(order, needs_build)
        return (*effects, BuildGroup(order)) if needs_build else effects

    def _withdraw(self, up_to: int, version: int) -> tuple[Effect, ...]:
        """Drop a pending group of a version up to `up_to`, unless its boundary is agreed."""
        pending = self.pending
        if pending is None or pending.version > up_to:
            return ()
        if pending.boundary is not None or version >= pending.version:
            return ()
        pending.withdrawn = True
        if pending is self._voted_for:
            return ()  # the running reduction includes this worker's vote for the group
        return self._drop(pending)

    def _drop(self, pending: PendingGroup) -> tuple[Effect, ...]:
        if self.pending is pending:
            self.pending = None
        return (DropBuild(pending.version),) if pending.needs_build else ()

    # --- orders out

    def peek(self) -> GroupOrder | None:
        """Return the oldest waiting order without removing it."""
        return self._orders[0] if self._orders else None

    def pop(self) -> GroupOrder:
        """Remove and return the oldest waiting order."""
        return self._orders.popleft()

    # --- the ready flag, in each reduction

    def vote_ready(self, built: Callable[[int], bool]) -> bool:
        """Return whether this worker votes "ready" in the coming reduction.

        `built` returns whether the process group of a version is complete.
        """
        pending = self.pending
        ready = (
            pending is not None
            and pending.boundary is None
            and (not pending.needs_build or built(pending.version))
        )
        self._voted_for = pending if ready else None
        return ready

    def close_vote(
        self, *, unanimous: bool, boundary: int
    ) -> tuple[PendingGroup | None, tuple[Effect, ...]]:
        """Process the vote in the reduction that just ended, and return the effects.

        After a unanimous vote, the boundary (the last step of the current group) is fixed, and the
        pending group is returned, too.
        """
        voted_for, self._voted_for = self._voted_for, None
        if voted_for is None:
            return None, ()
        if not unanimous:
            return None, self._drop(voted_for) if voted_for.withdrawn else ()
        effects: tuple[Effect, ...] = ()
        if self.pending is not voted_for:
            effects = self._drop(self.pending) if self.pending is not None else ()
            self.pending = voted_for
        voted_for.boundary = boundary
        return voted_for, effects

    # --- the end of the pending group

    def switch(self, pending: PendingGroup) -> None:
        """Forget `pending`, which became the current group. A newer pending group stays."""
        if self.pending is pending:
            self.pending = None

    def abandon(self) -> tuple[Effect, ...]:
        """Drop the pending group. The current group broke, so recovery decides the next group."""
        pending, self.pending, self._voted_for = self.pending, None, None
        return (DropBuild(pending.version),) if pending is not None and pending.needs_build else ()
