"""A growth that loses is noticed within seconds of telemetry, and taken back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, JobView, Plan, PlanTaken, PolicyEvent, StepsSeen
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_history import GrowthTrial, Loss
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import Seconds, SlotId
from tests.support.builders import S0, S1, A, B, job_view
from tests.support.views import row_of, view_of

S2, S3 = SlotId("n1/2"), SlotId("n1/3")
NOW = Seconds(105.0)  # the job grew at 100


def by_batch(batch: int) -> float:
    """Every sample is worth as much as any other."""
    return float(batch)


def trial_of(*steps: tuple[int, int, int, float]) -> GrowthTrial:
    trial = GrowthTrial()
    for step in steps:
        trial.add(*step)
    return trial


def a_job(*on: SlotId, **changes: Any) -> JobView:
    """1 to 4 slots and a batch of 64; it finished an epoch long ago, and was moved just now."""
    view = job_view(A, slots=(1, 4), family="f", epoch=1, batch_limit=64, moved_at=Seconds(100.0))
    held = {slot: 64 // len(on) for slot in on}
    return msgspec.structs.replace(view, running_on=held, stop_samples=10**6, **changes)


def telemetry(group: int, slots: int, *speeds: float, batch: int = 64) -> list[PolicyEvent]:
    """Reports of one group, a second apart; the first of a group says nothing."""
    return [
        StepsSeen(
            job=A, family="f", group=group, slots=slots, nodes=1, global_batch=batch,
            step=100 * group + at, samples_done=10_000 * group + 64 * at, samples_per_s=speed,
        )
        for at, speed in enumerate((speeds[0], *speeds))
    ]  # fmt: skip


def learnt(*events: PolicyEvent, cores: int = 0, on: tuple[SlotId, ...] = (S0,)) -> Estimates:
    estimates = Estimates(OnesOptions())
    view = view_of(row_of(4, cores=cores), a_job(*on))
    estimates.update(view, contended=False, now=NOW)
    for event in events:
        estimates.observe(event, Seconds(101.0))
    return estimates


def answer(*jobs: JobView, events: list[PolicyEvent], cores: int = 0) -> Plan:
    """Of the policy, five seconds after the growth."""
    policy = Ones()
    view = view_of(row_of(4, cores=cores), *jobs)
    for event in events:
        policy.observe(event, Seconds(101.0))
    policy.improve(view, Budget(generations=5), default_rng(0), NOW)
    return policy.plan(view, NOW)


# --- trials


@pytest.mark.parametrize(
    ("steps", "ratio"),
    [
        ([(1, 1, 64, 0.1), *[(2, 2, 64, 0.2)] * 2], 0.5),
        ([(1, 1, 64, 0.1), *[(2, 2, 64, 0.06)] * 2], None),
        ([(1, 1, 64, 0.1), (2, 2, 64, 0.9)], None),
        ([(1, 1, 64, 0.1), *[(2, 2, 64, 0.109)] * 2], None),
        ([(1, 2, 64, 0.1), *[(2, 1, 64, 0.9)] * 2], None),
        ([(1, 1, 64, 0.1), (2, 2, 64, 0.2), *[(3, 2, 128, 0.3)] * 2], 128 / 0.3 / 640),
    ],
    ids=["slower", "faster", "one measurement", "noise", "shrinks", "another batch after growth"],
)
def test_a_growth_is_compared_with_the_last_smaller_group(
    steps: list[tuple[int, int, int, float]], ratio: float | None
) -> None:
    assert trial_of(*steps).loss(by_batch) == (ratio and Loss(pytest.approx(ratio), 1))


def test_samples_of_less_value_in_a_larger_batch_count_less() -> None:
    """Twice as many samples in the same time, each worth a quarter."""
    trial = trial_of((1, 1, 64, 0.1), (2, 2, 128, 0.1), (2, 2, 128, 0.1))

    assert trial.loss(lambda batch: batch / (batch / 64) ** 2) == (pytest.approx(0.5), 1, None)


@pytest.mark.parametrize(
    ("then", "loss"),
    [
        ((2, 2, 128, 0.4, 1), (pytest.approx(0.5), 2, 64)),
        ((2, 2, 64, 0.2, 2), (pytest.approx(0.5), 2, None)),
        ((2, 2, 128, 0.15, 1), None),
        ((2, 2, 32, 0.9, 1), None),
        ((2, 2, 64, 0.9, 1), None),
        ((2, 2, 128, 0.9, 2), None),
        ((2, 1, 128, 0.9, 1), None),
    ],
    ids=[
        "larger batch", "farther apart", "faster", "smaller batch", "same group",
        "batch and place", "fewer slots",
    ],
)  # fmt: skip
def test_a_group_of_the_same_size_is_compared_if_its_batch_or_its_place_changed(
    then: tuple[int, int, int, float, int], loss: tuple[float, int, int | None] | None
) -> None:
    trial = GrowthTrial()
    for step in [(1, 2, 64, 0.1, 1)] * 3 + [then] * 3:
        trial.add(*step)

    assert trial.loss(by_batch) == loss


def test_a_larger_batch_of_less_value_loses_although_it_is_faster() -> None:
    trial = trial_of(*[(1, 2, 64, 0.1)] * 3, *[(2, 2, 128, 0.15)] * 3)

    loss = trial.loss(lambda batch: batch**0.3)

    assert loss == (pytest.approx(2**0.3 / 1.5), 2, 64)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_batch_needs_three_measurements_of_each_group(before: int, after: int) -> None:
    trial = trial_of(*[(1, 2, 64, 0.1)] * before, *[(2, 2, 128, 0.9)] * after)

    assert trial.loss(by_batch) is None


# --- what telemetry makes of it


def test_telemetry_shows_the_loss_of_a_growth_and_the_former_size() -> None:
    events = telemetry(1, 1, 640.0, 640.0) + telemetry(2, 2, 320.0, 320.0)

    loss = learnt(*events, on=(S0, S1)).growth_loss(a_job(S0, S1))

    assert loss == (pytest.approx(0.5), 1)


def test_a_former_group_is_no_trial() -> None:
    events = telemetry(1, 1, 640.0, 640.0) + telemetry(2, 2, 320.0, 320.0)

    assert learnt(*events).growth_loss(a_job(S0)) is None


def test_jobs_that_share_cores_cause_no_loss_of_a_growth() -> None:
    """Four busy slots on two cores halve the speed of everybody; its growth doubled its own."""
    policy = Estimates(OnesOptions())
    alone = view_of(row_of(4, cores=2), a_job(S0))
    other = msgspec.structs.replace(job_view(B, slots=(1, 4)), running_on={S2: 32, S3: 32})
    crowded = view_of(row_of(4, cores=2), a_job(S0, S1), other)
    for view, events in (
        (alone, telemetry(1, 1, 640.0, 640.0)),
        (crowded, telemetry(2, 2, 600.0, 600.0)),
    ):
        policy.update(view, contended=False, now=NOW)
        for event in events:
            policy.observe(event, Seconds(101.0))

    assert policy.growth_loss(a_job(S0, S1)) is None


# --- what the policy does about it


def test_a_growth_that_loses_is_undone_before_its_gate_opens() -> None:
    events = telemetry(1, 1, 640.0, 640.0) + telemetry(2, 2, 320.0, 320.0)

    plan = answer(a_job(S0, S1), events=events)

    assert plan.local_batch == {A: {S0: 64}}
    assert plan.reasons[A].text.startswith("undoes its growth, which made 0.50 x the progress")


def test_a_growth_that_pays_stays_until_its_gate_opens() -> None:
    events = telemetry(1, 1, 640.0, 640.0) + telemetry(2, 2, 1200.0, 1200.0)

    plan = answer(a_job(S0, S1), events=events)

    assert len(plan.local_batch[A]) >= 2
    assert A not in plan.reasons or plan.reasons[A].code == "grow"


# --- a migration's first half is no growth


def sent(to: SlotId, *, then: list[PolicyEvent]) -> Plan:
    """A job on slot 0 is sent to another one; the answer when it is on both of them."""
    policy = Ones()
    policy.plan(view_of(row_of(4), a_job(S0, epoch_at=Seconds(90.0))), Seconds(99.0))
    events = [*telemetry(1, 1, 640.0, 640.0), PlanTaken(waiting=(), slots={A: (to,)}), *then]
    for event in events:
        policy.observe(event, Seconds(101.0))
    both = view_of(row_of(4), a_job(S0, to))
    policy.improve(both, Budget(generations=5), default_rng(0), NOW)
    return policy.plan(both, NOW)


def test_the_first_half_of_a_migration_is_no_loss() -> None:
    estimates = learnt(
        *telemetry(1, 1, 640.0, 640.0),
        PlanTaken(waiting=(), slots={A: (S1,)}),
        *telemetry(2, 2, 320.0, 320.0),
    )
    half_way = a_job(S0, S1)

    assert estimates.growth_loss(half_way) is None
    assert estimates.moves_to(half_way) == {S1}


def test_a_migration_that_is_slow_half_way_is_completed() -> None:
    plan = sent(S2, then=telemetry(2, 2, 320.0, 320.0))

    assert plan.local_batch == {A: {S2: 64}}
    assert plan.reasons[A].code == "move"
    assert plan.reasons[A].text.startswith("has moved: leaves its former slots")


def test_a_growth_after_a_migration_is_a_trial() -> None:
    estimates = learnt(
        *telemetry(1, 1, 640.0, 640.0),
        PlanTaken(waiting=(), slots={A: (S1,)}),
        PlanTaken(waiting=(), slots={A: (S0, S1)}),
        *telemetry(2, 2, 320.0, 320.0),
    )

    assert estimates.growth_loss(a_job(S0, S1)) == (pytest.approx(0.5), 1)


# --- where slots share cores


def moved_long_ago(*on: SlotId) -> JobView:
    return a_job(*on, moved_at=Seconds(0.0), epoch_at=Seconds(50.0))


def test_no_job_grows_beyond_the_cores_of_its_node() -> None:
    paces = telemetry(1, 1, 640.0, 640.0) + telemetry(2, 2, 1200.0, 1200.0)

    with_cores = answer(moved_long_ago(S0, S1), events=paces, cores=4)
    sharing = answer(moved_long_ago(S0, S1), events=paces, cores=2)

    assert len(with_cores.local_batch[A]) == 4
    assert sharing.local_batch == {A: {S0: 32, S1: 32}}


def test_no_job_grows_onto_the_cores_of_other_jobs() -> None:
    other = msgspec.structs.replace(
        moved_long_ago(S1), job=B, family="f", running_on={S1: 64}, submitted_at=Seconds(1.0)
    )

    plan = answer(moved_long_ago(S0), other, events=telemetry(1, 1, 640.0, 640.0), cores=2)

    assert plan.local_batch == {A: {S0: 64}, B: {S1: 64}}


def test_a_waiting_job_starts_on_a_slot_without_its_own_core() -> None:
    others = [
        msgspec.structs.replace(moved_long_ago(slot), job=job) for slot, job in ((S0, A), (S1, B))
    ]
    new = job_view(SlotId("c-3"), slots=(1, 4), family="g")  # type: ignore[arg-type]

    plan = answer(*others, new, events=telemetry(1, 1, 640.0, 640.0), cores=2)

    assert {name: len(placed) for name, placed in plan.local_batch.items()} == {
        A: 1, B: 1, "c-3": 1,
    }  # fmt: skip
