"""State machine of the controller's orders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.group.order_inbox import BuildGroup, CancelWaits, DropBuild, OpenStore, OrderInbox
from schemas.ids import JobId, NodeId, Rank, Version, WorkerId, slot_id, worker_id
from schemas.nodes import Group, Member
from schemas.wire.agent import JOIN, PREPARE, RECOVER, SETTLED, START, SUSPEND, SWITCH
from schemas.wire.worker import GroupOrder

JOB = JobId("toy-1")
A, B, C = (worker_id(JOB, Version(1), Rank(rank)) for rank in range(3))
NOW = (A, B)  # the present group, of version 1


def order(
    version: int, stage: int = SWITCH, kind: str = JOIN, workers: Sequence[WorkerId] = (A, B, C)
) -> GroupOrder:
    members = tuple(
        Member(rank=Rank(i), slot=slot_id(NodeId("n"), i), local_batch=4, worker=worker)
        for i, worker in enumerate(workers)
    )
    group = Group(version=Version(version), members=members, lr=None)
    return GroupOrder(version=Version(version), stage=stage, kind=kind, group=group)


class Inbox(OrderInbox):
    def __init__(self, own_id: WorkerId = A, start_version: int = 1) -> None:
        super().__init__(own_id, start_version)

    def hear(self, heard: GroupOrder, version: int = 1) -> tuple[object, ...]:
        return self.receive(heard, version=version, workers=NOW)


def built(_: int) -> bool:
    return True


def test_an_ordered_group_is_built_and_gets_a_boundary() -> None:
    inbox = Inbox()

    assert inbox.hear(order(2)) == (BuildGroup(order(2)),)
    assert not inbox.vote_ready(lambda _: False)
    assert inbox.close_vote(unanimous=False, boundary=0) == (None, ())
    assert inbox.vote_ready(built)
    pending, effects = inbox.close_vote(unanimous=True, boundary=12)
    assert effects == ()
    assert pending is inbox.pending
    assert (pending.version, pending.boundary) == (2, 12)
    assert not inbox.vote_ready(built)  # the others know it by now
    inbox.switch(pending)
    assert inbox.pending is None


@pytest.mark.parametrize(
    "heard",
    [order(2, workers=NOW), order(2, workers=[B]), order(2, kind=SUSPEND, workers=[])],
    ids=["another batch", "this worker leaves", "the job is suspended"],
)
def test_a_change_without_a_new_group_is_ready_at_once(heard: GroupOrder) -> None:
    inbox = Inbox()

    assert inbox.hear(heard) == ()
    assert inbox.vote_ready(lambda _: False)


def test_rank_0_opens_the_store() -> None:
    prepare = order(2, PREPARE)

    assert Inbox().hear(prepare) == (OpenStore(2),)
    assert Inbox(B).hear(prepare) == ()
    assert Inbox(A, start_version=2).hear(prepare) == ()  # it says its port when it is ready


@pytest.mark.parametrize(("heard", "effects", "pending"), [
    (order(2), (), 2),
    (order(2, PREPARE), (), 2),
    (order(1, SETTLED), (), 2),
    (order(3), (DropBuild(2), BuildGroup(order(3))), 3),
    (order(2, SETTLED), (DropBuild(2),), None),
], ids=["same", "earlier stage", "earlier version", "newer", "withdrawn"])  # fmt: skip
def test_an_order_meets_a_pending_group(
    heard: GroupOrder, effects: tuple[object, ...], pending: int | None
) -> None:
    inbox = Inbox()
    inbox.hear(order(2))

    assert inbox.hear(heard) == effects
    assert (inbox.pending.version if inbox.pending else None) == pending
    assert inbox.vote_ready(built) == (pending is not None)


def test_an_order_for_an_earlier_group_is_ignored() -> None:
    inbox = Inbox()

    assert (inbox.hear(order(2), version=2), inbox.pending) == ((), None)


@pytest.mark.parametrize(("heard", "effects", "agreed", "disagreed"), [
    (order(2, SETTLED), (), (2, ()), (None, (DropBuild(2),))),
    (order(3), (BuildGroup(order(3)),), (2, (DropBuild(3),)), (3, (DropBuild(2),))),
], ids=["withdrawn", "newer"])  # fmt: skip
def test_an_order_in_a_vote_waits_for_the_result(
    heard: GroupOrder,
    effects: tuple[object, ...],
    agreed: tuple[int, tuple[object, ...]],
    disagreed: tuple[int | None, tuple[object, ...]],
) -> None:
    for unanimous, (pending, after) in ((True, agreed), (False, disagreed)):
        inbox = Inbox()
        inbox.hear(order(2))
        voted_for = inbox.pending
        inbox.vote_ready(built)
        assert inbox.hear(heard) == effects

        found = voted_for if unanimous else None
        assert inbox.close_vote(unanimous=unanimous, boundary=12) == (found, after)
        assert (inbox.pending.version if inbox.pending else None) == pending
        if unanimous and voted_for:
            assert (inbox.pending, voted_for.boundary) == (voted_for, 12)


def test_an_agreed_group_cannot_be_withdrawn() -> None:
    inbox = Inbox()
    inbox.hear(order(2))
    inbox.vote_ready(built)
    pending, _ = inbox.close_vote(unanimous=True, boundary=12)

    assert inbox.hear(order(2, SETTLED)) == ()
    assert inbox.pending is pending is not None


def test_a_joining_worker_gets_its_order() -> None:
    starts, joins = Inbox(C, start_version=1), Inbox(C, start_version=2)

    assert starts.hear(order(1, PREPARE, START), version=0) == ()
    assert starts.peek() is None
    assert starts.hear(order(1, SWITCH, START), version=0) == ()
    assert starts.pop() == order(1, SWITCH, START)
    assert joins.hear(order(2), version=0) == ()
    assert joins.peek() == order(2)
    assert joins.pending is None


def test_recovery_cancels_waits_and_the_pending_group() -> None:
    inbox = Inbox()
    inbox.hear(order(2))
    inbox.vote_ready(built)

    assert inbox.hear(order(3, PREPARE, RECOVER)) == (CancelWaits(),)
    assert inbox.hear(order(3, SWITCH, RECOVER)) == ()
    assert inbox.abandon() == (DropBuild(2),)
    assert inbox.pending is None
    assert inbox.close_vote(unanimous=True, boundary=12) == (None, ())
    assert [inbox.pop().stage, inbox.pop().stage] == [PREPARE, SWITCH]
    assert inbox.peek() is None
    assert inbox.hear(order(3, SETTLED, RECOVER)) == ()
