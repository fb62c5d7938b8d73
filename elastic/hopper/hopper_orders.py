"""What a hopper hears of its job's group, and what it answers: at once, whatever unit runs.

No thread, no clock, no socket. A group of hoppers meets nowhere and shares nothing, so each is a
member as soon as it hears of it.

    order                      stage     answer
    JOIN, this worker first    PREPARE   StoreOpened: the others could meet, if they had to
    START, JOIN, RECOVER       SWITCH    GroupFormed, if it is a member; else it leaves
    RECOVER                    PREPARE   Quiesced: nothing of the group is under way, ever
    SUSPEND                    SWITCH    Suspended, of the group's first; all leave
    any                        SETTLED   who is a member after all stays

Leaving means: after the unit at hand.
"""

from __future__ import annotations

from typing import Any

from schemas.ids import Rank, Version, WorkerId
from schemas.messages.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    GroupFormed,
    Quiesced,
    ScriptReport,
    StoreOpened,
    Suspended,
)
from schemas.messages.hopping import UnitOrder
from schemas.messages.worker import GroupOrder

Answer = tuple[type[ScriptReport], dict[str, Any]]  # a report, and its own fields


class HopperOrders:
    """The newest order of the group, and the unit that waits."""

    def __init__(self, me: WorkerId, born: Version, rank: Rank) -> None:
        """Begin without orders.

        Args:
            born: version of the group that it was started for.
        """
        self._me = me
        self._born = born
        self._latest = (0, 0)  # version, stage
        self._attempt = 0  # the newest that was taken in
        self._waiting: UnitOrder | None = None
        self.port = 0  # that a store would have
        self.samples_done = 0
        self.rank = rank
        self.size = 1  # of the present group
        self.batch = 1  # of it
        self.group = Version(0)  # the present one; 0: none yet
        self.leaving = False

    def receive(self, order: GroupOrder) -> tuple[Answer, ...]:
        """Take in an order; one that is older than the last, or the same, changes nothing."""
        if (order.version, order.stage) <= self._latest:
            return ()
        self._latest = (order.version, order.stage)
        member = order.group.member(self._me)
        if order.stage == PREPARE:
            return self._prepare(order)
        if order.stage >= SETTLED:
            self.leaving = self.leaving and member is None
            return ()
        if order.kind == SUSPEND:
            self.leaving = True
            if self.rank:
                return ()
            done = {"epoch": 0, "step": 0, "samples_done": self.samples_done}
            return ((Suspended, {"group": order.version, **done}),)
        self.leaving = member is None
        if member is None:
            return ()
        self.rank, self.size, self.group = member.rank, len(order.group.members), order.version
        self.batch = order.group.global_batch
        return ((GroupFormed, {"group": order.version, "epoch": 0, "step": 0}),)

    def _prepare(self, order: GroupOrder) -> tuple[Answer, ...]:
        if order.kind == RECOVER:
            still = {"step": 0, "epoch": 0, "full": True, "port": self.port}
            return ((Quiesced, {"group": order.version, **still}),)
        members = order.group.members
        first = members[0].worker if members else None
        if order.kind in {START, JOIN} and first == self._me and order.version != self._born:
            return ((StoreOpened, {"group": order.version, "port": self.port}),)
        return ()

    def assign(self, unit: UnitOrder) -> bool:
        """Take in a unit; whether it is new. An attempt is made once."""
        if unit.worker != self._me or unit.attempt <= self._attempt:
            return False
        self._attempt, self._waiting = unit.attempt, unit
        return True

    def take(self) -> UnitOrder | None:
        """The unit that waits; it is made now."""
        unit, self._waiting = self._waiting, None
        return unit
