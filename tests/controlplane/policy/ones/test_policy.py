"""What `ones` answers, by example."""

from __future__ import annotations

from typing import Any

import msgspec
from numpy.random import default_rng

from controlplane.policy.api import Budget, EpochSeen, JobView, Plan, Reason
from controlplane.policy.ones.policy import Ones
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, C, cluster_view, job_view
from tests.support.views import NOW, row_of, view_of


def a_job(job: JobId, *on: SlotId, epoch: int = 1, **changes: Any) -> JobView:
    """1 to 4 slots with a batch of 64; moved long ago."""
    view = job_view(job, slots=(1, 4), epoch=epoch)
    share = {slot: 64 // len(on) for slot in on}
    return msgspec.structs.replace(view, running_on=share, **changes)


def answer(
    *jobs: JobView, nodes: tuple[int, ...] = (2, 2), news: tuple[EpochSeen, ...] = ()
) -> Plan:
    policy = Ones()
    for event in news:
        policy.observe(event, Seconds(1.0))
    view = view_of(row_of(*nodes), *jobs)
    policy.improve(view, Budget(generations=5), default_rng(0), NOW)
    return policy.plan(view, NOW)


def codes(plan: Plan) -> dict[JobId, str]:
    return {name: reason.code for name, reason in plan.reasons.items()}


def seen(slots: int, samples_per_s: float) -> EpochSeen:
    """What some relative achieved."""
    return EpochSeen(
        job=C, family="", slots=slots, nodes=1, global_batch=64, samples_per_s=samples_per_s,
        whole=True,
    )  # fmt: skip


def test_an_empty_cluster_has_nothing_to_do() -> None:
    assert Ones().plan(cluster_view(version=7), NOW) == Plan(based_on=7)


def test_new_jobs_start_on_a_slot_each() -> None:
    plan = answer(a_job(A, epoch=0), a_job(B, epoch=0))

    assert sorted(plan.local_batch) == [A, B]
    assert [list(placed.values()) for placed in plan.local_batch.values()] == [[64], [64]]
    assert codes(plan) == {A: "start", B: "start"}


def test_a_warm_job_grows_onto_idle_slots() -> None:
    plan = answer(a_job(A, S0))

    assert plan.local_batch == {A: {S0: 32, S1: 32}}
    assert codes(plan) == {A: "grow"}


def test_a_job_makes_room_for_a_new_one() -> None:
    plan = answer(a_job(A, S0, S1), a_job(B, epoch=0), nodes=(2,))

    assert {name: len(placed) for name, placed in plan.local_batch.items()} == {A: 1, B: 1}
    assert codes(plan) == {A: "shrink", B: "start"}
    assert plan.reasons[A].text.startswith(f"gives 1 slot to {B}")


def test_a_job_that_slots_make_slower_gives_them_back() -> None:
    plan = answer(a_job(A, S0, S1), news=(seen(1, 1000.0), seen(2, 100.0)))

    assert plan.local_batch == {A: {S0: 64}}
    assert codes(plan) == {A: "shrink"}


def test_who_finds_no_slot_waits_and_is_told_the_numbers() -> None:
    jobs = [a_job(JobId(f"j-{n}"), epoch=0, stop_samples=10**n) for n in (3, 4, 5)]

    plan = answer(*jobs, nodes=(2,), news=(seen(1, 100.0),))

    assert sorted(plan.local_batch) == ["j-3", "j-4"]
    waits = plan.reasons[JobId("j-5")]
    assert (waits.code, waits.text) == ("waits", "waits for 1 slot: others are worth more on them")
    assert waits.numbers["remaining_on_one_slot_s"] == 1000.0
    assert waits.numbers["needs"] == 1.0


def test_a_job_that_stays_keeps_its_uneven_batches_and_nothing_is_said_of_it() -> None:
    uneven = msgspec.structs.replace(
        a_job(A, S0, S1, T0, T1, most=4), running_on={S0: 40, S1: 8, T0: 8, T1: 8}
    )

    plan = answer(uneven)

    assert plan == Plan(based_on=1, local_batch={A: uneven.running_on})


def test_jobs_out_of_play_are_told_why() -> None:
    backing_off = a_job(A, epoch=0, ready_at=Seconds(104.0))
    large = msgspec.structs.replace(a_job(B, epoch=0), least=5, most=8)

    assert answer(backing_off, large) == Plan(
        based_on=1,
        reasons={
            A: Reason("backing_off", "waits 4 s before its next try", {"wait_s": 4.0}),
            B: Reason("too_large", "needs 5 slots, the cluster has 4", {"needs": 5, "slots": 4}),
        },
        wake_at=Seconds(104.0),
    )


def test_a_job_that_backed_off_is_started_when_it_is_asked_about_then() -> None:
    policy = Ones()
    view = view_of(row_of(1), a_job(A, epoch=0, ready_at=Seconds(NOW + 4.0)))
    first = policy.plan(view, NOW)
    assert (first.local_batch, first.wake_at) == ({}, NOW + 4.0)

    assert policy.plan(view, Seconds(NOW + 4.0)).local_batch == {A: {S0: 64}}


def test_a_job_may_be_moved_when_its_gate_opens_though_nothing_happened() -> None:
    policy = Ones()
    moved = a_job(A, S0, S1, T0, T1, moved_at=NOW, submitted_at=Seconds(0.0))
    view = view_of(row_of(2, 2), moved)
    for slots, speed in ((1, 1000.0), (4, 400.0)):
        policy.observe(seen(slots, speed), Seconds(1.0))
    first = policy.plan(view, NOW)
    assert (first.local_batch, first.wake_at) == ({A: dict(moved.running_on)}, NOW + 30.0)

    assert len(policy.plan(view, Seconds(NOW + 30.0)).local_batch[A]) == 1


def test_news_are_taken_into_the_next_answer_for_the_same_view() -> None:
    policy, view = Ones(), view_of(row_of(2), a_job(A, S0))
    before = policy.plan(view, NOW)

    policy.observe(seen(1, 1000.0), NOW)
    policy.observe(seen(2, 100.0), NOW)

    assert len(before.local_batch[A]) == 2
    assert policy.plan(view, NOW).local_batch == {A: {S0: 64}}


def test_a_search_tells_how_it_stands() -> None:
    policy, view = Ones(), view_of(row_of(2, 2), a_job(A, S0))

    policy.improve(view, Budget(generations=2), default_rng(0), NOW)

    stats = policy.stats()
    assert stats.generations == 2
    assert stats.best_fitness > stats.incumbent_fitness > 0.0
    assert stats.best_fitness >= stats.mean_fitness > 0.0
