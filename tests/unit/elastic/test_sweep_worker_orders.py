"""Replies of a sweep worker to orders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.sweep_worker.process import SweepWorkerOrders
from schemas.ids import JobId, Rank, SlotId, Version, WorkerId
from schemas.nodes import Group, Member
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    GroupFormed,
    Quiesced,
    StoreOpened,
    Suspended,
)
from schemas.wire.sweeps import StateRef, UnitOrder
from schemas.wire.worker import GroupOrder
from tests.support.sizes import examples

ME, OTHER = WorkerId("search-1.v1.r0"), WorkerId("search-1.v2.r1")


def order(version: int, stage: int, kind: str, *workers: WorkerId) -> GroupOrder:
    members = tuple(
        Member(rank=Rank(rank), slot=SlotId(f"n/{rank}"), local_batch=4, worker=worker)
        for rank, worker in enumerate(workers)
    )
    group = Group(version=Version(version), members=members, lr=None)
    return GroupOrder(version=Version(version), stage=stage, kind=kind, group=group)


def unit(attempt: int, worker: WorkerId = ME) -> UnitOrder:
    return UnitOrder(
        attempt=attempt, worker=worker, trial=0, values={}, state=None, sources=(),
        result=StateRef(trial=0, version=1), epoch=1, partition=0, evaluate=False,
    )  # fmt: skip


def sweep_worker(
    *heard: GroupOrder, own_id: WorkerId = ME, start_version: int = 1, rank: int = 0
) -> SweepWorkerOrders:
    orders = SweepWorkerOrders(own_id, Version(start_version), Rank(rank))
    orders.port = 29000
    for one in heard:
        orders.receive(one)
    return orders


def formed(version: int) -> Any:
    return ((GroupFormed, {"group": version, "epoch": 0, "step": 0}),)


STARTED = order(1, SWITCH, START, ME)


def test_an_order_makes_a_worker_a_member() -> None:
    orders = sweep_worker()

    assert orders.receive(order(1, PREPARE, START, ME)) == ()
    assert orders.receive(STARTED) == formed(1)
    assert orders.receive(STARTED) == ()
    assert orders.receive(order(1, SETTLED, START, ME)) == ()
    assert orders.receive(order(2, SWITCH, JOIN, ME, OTHER)) == formed(2)
    assert (orders.rank, orders.size, orders.batch, orders.group) == (0, 2, 8, 2)
    assert not orders.leaving


IN_TWO = order(2, SWITCH, JOIN, ME, OTHER)
NEWCOMER: dict[str, Any] = {"own_id": OTHER, "start_version": 2, "rank": 1}
POINT = {"group": 3, "step": 0, "epoch": 0, "has_full_state": True, "port": 29000}


@pytest.mark.parametrize(("earlier", "kind", "heard", "replies"), [
    ([], NEWCOMER, order(2, PREPARE, JOIN, ME, OTHER), ()),
    ([], NEWCOMER, IN_TWO, formed(2)),
    ([STARTED], {}, order(2, PREPARE, JOIN, ME, OTHER), ((StoreOpened, {"group": 2, "port": 29000}),)),
    ([IN_TWO], {}, order(3, PREPARE, RECOVER, ME), ((Quiesced, POINT),)),
    ([IN_TWO, order(3, PREPARE, RECOVER, ME)], {}, order(3, SWITCH, RECOVER, ME), formed(3)),
])  # fmt: skip
def test_an_order_has_its_reply(
    earlier: list[GroupOrder], kind: dict[str, Any], heard: GroupOrder, replies: Any
) -> None:
    assert sweep_worker(*earlier, **kind).receive(heard) == replies
    for report, fields in replies:  # which no type checker sees
        report(job=JobId("search-1"), version=Version(1), rank=Rank(0), index=1, **fields)


def test_a_leaver_stays_if_the_change_is_withdrawn() -> None:
    orders = sweep_worker(order(2, SWITCH, JOIN, ME, OTHER))

    assert orders.receive(order(3, SWITCH, JOIN, OTHER)) == ()
    assert orders.leaving
    orders.receive(order(3, SETTLED, JOIN, ME, OTHER))
    assert not orders.leaving


def test_rank_0_of_a_paused_group_reports_it() -> None:
    orders = sweep_worker(order(2, SWITCH, JOIN, ME, OTHER))
    other = sweep_worker(order(2, SWITCH, JOIN, ME, OTHER), own_id=OTHER, start_version=2, rank=1)
    orders.samples_done = 48

    paused = orders.receive(order(3, SWITCH, SUSPEND))

    at = {"group": 3, "epoch": 0, "step": 0, "samples_done": 48}
    assert paused == ((Suspended, at),)
    assert other.receive(order(3, SWITCH, SUSPEND)) == ()
    assert orders.leaving
    assert other.leaving


def test_each_attempt_is_accepted_once() -> None:
    orders = sweep_worker(STARTED)

    assert orders.assign(unit(5))
    assert orders.pop() == unit(5)
    assert not orders.assign(unit(5))
    assert not orders.assign(unit(4))
    assert not orders.assign(unit(6, OTHER))
    assert orders.pop() is None
    assert orders.assign(unit(7))


heard = st.tuples(
    st.integers(1, 4), st.sampled_from([PREPARE, SWITCH, SETTLED]),
    st.sampled_from([START, JOIN, RECOVER, SUSPEND]), st.sampled_from([(ME,), (OTHER,), (ME, OTHER), ()]),
)  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(heard, max_size=12))
def test_no_order_is_answered_twice(orders: list[Any]) -> None:
    one = sweep_worker()
    answered: list[Any] = []
    for version, stage, kind, workers in orders:
        answered += one.receive(order(version, stage, kind, *workers))

    groups = [fields["group"] for _, fields in answered]
    assert groups == sorted(groups)
    assert len({(kind, fields["group"]) for kind, fields in answered}) == len(answered)
