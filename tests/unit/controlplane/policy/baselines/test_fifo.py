"""What fifo answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.baselines.fifo import Fifo
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from tests.support.builders import (
    BATCH,
    N1,
    N2,
    S0,
    S1,
    T0,
    T1,
    A,
    B,
    C,
    cluster_view,
    job_view,
    slot_view,
)
from tests.support.sizes import examples
from tests.support.views import NOW, views

SIZE = settings(max_examples=examples(30), deadline=None)


def waiting(view: ClusterView) -> list[JobView]:
    return [job for job in view.jobs.values() if not job.running_on and job.movable]


# --- whatever the view


@SIZE
@given(view=views())
def test_fifo_leaves_running_jobs_as_they_are(view: ClusterView) -> None:
    plan = Fifo().plan(view, NOW)

    for job in view.jobs.values():
        if job.running_on:
            assert plan.local_batch[job.job] == job.running_on


@SIZE
@given(view=views())
def test_fifo_starts_no_job_before_an_older_one_that_could_ever_fit(view: ClusterView) -> None:
    plan = Fifo().plan(view, NOW)

    able = [j for j in waiting(view) if j.least <= len(view.slots) and j.ready_at <= NOW]
    line = sorted(able, key=lambda job: job.submitted_at)
    for place, job in enumerate(line):
        if job.job not in plan.local_batch:
            behind = [later for later in line[place:] if later.submitted_at > job.submitted_at]
            assert not [later.job for later in behind if later.job in plan.local_batch]


@SIZE
@given(view=views())
def test_fifo_starts_the_head_of_the_line_as_soon_as_it_fits(view: ClusterView) -> None:
    plan = Fifo().plan(view, NOW)

    free = sum(slot.usable for slot in view.slots)
    started = [job.job for job in waiting(view) if job.job in plan.local_batch]
    able = [j for j in waiting(view) if j.least <= len(view.slots) and j.ready_at <= NOW]
    if not started and able:
        oldest = min(job.submitted_at for job in able)
        heads = [job for job in able if job.submitted_at == oldest]
        assert any(min(job.wanted, len(view.slots)) > free for job in heads)


# --- by example


def test_fifo_has_nothing_to_do_in_an_empty_cluster() -> None:
    assert Fifo().plan(cluster_view(version=7), NOW) == Plan(based_on=7)


def test_fifo_starts_the_oldest_job_and_the_next_one_waits() -> None:
    view = cluster_view(slot_view(S0), job_view(B, at=2.0), job_view(A, at=1.0), version=7)

    assert Fifo().plan(view, NOW) == Plan(
        based_on=7,
        local_batch={A: {S0: 64}},
        reasons={
            A: Reason("next_in_line", "its turn by arrival", {"slots": 1}),
            B: Reason("waits", "waits for 1 slot, 0 free", {"needs": 1, "free": 0, "ahead": 0}),
        },
    )


def test_fifo_lets_the_head_of_the_line_hold_back_those_behind_it() -> None:
    view = cluster_view(
        slot_view(S0),
        slot_view(S1, usable=False),
        job_view(A, at=1.0, slots=(2, 2)),
        job_view(B, at=2.0),
        job_view(C, at=3.0),
    )

    assert Fifo().plan(view, NOW) == Plan(
        based_on=1,
        reasons={
            A: Reason("waits", "waits for 2 slots, 1 free", {"needs": 2, "free": 1, "ahead": 0}),
            B: Reason(
                "waits",
                "waits for 1 slot behind 1 job, 1 free",
                {"needs": 1, "free": 1, "ahead": 1},
            ),
            C: Reason(
                "waits",
                "waits for 1 slot behind 2 jobs, 1 free",
                {"needs": 1, "free": 1, "ahead": 2},
            ),
        },
    )


def test_fifo_passes_over_a_job_that_can_never_fit_and_says_why() -> None:
    view = cluster_view(slot_view(S0), job_view(A, at=1.0, slots=(3, 3)), job_view(B, at=2.0))

    assert Fifo().plan(view, NOW) == Plan(
        based_on=1,
        local_batch={B: {S0: 64}},
        reasons={
            A: Reason("too_large", "needs 3 slots, the cluster has 1", {"needs": 3, "slots": 1}),
            B: Reason("next_in_line", "its turn by arrival", {"slots": 1}),
        },
    )


def test_fifo_passes_over_a_job_that_backs_off_and_asks_to_be_woken_for_the_first() -> None:
    view = cluster_view(
        slot_view(S0),
        job_view(A, at=1.0, ready_at=Seconds(104.0)),
        job_view(B, at=2.0, ready_at=Seconds(102.0)),
        job_view(C, at=3.0),
    )

    assert Fifo().plan(view, NOW) == Plan(
        based_on=1,
        local_batch={C: {S0: 64}},
        reasons={
            A: Reason("backing_off", "waits before its next try"),
            B: Reason("backing_off", "waits before its next try"),
            C: Reason("next_in_line", "its turn by arrival", {"slots": 1}),
        },
        wake_at=Seconds(102.0),
    )


def test_fifo_starts_a_job_at_the_moment_its_back_off_is_over() -> None:
    view = cluster_view(slot_view(S0), job_view(A, ready_at=NOW))

    assert Fifo().plan(view, NOW) == Plan(
        based_on=1,
        local_batch={A: {S0: 64}},
        reasons={A: Reason("next_in_line", "its turn by arrival", {"slots": 1})},
    )


def test_fifo_keeps_a_running_job_where_it_is_and_says_nothing_about_it() -> None:
    view = cluster_view(
        slot_view(S0, usable=False), slot_view(S1), job_view(A, running_on={S0: 32})
    )

    assert Fifo().plan(view, NOW) == Plan(based_on=1, local_batch={A: {S0: 32}})


def test_fifo_gives_fewer_than_the_wanted_slots_if_the_cluster_has_no_more() -> None:
    view = cluster_view(slot_view(S0), slot_view(S1), job_view(A, slots=(1, 4), wanted=4))

    assert Fifo().plan(view, NOW).local_batch == {A: {S0: 32, S1: 32}}


def test_fifo_gives_no_slot_without_a_sample() -> None:
    view = cluster_view(
        *(slot_view(slot_id(N1, index)) for index in range(4)),
        job_view(A, slots=(1, 4), wanted=4, batch_size=2),
    )

    assert Fifo().plan(view, NOW).local_batch == {A: {S0: 1, S1: 1}}


def test_fifo_deals_a_batch_out_with_differences_of_at_most_one_sample() -> None:
    slots = [slot_view(slot_id(N1, index)) for index in range(3)]
    view = cluster_view(*slots, job_view(A, slots=(3, 3), batch_size=65))

    assert list(Fifo().plan(view, NOW).local_batch[A].values()) == [22, 22, 21]


@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        ([S0, T0, T1, slot_id(N2, 2)], [T0, T1]),
        ([S0, S1, T0, T1, slot_id(N2, 2)], [S0, S1]),
        ([S0, T0], [S0, T0]),
        ([S0, T0, slot_id(NodeId("n3"), 0)], [S0, T0]),
    ],
    ids=["only one node is large enough", "the tightest fit", "no node alone", "no more nodes"],
)
def test_fifo_puts_a_gang_on_as_few_nodes_as_possible(
    free: list[SlotId], chosen: list[SlotId]
) -> None:
    view = cluster_view(*map(slot_view, free), job_view(A, slots=(2, 2)))

    assert list(Fifo().plan(view, NOW).local_batch[A]) == chosen


def test_fifo_takes_jobs_of_one_moment_in_order_of_arrival() -> None:
    first, second = JobId("z-9"), JobId("a-10")
    view = cluster_view(slot_view(S0), job_view(first, at=1.0), job_view(second, at=1.0))

    assert list(Fifo().plan(view, NOW).local_batch) == [first]


def test_fifo_leaves_a_slot_alone_that_a_changing_job_counts_on_although_nobody_is_there() -> None:
    changing = job_view(A, running_on={S0: BATCH}, movable=False)
    view = cluster_view(slot_view(S0), slot_view(S1), changing, job_view(B, at=1.0))

    assert Fifo().plan(view, NOW).local_batch == {A: {S0: BATCH}, B: {S1: BATCH}}
