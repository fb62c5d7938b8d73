"""Trials of growth by telemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from numpy.random import default_rng

from controlplane.policy.api import Budget, JobView, Plan, PlanTaken, PolicyEvent, StepsSeen
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_history import GrowthTrial
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.views import row_of, view_of
from tests.unit.controlplane.policy.tables import cases

S2, S3 = SlotId("n1/2"), SlotId("n1/3")
MOVED, NOW = Seconds(100.0), Seconds(105.0)
PHI = 1e6  # every sample is worth as much as any other


def by_batch(batch: int) -> float:
    return float(batch)


def trial_of(*steps: tuple[Any, ...]) -> GrowthTrial:
    """Trial after these steps: group, slots, batch, seconds."""
    trial = GrowthTrial()
    for step in steps:
        trial.add(*step)
    return trial


FIRST = (1, 1, 64, 0.1)
HALF = pytest.approx(0.5)


@cases(
    "steps, loss",
    slower=([FIRST, *[(2, 2, 64, 0.2)] * 2], (HALF, 1)),
    faster=([FIRST, *[(2, 2, 64, 0.06)] * 2], None),
    one_measurement=([FIRST, (2, 2, 64, 0.9)], None),
    no_measurement=([], None),
    noise=([FIRST, *[(2, 2, 64, 0.109)] * 2], None),
    shrinks=([(1, 2, 64, 0.1), *[(2, 1, 64, 0.9)] * 2], None),
    another_batch_after_growth=(
        [FIRST, (2, 2, 64, 0.2), *[(3, 2, 128, 0.3)] * 2], (pytest.approx(128 / 0.3 / 640), 1)),
    same_size=([*[(1, 2, 64, 0.1)] * 3, *[(2, 2, 128, 0.9)] * 3], None),
)  # fmt: skip
def test_a_group_is_compared_with_the_last_smaller_one(
    steps: list[tuple[Any, ...]], loss: tuple[float, int] | None
) -> None:
    assert trial_of(*steps).loss(by_batch) == loss


def test_a_larger_batch_of_less_value_loses() -> None:
    """Twice as many samples in the same time, each worth a quarter."""
    trial = trial_of(FIRST, *[(2, 2, 128, 0.1)] * 2)

    assert trial.loss(lambda batch: 64 * (64 / batch)) == (HALF, 1)


def a_job(*on: SlotId, batch: int = 64, **changes: Any) -> JobView:
    """1 to 4 slots; finished an epoch long ago, and moved just now."""
    view = job_view(
        A, slots=(1, 4), family="f", epoch=1, batch_limit=batch, local_limit=256,
        stop_samples=10**6, moved_at=MOVED, placed_at=MOVED,
    )  # fmt: skip
    return replace(view, running_on={slot: batch // len(on) for slot in on}, **changes)


def telemetry(
    group: int, slots: int, speed: float, *, batch: int = 64, nodes: int = 1, count: int = 3
) -> list[PolicyEvent]:
    """Reports of one group; the first does not count."""
    return [
        StepsSeen(
            job=A, family="f", group=group, slots=slots, nodes=nodes, global_batch=batch,
            step=1000 * group + at, samples_done=10**6 * group + batch * at, samples_per_s=speed,
            noise_scale=PHI,
        )
        for at in range(count)
    ]  # fmt: skip


GREW = telemetry(1, 1, 640.0) + telemetry(2, 2, 320.0)  # and lost half of its speed


def learnt(job: JobView, events: Sequence[PolicyEvent]) -> Estimates:
    estimates = Estimates(OnesOptions())
    estimates.update(view_of(row_of(4), job), contended=False, now=NOW)
    for event in events:
        estimates.observe(event, Seconds(101.0))
    return estimates


def answer(
    *jobs: JobView, events: Sequence[PolicyEvent], nodes: tuple[int, ...] = (4,), cores: int = 0,
    search: Any = "auto",
) -> Plan:  # fmt: skip
    """Return the plan five seconds after the change."""
    policy = Ones(OnesOptions(search=search))
    view = view_of(row_of(*nodes, cores=cores), *jobs)
    policy.plan(view, MOVED)
    for event in events:
        policy.observe(event, Seconds(104.0))
    policy.improve(view, Budget(generations=5), default_rng(0), NOW)
    return policy.plan(view, NOW)


# --- estimates


TO_S1 = PlanTaken(waiting=(), slots={A: (S1,)})


@cases(
    "plans, loss, moves_to",
    growth=([], (HALF, 1), None),
    first_half_of_a_migration=([TO_S1], None, {S1}),
    growth_after_a_migration=(
        [TO_S1, PlanTaken(waiting=(), slots={A: (S0, S1)})], (HALF, 1), None),
)  # fmt: skip
def test_telemetry_shows_the_loss_of_a_growth_but_not_of_a_migration(
    plans: list[PlanTaken], loss: tuple[float, int] | None, moves_to: set[SlotId] | None
) -> None:
    estimates = learnt(a_job(S0), [*GREW[:3], *plans, *GREW[3:]])

    assert estimates.growth_loss(a_job(S0, S1)) == loss
    assert estimates.moves_to(a_job(S0, S1)) == moves_to
    assert estimates.growth_loss(a_job(S0)) is None, "another group than that of the trial"


def test_jobs_that_share_cores_cause_no_loss_of_a_growth() -> None:
    """Four busy slots on two cores halve all speeds; the growth doubled the job's own."""
    estimates = Estimates(OnesOptions())
    alone = view_of(row_of(4, cores=2), a_job(S0))
    other = replace(job_view(B, slots=(1, 4)), running_on={S2: 32, S3: 32})
    crowded = view_of(row_of(4, cores=2), a_job(S0, S1), other)
    for view, events in ((alone, GREW[:3]), (crowded, telemetry(2, 2, 600.0))):
        estimates.update(view, contended=False, now=NOW)
        for event in events:
            estimates.observe(event, Seconds(101.0))

    assert estimates.growth_loss(a_job(S0, S1)) is None


