"""Policy `fifo`."""

from __future__ import annotations

from typing import Any

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
)  # fmt: skip
from tests.support.sizes import examples
from tests.support.views import NOW, views

SIZE = settings(max_examples=examples(30), deadline=None)
STARTS = Reason("next_in_line", "its turn by arrival", {"slots": 1})
BACKS_OFF = Reason("backing_off", "waits before the next attempt")


def waits(text: str, needs: int, free: int, ahead: int) -> Reason:
    return Reason("waits", text, {"needs": needs, "free": free, "ahead": ahead})


@SIZE
@given(view=views())
def test_running_jobs_stay_and_the_queue_starts_from_its_head(view: ClusterView) -> None:
    plan = Fifo().plan(view, NOW)

    for job in view.jobs.values():
        if job.running_on:
            assert plan.local_batch[job.job] == job.running_on
    waiting = [job for job in view.jobs.values() if not job.running_on and job.movable]
    able = [j for j in waiting if j.least <= len(view.slots) and j.ready_at <= NOW]
    queue = sorted(able, key=lambda job: job.submitted_at)
    for place, job in enumerate(queue):
        if job.job not in plan.local_batch:
            behind = [later for later in queue[place:] if later.submitted_at > job.submitted_at]
            assert not [later.job for later in behind if later.job in plan.local_batch]
    free = sum(slot.usable for slot in view.slots)
    if able and not any(job.job in plan.local_batch for job in waiting):
        heads = [job for job in able if job.submitted_at == queue[0].submitted_at]
        assert any(min(job.wanted, len(view.slots)) > free for job in heads)


TOO_LARGE = Reason("too_large", "needs 3 slots, the cluster has 1", {"needs": 3, "slots": 1})
LATER, SOON = Seconds(104.0), Seconds(102.0)


@pytest.mark.parametrize(
    ("parts", "batches", "reasons", "wake_at"),
    [
        ([], {}, {}, None),
        ([slot_view(S0), job_view(B, at=2.0), job_view(A, at=1.0)], {A: {S0: 64}},
         {A: STARTS, B: waits("waits for 1 slot, 0 free", 1, 0, 0)}, None),
        ([slot_view(S0), slot_view(S1, usable=False), job_view(A, at=1.0, slots=(2, 2)),
          job_view(B, at=2.0), job_view(C, at=3.0)], {},
         {A: waits("waits for 2 slots, 1 free", 2, 1, 0),
          B: waits("waits for 1 slot behind 1 job, 1 free", 1, 1, 1),
          C: waits("waits for 1 slot behind 2 jobs, 1 free", 1, 1, 2)}, None),
        ([slot_view(S0), job_view(A, at=1.0, slots=(3, 3)), job_view(B, at=2.0)], {B: {S0: 64}},
         {A: TOO_LARGE, B: STARTS}, None),
        ([slot_view(S0), job_view(A, at=1.0, ready_at=LATER), job_view(B, at=2.0, ready_at=SOON),
          job_view(C, at=3.0)], {C: {S0: 64}}, {A: BACKS_OFF, B: BACKS_OFF, C: STARTS}, SOON),
        ([slot_view(S0), job_view(A, ready_at=NOW)], {A: {S0: 64}}, {A: STARTS}, None),
    ],
    ids=[
        "an empty cluster", "the oldest starts", "a large job holds back the queue",
        "a job that never fits is passed over", "jobs that back off are passed over",
        "a back-off is over",
    ],
)  # fmt: skip
def test_plans_by_example(parts: list[Any], batches: Any, reasons: Any, wake_at: Any) -> None:
    plan = Plan(based_on=7, local_batch=batches, reasons=reasons, wake_at=wake_at)

    assert Fifo().plan(cluster_view(*parts, version=7), NOW) == plan


@pytest.mark.parametrize(
    ("slots", "job", "batches"),
    [
        (2, job_view(A, slots=(1, 4), wanted=4), [32, 32]),
        (4, job_view(A, slots=(1, 4), wanted=4, batch_size=2), [1, 1]),
        (3, job_view(A, slots=(3, 3), batch_size=65), [22, 22, 21]),
    ],
    ids=["no more slots in the cluster", "a sample for each slot", "a batch that does not divide"],
)
def test_a_job_gets_the_slots_that_it_can_use(slots: int, job: JobView, batches: list[int]) -> None:
    view = cluster_view(*(slot_view(slot_id(N1, index)) for index in range(slots)), job)

    assert list(Fifo().plan(view, NOW).local_batch[A].values()) == batches


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
def test_a_gang_gets_as_few_nodes_as_possible(free: list[SlotId], chosen: list[SlotId]) -> None:
    view = cluster_view(*map(slot_view, free), job_view(A, slots=(2, 2)))

    assert list(Fifo().plan(view, NOW).local_batch[A]) == chosen


def test_simultaneous_jobs_start_in_the_order_of_the_view() -> None:
    first, second = JobId("z-9"), JobId("a-10")
    view = cluster_view(slot_view(S0), job_view(first, at=1.0), job_view(second, at=1.0))

    assert list(Fifo().plan(view, NOW).local_batch) == [first]


def test_an_unused_slot_of_a_changing_job_is_not_given_away() -> None:
    changing = job_view(A, running_on={S0: BATCH}, movable=False)
    view = cluster_view(slot_view(S0), slot_view(S1), changing, job_view(B, at=1.0))

    assert Fifo().plan(view, NOW).local_batch == {A: {S0: BATCH}, B: {S1: BATCH}}
