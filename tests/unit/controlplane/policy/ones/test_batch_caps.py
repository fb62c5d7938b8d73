"""A larger batch that loses on the same slots is taken back, and not tried again at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, JobView, Plan, StepsSeen
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_history import (
    CAP_DURATION_S,
    NOISE_GROWTH,
    BatchCaps,
    GrowthTrial,
)
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, job_view
from tests.support.views import row_of, view_of

PHI = 1e6  # every sample is worth as much as any other
NOW = Seconds(100.0)


def a_job(*on: SlotId, batch: int = 128, **changes: Any) -> JobView:
    view = job_view(A, slots=(1, 4), family="f", epoch=1, batch_limit=256, local_limit=256)
    held = {slot: batch // len(on) for slot in on}
    return msgspec.structs.replace(view, running_on=held, stop_samples=10**6, **changes)


def trial(step_s: float) -> GrowthTrial:
    """Two slots went from a batch of 64 in 0.1 s to one of 128."""
    found = GrowthTrial()
    for version, batch, took_s in [*[(1, 64, 0.1)] * 3, *[(2, 128, step_s)] * 3]:
        found.add(version, 2, batch, took_s)
    return found


def capped(step_s: float, job: JobView, *, phi: float = PHI, later_s: float = 0.0) -> int:
    """R of `job`, which would be 256."""
    caps = BatchCaps()
    caps.observe(a_job(S0, S1), trial(step_s), PHI, NOW)
    caps.expire(Seconds(NOW + later_s))
    return caps.capped(job, 256, phi)


def test_a_batch_that_lost_is_capped_on_the_same_slots() -> None:
    assert capped(0.4, a_job(S0, S1)) == 64


def test_a_batch_that_pays_sets_no_cap() -> None:
    assert capped(0.15, a_job(S0, S1)) == 256


def test_a_cap_does_not_hold_on_other_slots() -> None:
    assert capped(0.4, a_job(S0)) == 256


def test_a_cap_ends_when_the_noise_scale_has_doubled() -> None:
    assert capped(0.4, a_job(S0, S1), phi=1.9 * PHI) == 64
    assert capped(0.4, a_job(S0, S1), phi=NOISE_GROWTH * PHI) == 256


def test_a_cap_expires() -> None:
    assert capped(0.4, a_job(S0, S1), later_s=CAP_DURATION_S) == 256


def test_the_end_of_a_job_removes_its_cap() -> None:
    caps = BatchCaps()
    caps.observe(a_job(S0, S1), trial(0.4), PHI, NOW)

    caps.forget(A)

    assert caps.capped(a_job(S0, S1), 256, PHI) == 256


# --- what telemetry makes of it


def reports(group: int, batch: int, speed: float, nodes: int = 1) -> list[StepsSeen]:
    """Four of a group of two slots; the first one may be passed over."""
    return [
        StepsSeen(
            job=A, family="f", group=group, slots=2, nodes=nodes, global_batch=batch,
            step=1000 * group + at, samples_done=10**6 * group + batch * at, samples_per_s=speed,
            noise_scale=PHI,
        )
        for at in range(4)
    ]  # fmt: skip


def learnt(job: JobView, *events: StepsSeen, **options: Any) -> Estimates:
    estimates = Estimates(OnesOptions(**options))
    estimates.update(view_of(row_of(4), job), contended=False, now=NOW)
    for event in events:
        estimates.observe(event, NOW)
    return estimates


@pytest.mark.parametrize(("speed", "limit"), [(320.0, 64), (1000.0, 128)])
def test_a_slower_larger_batch_is_capped_after_a_few_reports(speed: float, limit: int) -> None:
    job = a_job(S0, S1)
    estimates = learnt(job, *reports(1, 64, 640.0), *reports(2, 128, speed))

    assert min(estimates.limit(job), 128) == limit
    assert estimates.growth_loss(job) is None, "its slots may stay"


def test_a_slower_place_counts_as_a_loss_at_the_same_size() -> None:
    job = a_job(S0, S1, batch=64)
    estimates = learnt(job, *reports(1, 64, 640.0), *reports(2, 64, 320.0, nodes=2))

    assert estimates.growth_loss(job) == (pytest.approx(0.5), 2)
    assert estimates.limit(job) >= 64


def test_batch_caps_can_be_switched_off() -> None:
    job, events = a_job(S0, S1), (*reports(1, 64, 640.0), *reports(2, 128, 320.0))

    limits = [learnt(job, *events, batch_caps=on).limit(job) for on in (True, False)]

    assert limits[0] == 64
    assert limits[1] >= 128


def test_place_trials_can_be_switched_off() -> None:
    job = a_job(S0, S1, batch=64)
    placed = (*reports(1, 64, 640.0), *reports(2, 64, 320.0, nodes=2))
    alone = [msgspec.structs.replace(report, slots=1) for report in reports(1, 64, 640.0)]

    assert learnt(job, *placed, place_trials=False).growth_loss(job) is None
    grown = learnt(job, *alone, *reports(2, 64, 320.0), place_trials=False)
    assert grown.growth_loss(job) == (pytest.approx(0.5), 1)


# --- what the policy does about it


def answer(job: JobView, *events: StepsSeen) -> Plan:
    """Five seconds after the job was changed, on two nodes with two slots each."""
    policy = Ones(OnesOptions(search="evolution"))
    view = view_of(row_of(2, 2), job)
    policy.plan(view, NOW)
    for event in events:
        policy.observe(event, Seconds(104.0))
    policy.improve(view, Budget(generations=5), default_rng(0), Seconds(105.0))
    return policy.plan(view, Seconds(105.0))


def moved(*on: SlotId) -> JobView:
    """It needs two slots, finished an epoch long ago, and came to these ones just now."""
    job = a_job(*on, batch=64, moved_at=NOW, placed_at=NOW)
    return msgspec.structs.replace(job, least=2, most=2, batch_limit=64)


def test_a_job_leaves_a_slower_place_before_its_gate_opens() -> None:
    plan = answer(moved(S0, T0), *reports(1, 64, 640.0), *reports(2, 64, 320.0, nodes=2))

    assert plan.local_batch in ({A: {S0: 32, S1: 32}}, {A: {T0: 32, T1: 32}})


def test_a_job_stays_in_a_slightly_slower_place() -> None:
    plan = answer(moved(S0, T0), *reports(1, 64, 640.0), *reports(2, 64, 600.0, nodes=2))

    assert plan.local_batch == {A: {S0: 32, T0: 32}}


def test_a_job_returns_to_the_better_batch_on_the_same_slots() -> None:
    job = msgspec.structs.replace(a_job(S0, S1, moved_at=NOW, placed_at=NOW), least=2, most=2)
    policy = Ones()
    view = view_of(row_of(2, 2), job)
    policy.plan(view, NOW)
    for event in [*reports(1, 64, 640.0), *reports(2, 128, 320.0)]:
        policy.observe(event, Seconds(104.0))

    assert policy.batches(view, Seconds(105.0)).local_batch == {A: {S0: 32, S1: 32}}