# --- plans


def test_a_growth_that_loses_is_undone_before_its_gate_opens() -> None:
    plan = answer(a_job(S0, S1), events=GREW)

    assert plan.local_batch == {A: {S0: 64}}
    assert plan.reasons[A].text.startswith("undoes its growth (measured: 0.50 x the former")


def test_a_growth_that_pays_stays_until_its_gate_opens() -> None:
    plan = answer(a_job(S0, S1), events=telemetry(1, 1, 640.0) + telemetry(2, 2, 1200.0))

    assert len(plan.local_batch[A]) >= 2
    assert A not in plan.reasons or plan.reasons[A].code == "grow"


def test_a_migration_that_is_slow_half_way_is_completed() -> None:
    policy = Ones()
    policy.plan(view_of(row_of(4), a_job(S0, epoch_at=Seconds(90.0))), Seconds(99.0))
    to_s2 = PlanTaken(waiting=(), slots={A: (S2,)})
    for event in [*GREW[:3], to_s2, *GREW[3:]]:
        policy.observe(event, Seconds(101.0))
    both = view_of(row_of(4), a_job(S0, S2))
    policy.improve(both, Budget(generations=5), default_rng(0), NOW)

    plan = policy.plan(both, NOW)

    assert plan.local_batch == {A: {S2: 64}}
    assert plan.reasons[A].code == "move"
    assert plan.reasons[A].text.startswith("has moved: leaves its former slots")


# --- shared cores


def moved_long_ago(*on: SlotId, **changes: Any) -> JobView:
    at = {"moved_at": Seconds(0.0), "placed_at": Seconds(0.0), "epoch_at": Seconds(50.0)}
    return a_job(*on, **at, **changes)


SLOWLY, ONE = telemetry(1, 1, 640.0) + telemetry(2, 2, 1200.0), telemetry(1, 1, 640.0)
BOTH = [moved_long_ago(S0), moved_long_ago(S1, job=B, submitted_at=Seconds(1.0))]
WAITS = job_view(JobId("c-3"), slots=(1, 4), family="g")


@cases(
    "jobs, events, cores, sizes",
    each_slot_has_a_core=([moved_long_ago(S0, S1)], SLOWLY, 4, {A: 4}),
    no_growth_beyond_the_cores_of_the_node=([moved_long_ago(S0, S1)], SLOWLY, 2, {A: 2}),
    no_growth_onto_the_cores_of_other_jobs=(BOTH, ONE, 2, {A: 1, B: 1}),
    but_a_waiting_job_starts=([*BOTH, WAITS], ONE, 2, {A: 1, B: 1, WAITS.job: 1}),
)
def test_only_waiting_jobs_start_on_slots_without_their_own_core(
    jobs: list[JobView], events: list[PolicyEvent], cores: int, sizes: dict[JobId, int]
) -> None:
    plan = answer(*jobs, events=events, cores=cores)

    assert {name: len(on) for name, on in plan.local_batch.items()} == sizes
    kept = [job for job in jobs if len(job.running_on) == sizes[job.job]]
    assert all(plan.local_batch[job.job] == job.running_on for job in kept)
