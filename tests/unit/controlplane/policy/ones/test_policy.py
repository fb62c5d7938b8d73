"""Plans of `ones`: sizes, places, batches, reasons, and times of the next change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from numpy.random import default_rng

from controlplane.policy.api import (
    Budget,
    EpochSeen,
    JobView,
    Plan,
    PolicyEvent,
    Reason,
)
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId, node_of
from tests.support.builders import N1, S0, S1, T0, T1, A, B, C, changed_job, job_view
from tests.support.views import (
    NOW,
    epoch_seen,
    row_of,
    steps_seen,
    view_of,
)
from tests.unit.controlplane.policy.tables import cases


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


SCALES = [seen(slots, 100.0 * slots) for slots in (1, 2, 4)]  # speeds are proportional to slots
SLOWER = [seen(1, 1000.0), seen(2, 100.0)]
TO_B = f"gives 1 slot to {B}"
OTHERS = "other jobs gain more from the others"


@cases(
    "jobs, nodes, events, sizes, reasons, texts",
    new_jobs_start_on_one_slot=(
        [a_job(A, epoch=0), a_job(B, epoch=0)], (2, 2), [], {A: 1, B: 1},
        {A: "start", B: "start"}, {}),
    a_job_makes_room_for_a_new_one=(
        [a_job(A, S0, S1), a_job(B, epoch=0)], (2,), [], {A: 1, B: 1},
        {A: "shrink", B: "start"}, {A: TO_B}),
    a_warm_job_grows_onto_idle_slots=([a_job(A, S0)], (2, 2), [], {A: [S0, S1]}, {A: "grow"}, {}),
    a_job_returns_slots_that_make_it_slower=(
        [a_job(A, S0, S1)], (2, 2), SLOWER, {A: [S0]}, {A: "shrink"}, {}),
    slots_are_within_the_users_bounds=(
        [a_job(A, epoch=0, least=2, most=2, wanted=2), a_job(B, S0, most=1)], (4,), SCALES,
        {A: 2, B: 1}, {A: "start"}, {}),
    a_job_larger_than_the_cluster=(
        [a_job(A, epoch=0, least=3, wanted=3)], (2,), [], {}, {A: "too_large"}, {}),
    a_job_waits_for_its_least_slots=(
        [a_job(A, epoch=0, least=2, wanted=2), a_job(B, S0, moved_at=NOW, most=1)], (2,), [],
        {B: 1}, {A: "waits"}, {A: f"waits for 2 slots: only 1 slot is free, {OTHERS}"}),
    a_higher_priority_of_the_first_job=(
        [a_job(A, priority=2.0), a_job(B)], (1,), [], {A: 1}, {A: "resume", B: "waits"}, {}),
    a_higher_priority_of_the_second_job=(
        [a_job(A), a_job(B, priority=2.0)], (1,), [], {B: 1}, {A: "waits", B: "resume"}, {}),
)  # fmt: skip
def test_sizes_and_reasons_by_example(
    *, jobs: Any, nodes: Any, events: Any, sizes: Any, reasons: Any, texts: dict[JobId, str]
) -> None:  # fmt: skip
    plan = answer(*jobs, nodes=nodes, events=events)

    placed = {
        name: list(slots) if isinstance(sizes.get(name), list) else len(slots)
        for name, slots in plan.local_batch.items()
    }
    assert placed == sizes
    assert {sum(placed.values()) for placed in plan.local_batch.values()} <= {64}
    assert codes(plan) == reasons
    assert all(plan.reasons[name].text.startswith(text) for name, text in texts.items())


def test_a_waiting_job_gets_a_reason_with_numbers() -> None:
    jobs = [a_job(JobId(f"j-{n}"), epoch=0, stop_samples=10**n) for n in (3, 4, 5)]

    plan = answer(*jobs, nodes=(2,), events=(seen(1, 100.0),))

    assert sorted(plan.local_batch) == ["j-3", "j-4"]
    waits = plan.reasons[JobId("j-5")]
    assert (waits.code, waits.text) == ("waits", "waits for 1 slot: other jobs gain more from them")
    assert waits.numbers["remaining_on_one_slot_s"] == 1000.0
    assert waits.numbers["needs"] == 1.0


# --- what its user allows


@cases(
    "batch_limit, local_limit, least, most",
    the_limit_of_the_batch=(100, 1000, 100, 100),
    the_limit_of_a_slot=(1000, 80, 65, 80),
    at_most_twice_that_of_now=(1000, 1000, 128, 128),
)
def test_batches_are_within_the_users_bounds(
    batch_limit: int, local_limit: int, least: int, most: int
) -> None:
    job = a_job(A, S0, noise_scale=1e6, epoch_samples=1000, most=1, batch_limit=batch_limit,
                local_limit=local_limit)  # fmt: skip
    own = [epoch_seen(A, global_batch=size, samples_per_s=size / 0.1) for size in (64, 128, 256)]

    plan = answer(job, nodes=(1,), events=[*4 * [seen(1, 640.0)], *own])

    assert least <= plan.local_batch[A][S0] <= most


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
            for step in range(12):
                done, speed = 64 * step + 10_000 * number, 64 / (0.2 if bad else 0.1)
                event = steps_seen(job.job, family=job.family, group=number, step=step,
                                   samples_done=done, samples_per_s=speed)  # fmt: skip
                policy.observe(event, Seconds(51.0))
    policy.improve(view, Budget(generations=20), default_rng(0), NOW)
    return policy.plan(view, NOW)


def single(name: JobId, slot: SlotId, family: str = "f") -> JobView:
    return a_job(name, slot, family=family, most=1, wanted=1, stop_samples=4_000_000)


def test_a_job_moves_to_idle_faster_gpus() -> None:
    plan = moved_from([(single(A, S0),), (single(A, T0),)] * 2, models=("fast", "slow"))

    assert {name: node_of(next(iter(on))) for name, on in plan.local_batch.items()} == {A: N1}
    assert codes(plan) == {A: "move"}
    assert plan.reasons[A].text.startswith("moved to faster GPUs (")
    speeds = [plan.reasons[A].numbers[name] for name in ("speed_now", "speed_then")]
    assert speeds == pytest.approx([320.0, 640.0], rel=0.01)


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


def test_the_statistics_describe_the_population() -> None:
    policy = Ones(OnesOptions(search="evolution"))
    view = view_of(row_of(2, 2), a_job(A, S0))

    policy.improve(view, Budget(generations=2), default_rng(0), NOW)

    stats = policy.stats()
    assert stats.generations == 2
    assert stats.best_fitness > stats.incumbent_fitness > 0.0
    assert stats.best_fitness >= stats.mean_fitness > 0.0
    assert (len(stats.spread), stats.spread[-1]) == (5, stats.best_fitness)
