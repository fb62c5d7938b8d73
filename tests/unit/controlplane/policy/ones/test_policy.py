"""Plans of `ones`: sizes, places, batches, reasons, and times of the next change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    ClusterView,
    EpochSeen,
    JobView,
    Plan,
    PolicyEvent,
    Reason,
    StepsSeen,
)
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId, node_of
from tests.support.builders import N1, S0, S1, T0, T1, A, B, C, changed_job, cluster_view, job_view
from tests.support.sizes import examples
from tests.support.views import (
    NOW,
    epoch_seen,
    planned,
    row_of,
    steps_seen,
    view_of,
    views_and_events,
)


def a_job(job: JobId, *on: SlotId, epoch: int = 1, **changes: Any) -> JobView:
    """1 to 4 slots with a batch of 64; moved long ago."""
    view = job_view(job, slots=(1, 4), epoch=epoch)
    share = {slot: 64 // len(on) for slot in on}
    return changed_job(view, running_on=share, **changes)


def answer(
    *jobs: JobView,
    nodes: tuple[int, ...] = (2, 2),
    models: tuple[str, ...] = (),
    events: Sequence[PolicyEvent] = (),
    options: OnesOptions | None = None,
) -> Plan:
    policy = Ones(options)
    for event in events:
        policy.observe(event, Seconds(1.0))
    view = view_of(row_of(*nodes, models=models), *jobs)
    policy.improve(view, Budget(generations=5), default_rng(0), NOW)
    return policy.plan(view, NOW)


def codes(plan: Plan) -> dict[JobId, str]:
    return {name: reason.code for name, reason in plan.reasons.items()}


def seen(slots: int, samples_per_s: float) -> EpochSeen:
    """What some relative achieved."""
    return epoch_seen(C, slots=slots, samples_per_s=samples_per_s)


def epoch_of(job: JobId, batch: int) -> EpochSeen:
    """It finished one, with so large a batch."""
    return epoch_seen(job, global_batch=batch, samples_per_s=batch / 0.1)


def test_the_plan_of_an_empty_cluster_is_empty() -> None:
    assert Ones().plan(cluster_view(version=7), NOW) == Plan(based_on=7)


def test_new_jobs_start_on_one_slot() -> None:
    plan = answer(a_job(A, epoch=0), a_job(B, epoch=0))

    assert sorted(plan.local_batch) == [A, B]
    assert [list(placed.values()) for placed in plan.local_batch.values()] == [[64], [64]]
    assert codes(plan) == {A: "start", B: "start"}


def test_a_job_makes_room_for_a_new_one() -> None:
    plan = answer(a_job(A, S0, S1), a_job(B, epoch=0), nodes=(2,))

    assert {name: len(placed) for name, placed in plan.local_batch.items()} == {A: 1, B: 1}
    assert codes(plan) == {A: "shrink", B: "start"}
    assert plan.reasons[A].text.startswith(f"gives 1 slot to {B}")


@pytest.mark.parametrize(
    ("job", "events", "placed", "code"),
    [
        (a_job(A, S0), [], {S0: 32, S1: 32}, "grow"),
        (a_job(A, S0, S1), [seen(1, 1000.0), seen(2, 100.0)], {S0: 64}, "shrink"),
    ],
    ids=["idle slots", "slots that make it slower"],
)
def test_a_warm_job_grows_or_returns_slots(
    job: JobView, events: list[EpochSeen], placed: dict[SlotId, int], code: str
) -> None:
    plan = answer(job, events=events)

    assert plan.local_batch == {A: placed}
    assert codes(plan) == {A: code}


def test_a_waiting_job_gets_a_reason_with_numbers() -> None:
    jobs = [a_job(JobId(f"j-{n}"), epoch=0, stop_samples=10**n) for n in (3, 4, 5)]

    plan = answer(*jobs, nodes=(2,), events=(seen(1, 100.0),))

    assert sorted(plan.local_batch) == ["j-3", "j-4"]
    waits = plan.reasons[JobId("j-5")]
    assert (waits.code, waits.text) == ("waits", "waits for 1 slot: other jobs gain more from them")
    assert waits.numbers["remaining_on_one_slot_s"] == 1000.0
    assert waits.numbers["needs"] == 1.0


# --- what its user allows


def test_slots_are_within_the_users_bounds() -> None:
    events = [seen(slots, 100.0 * slots) for slots in (1, 2, 4)]

    plan = answer(
        a_job(A, epoch=0, least=2, most=2, wanted=2),
        a_job(B, S0, most=1),
        nodes=(4,),
        events=events,
    )

    assert {name: len(placed) for name, placed in plan.local_batch.items()} == {A: 2, B: 1}


def test_a_job_waits_for_its_least_slots() -> None:
    plan = answer(a_job(A, epoch=0, least=3, wanted=3), nodes=(2,))
    crowded = answer(
        a_job(A, epoch=0, least=2, wanted=2), a_job(B, S0, moved_at=NOW, most=1), nodes=(2,)
    )

    assert codes(plan) == {A: "too_large"}
    assert (crowded.local_batch, codes(crowded)) == ({B: {S0: 64}}, {A: "waits"})
    assert crowded.reasons[A].text == "waits for 2 slots: other jobs gain more from them"


def test_batches_are_within_the_users_bounds() -> None:
    noisy: dict[str, Any] = {"noise_scale": 1e6, "epoch_samples": 1000, "most": 1}
    reports = (4 * [seen(1, 640.0)], [epoch_of(A, 64), epoch_of(A, 128), epoch_of(A, 256)])
    events = [event for some in reports for event in some]

    most, local, both = (
        answer(a_job(A, S0, **noisy, **limits), nodes=(1,), events=events).local_batch[A][S0]
        for limits in (
            {"batch_limit": 100, "local_limit": 1000},
            {"batch_limit": 1000, "local_limit": 80},
            {"batch_limit": 1000, "local_limit": 1000},
        )
    )

    assert most == 100
    assert 64 < local <= 80
    assert both == 128, "at most twice that of now"


# --- when a job is stopped for another


@pytest.mark.parametrize(
    ("margin", "short", "expected"),
    [
        (0.0, 1_800_000, {A: "pause", B: "resume"}),
        (1.5, 1_800_000, {B: "waits"}),
        (1.5, 40_000, {A: "pause", B: "resume"}),
        (1e9, 40_000, {B: "waits"}),
    ],
    ids=["half as long, no margin", "half as long", "a ninetieth", "never"],
)
def test_a_job_is_paused_only_for_a_clearly_more_valuable_job(
    margin: float, short: int, expected: dict[JobId, str]
) -> None:
    long = a_job(A, S0, stop_samples=3_600_000, start_s=3.0)
    other = a_job(B, stop_samples=short, start_s=3.0)

    plan = answer(
        long, other, nodes=(1,), events=[seen(1, 100.0)], options=OnesOptions(pause_margin=margin)
    )

    assert codes(plan) == expected


# --- places


def steps_of(job: JobView, group: int, step_s: float) -> list[StepsSeen]:
    """Telemetry of a job of one slot."""
    return [
        steps_seen(
            job.job, family=job.family, group=group, step=step,
            samples_done=64 * step + 10_000 * group, samples_per_s=64 / step_s,
        )
        for step in range(12)
    ]  # fmt: skip


def moved_from(history: Sequence[Sequence[JobView]], models: tuple[str, ...] = ("", "")) -> Plan:
    """The answer to the last of these schedules; steps took 0.1 s, or 0.2 s where it is bad.

    It is bad on slow GPUs, and beside somebody.
    """
    policy = Ones(OnesOptions(search="evolution"))
    slots = row_of(2, 2, models=models)
    model = {slot.slot: slot.model for slot in slots}
    for number, jobs in enumerate(history, 1):
        view = view_of(slots, *jobs, version=number)
        policy.plan(view, Seconds(50.0))
        nodes = [node_of(next(iter(job.running_on))) for job in jobs]
        for job, node in zip(jobs, nodes, strict=True):
            bad = model[next(iter(job.running_on))] == "slow" or nodes.count(node) > 1
            for event in steps_of(job, number, 0.2 if bad else 0.1):
                policy.observe(event, Seconds(51.0))
    policy.improve(view, Budget(generations=20), default_rng(0), NOW)
    return policy.plan(view, NOW)


def test_a_job_moves_to_idle_faster_gpus() -> None:
    fast, slow = (
        a_job(A, slot, family="f", most=1, wanted=1, stop_samples=4_000_000) for slot in (S0, T0)
    )

    plan = moved_from([(fast,), (slow,), (fast,), (slow,)], models=("fast", "slow"))

    assert {name: node_of(next(iter(on))) for name, on in plan.local_batch.items()} == {A: N1}
    assert codes(plan) == {A: "move"}
    assert plan.reasons[A].text.startswith("moved to faster GPUs (")
    speeds = [plan.reasons[A].numbers[name] for name in ("speed_now", "speed_then")]
    assert speeds == pytest.approx([320.0, 640.0], rel=0.01)


def test_jobs_that_slow_each_other_down_are_separated() -> None:
    one, other = (
        a_job(name, slot, family=family, most=1, wanted=1, stop_samples=4_000_000)
        for name, slot, family in ((A, S0, "f"), (B, T0, "g"))
    )
    beside = msgspec.structs.replace(other, running_on={S1: 64})

    plan = moved_from([(one, other), (one, beside), (one, other), (one, beside)])

    assert len({node_of(next(iter(on))) for on in plan.local_batch.values()}) == 2
    assert [reason.code for reason in plan.reasons.values()] == ["move"]
    (reason,) = plan.reasons.values()
    assert reason.text.startswith("moved to better neighbours (1.")


# --- what a plan keeps to


def test_an_unchanged_job_keeps_uneven_batches_without_a_reason() -> None:
    uneven = msgspec.structs.replace(
        a_job(A, S0, S1, T0, T1, most=4), running_on={S0: 40, S1: 8, T0: 8, T1: 8}
    )

    plan = answer(uneven)

    assert plan == Plan(based_on=1, local_batch={A: uneven.running_on})


def test_jobs_out_of_play_get_reasons() -> None:
    backing_off = a_job(A, epoch=0, ready_at=Seconds(104.0))
    large = msgspec.structs.replace(a_job(B, epoch=0), least=5, most=8)

    assert answer(backing_off, large) == Plan(
        based_on=1,
        reasons={
            A: Reason("backing_off", "waits 4 s before the next attempt", {"wait_s": 4.0}),
            B: Reason("too_large", "needs 5 slots, the cluster has 4", {"needs": 5, "slots": 4}),
        },
        wake_at=Seconds(104.0),
    )


def test_a_job_starts_when_its_back_off_ends() -> None:
    policy = Ones()
    view = view_of(row_of(1), a_job(A, epoch=0, ready_at=Seconds(NOW + 4.0)))
    first = policy.plan(view, NOW)
    assert (first.local_batch, first.wake_at) == ({}, NOW + 4.0)

    assert policy.plan(view, Seconds(NOW + 4.0)).local_batch == {A: {S0: 64}}


def test_an_open_gate_allows_a_change_without_news() -> None:
    policy = Ones()
    moved = a_job(A, S0, S1, T0, T1, moved_at=NOW, submitted_at=Seconds(0.0))
    view = view_of(row_of(2, 2), moved)
    for slots, speed in ((1, 1000.0), (4, 400.0)):
        policy.observe(seen(slots, speed), Seconds(1.0))
    first = policy.plan(view, NOW)
    assert (first.local_batch, first.wake_at) == ({A: dict(moved.running_on)}, NOW + 30.0)

    assert len(policy.plan(view, Seconds(NOW + 30.0)).local_batch[A]) == 1


def test_an_event_changes_the_next_plan_of_the_same_view() -> None:
    policy, view = Ones(), view_of(row_of(2), a_job(A, S0))
    before = policy.plan(view, NOW)

    policy.observe(seen(1, 1000.0), NOW)
    policy.observe(seen(2, 100.0), NOW)

    assert len(before.local_batch[A]) == 2
    assert policy.plan(view, NOW).local_batch == {A: {S0: 64}}


CODES = {
    "start", "resume", "grow", "shrink", "pause", "pack", "move", "batch",
    "waits", "backing_off", "too_large", "no_slots", "restore",
}  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(told=views_and_events)
def test_every_change_and_wait_has_a_reason(told: tuple[ClusterView, list[PolicyEvent]]) -> None:
    view, events = told
    plan = planned("ones", view, events)

    changed = {
        name for name, job in view.jobs.items() if plan.local_batch.get(name, {}) != job.running_on
    }
    waiting = {name for name, job in view.jobs.items() if not plan.local_batch.get(name)}
    told_why = {name for name in changed | waiting if view.jobs[name].movable}
    assert set(plan.reasons) == told_why
    assert {reason.code for reason in plan.reasons.values()} <= CODES
    numbers = [n for reason in plan.reasons.values() for n in reason.numbers.values()]
    assert all(map(math.isfinite, numbers))


@settings(max_examples=examples(30), deadline=None)
@given(told=views_and_events)
def test_plans_are_reproducible_and_change_no_state(
    told: tuple[ClusterView, list[PolicyEvent]],
) -> None:
    view, events = told
    answers = []
    for _ in range(2):
        policy = Ones()
        for event in events:
            policy.observe(event, NOW)
        policy.improve(view, Budget(generations=2, steps=5), default_rng(0), NOW)
        before = policy.stats()
        answers += [msgspec.json.encode(policy.plan(view, NOW)) for _ in range(2)]
        assert policy.stats() == before

    assert len(set(answers)) == 1


def test_the_statistics_describe_the_population() -> None:
    policy = Ones(OnesOptions(search="evolution"))
    view = view_of(row_of(2, 2), a_job(A, S0))

    policy.improve(view, Budget(generations=2), default_rng(0), NOW)

    stats = policy.stats()
    assert stats.generations == 2
    assert stats.best_fitness > stats.incumbent_fitness > 0.0
    assert stats.best_fitness >= stats.mean_fitness > 0.0


@pytest.mark.parametrize(("priorities", "runs"), [((2.0, 1.0), A), ((1.0, 2.0), B)])
def test_the_job_of_higher_priority_gets_the_only_slot(
    priorities: tuple[float, float], runs: JobId
) -> None:
    jobs = [a_job(name, priority=p) for name, p in zip((A, B), priorities, strict=True)]

    assert set(answer(*jobs, nodes=(1,)).local_batch) == {runs}
