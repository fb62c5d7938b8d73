"""Estimates of jobs and families: speeds, limits, gates, service, noise, slow-downs, gains."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import (
    EpochSeen,
    JobEnded,
    JobView,
    PlanTaken,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.ones.job_estimates import (
    Estimates,
)
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import epoch_seen, row_of, steps_seen, view_of
from tests.unit.controlplane.policy.tables import cases

OPTIONS = OnesOptions(warmup_steps=10, report_interval_s=30.0)


def epoch(job: JobId = A, **changes: Any) -> EpochSeen:
    return epoch_seen(job, **{"family": "f", "slots": 2, "samples_per_s": 640.0, **changes})


def steps(step: int, job: JobId = A, **changes: Any) -> StepsSeen:
    usual = {"family": "f", "step": step, "samples_done": 64 * step, "samples_per_s": 320.0}
    return steps_seen(job, **{**usual, **changes})


def knowing(*events: tuple[float, Any], options: OnesOptions = OPTIONS) -> Estimates:
    estimates = Estimates(options)
    for at, event in events:
        estimates.observe(event, Seconds(at))
    return estimates


def running(**changes: Any) -> JobView:
    how = {"family": "f", "batch_limit": 1024, "running_on": {S0: 64}, **changes}
    return job_view(A, **how)


def met(
    estimates: Estimates,
    *jobs: JobView,
    now: float = 1.0,
    contended: bool = False,
    models: tuple[str, ...] = ("", ""),
) -> Estimates:
    """It is shown these jobs on two nodes with two slots each."""
    view = view_of(row_of(2, 2, models=models), *jobs)
    estimates.update(view, contended=contended, now=Seconds(now))
    return estimates


Size = tuple[int, int, int, str]


def sizes(estimates: Estimates) -> dict[Size, float]:
    """Mean step times by nodes, slots, local batch and type of GPU."""
    return {size: mean.step_s for size, mean in estimates.families["f"].means.items()}


# --- speeds


NAN, INF = float("nan"), float("inf")


def two_reports(**other: Any) -> list[StepsSeen]:
    return [steps(0, samples_done=5), steps(5, **other)]


@cases(
    "events, expected",
    a_whole_epoch=([epoch()], {(1, 2, 32, ""): 0.1}),
    a_new_measurement_counts_three_tenths=(
        [epoch(), epoch(samples_per_s=320.0)], {(1, 2, 32, ""): pytest.approx(0.13)},
    ),
    an_epoch_of_several_groups=([epoch(whole=False)], {}),
    epochs_without_a_speed=([epoch(samples_per_s=speed) for speed in (0.0, INF)], {}),
    an_epoch_without_slots=([epoch(slots=0)], {}),
    the_first_report_of_a_group=([steps(2)], {}),
    the_second_report_of_a_group=([steps(2), steps(4)], {(1, 1, 64, ""): 0.2}),
    a_report_of_another_group=(two_reports(group=2), {}),
    a_report_with_another_batch=(two_reports(global_batch=128), {}),
    a_report_without_progress=(two_reports(samples_done=3), {}),
    a_report_without_speed=(two_reports(samples_per_s=0.0), {}),
    an_endless_speed=(two_reports(samples_per_s=INF), {}),
    a_speed_that_is_no_number=(two_reports(samples_per_s=NAN), {}),
)  # fmt: skip
def test_whole_epochs_and_second_reports_of_a_group_measure_a_size(
    events: list[PolicyEvent], expected: dict[Size, float]
) -> None:
    estimates = knowing(*((10.0 + at / 100, event) for at, event in enumerate(events)))

    assert sizes(estimates) == expected
    assert not estimates.families["g"].speed_model(32).known
    assert estimates.families["f"].speed_model(32).known == bool(expected)
    widest = max((slots for _, slots, *_ in expected), default=1)
    assert (estimates.families["f"].largest, estimates.families["g"].largest) == (widest, 1)


@pytest.mark.parametrize(
    ("movable", "expected"),
    # If the job is changing, the view shows the future slots, not those of the telemetry.
    [(True, {(1, 1, 64, "v100"): 0.2}), (False, {})],
    ids=["settled", "changing"],
)
def test_telemetry_is_recorded_with_the_gpu_type(
    movable: bool,  # noqa: FBT001
    expected: dict[Size, float],
) -> None:
    estimates = met(knowing(), running(movable=movable), models=("v100", "a100"))

    for step in (2, 4):
        estimates.observe(steps(step), Seconds(2.0))

    assert sizes(estimates) == expected


# --- limits


def test_a_job_is_warm_after_an_epoch_or_ten_measured_steps() -> None:
    job = running()

    assert not knowing().warm(job)
    assert not knowing((1.0, steps(4)), (2.0, steps(9))).warm(job)
    assert not knowing((1.0, steps(10))).warm(job), "how long they took cannot be told yet"
    assert knowing((1.0, steps(4)), (2.0, steps(10))).warm(job)
    assert knowing((0.5, epoch(B)), (1.0, steps(10))).warm(job), "a relative was measured"
    assert knowing().warm(running(epoch=1))


def test_each_plan_that_leaves_a_job_waiting_halves_its_limit() -> None:
    estimates = met(knowing((1.0, epoch(global_batch=512))), running(running_on={S0: 512}), now=2.0)
    waiting = msgspec.structs.replace(running(), running_on={})
    limits = [estimates.limit(waiting)]

    for _ in range(5):
        estimates.observe(PlanTaken(waiting=(A, B)), Seconds(3.0))
        limits.append(met(estimates, waiting, now=3.0).limit(waiting))
    assert limits == [512, 256, 128, 64, 64, 64]


def test_a_plan_that_runs_a_job_keeps_its_limit() -> None:
    estimates = met(knowing(), running(), now=1.0)
    estimates.observe(steps(4), Seconds(2.0))
    estimates.observe(steps(20), Seconds(2.0))

    estimates.observe(PlanTaken(waiting=(B,)), Seconds(3.0))

    assert estimates.limit(running()) == 128


# --- when a job may be changed


@cases(
    "moved_at, epoch_at, now, gated",
    just_moved=(100.0, 90.0, 110.0, True),
    an_epoch_before=(100.0, 100.0, 110.0, True),
    an_epoch_since=(100.0, 105.0, 110.0, False),
    almost_an_interval=(100.0, 90.0, 129.9, True),
    an_interval=(100.0, 90.0, 130.0, False),
)
def test_a_moved_job_is_gated_for_an_epoch_or_a_report_interval(
    *, moved_at: float, epoch_at: float, now: float, gated: bool
) -> None:
    job = running(moved_at=Seconds(moved_at), epoch_at=Seconds(epoch_at))

    assert (now < knowing().gate(job)) is gated


# --- how much is left, and who comes


def test_the_remaining_work_comes_from_the_user_or_from_relatives() -> None:
    done = JobEnded(job=B, family="f", samples_done=900, succeeded=True)
    failed = JobEnded(job=B, family="f", samples_done=900, succeeded=False)

    assert knowing().lengths.remaining(running()) is None
    assert knowing().lengths.remaining(running(stop_samples=500, samples_done=200)) == 300
    assert knowing((1.0, done)).lengths.remaining(running(samples_done=200)) == 700
    assert knowing((1.0, failed)).lengths.remaining(running(samples_done=200)) == 700
    assert knowing((1.0, failed)).lengths.remaining(running(samples_done=500)) == 500
    assert knowing((1.0, steps(5, B))).lengths.remaining(running()) == 320


def ended(slot_s: float, family: str = "g", *, succeeded: bool = True) -> JobEnded:
    return JobEnded(job=B, family=family, samples_done=900, succeeded=succeeded, slot_s=slot_s)


THREE = [ended(100.0), ended(300.0), ended(800.0)]


@cases(
    "past, changes, left",
    a_new_job=([ended(100.0)], {}, 100.0),
    a_running_job=([ended(100.0)], {"moved_at": Seconds(-30.0), "slot_s": 20.0}, 50.0),
    a_stated_end=([ended(100.0)], {"stop_samples": 9}, None),
    a_relative_finished=([ended(100.0), ended(100.0, family="f")], {}, None),
    no_job_ended=([], {}, None),
    a_job_failed=([ended(100.0, succeeded=False)], {}, None),
    the_mean_of_three_jobs=(THREE, {"slot_s": 0.0, "running_on": {}}, 400.0),
    the_rest_of_two_jobs_with_more_service=(THREE, {"slot_s": 100.0, "running_on": {}}, 450.0),
    the_rest_of_one_job=(THREE, {"slot_s": 500.0, "running_on": {}}, 300.0),
    no_job_with_more_service=(THREE, {"slot_s": 800.0, "running_on": {}}, None),
)
def test_jobs_with_more_service_predict_the_rest_without_better_evidence(
    past: list[JobEnded], changes: dict[str, Any], left: float | None
) -> None:
    events = [(1.0, event) for event in past]
    alone = knowing(*events, options=OnesOptions(share_family=False))

    assert knowing(*events).remaining_service(running(**changes), Seconds(0.0)) == left
    assert alone.remaining_service(running(**changes), Seconds(0.0)) is None


# --- noise scales


def phi(*events: Any, **changes: Any) -> float:
    """What is believed of a job that began with a batch of 64, after these reports."""
    estimates = knowing(*((1.0, each) for each in events))
    return estimates.noise_scale(running(**changes))


RELATIVE = epoch(B, epoch=1, noise_scale=32.0)


LATER = epoch(B, epoch=9, noise_scale=2048.0)
EIGHTH = 2 ** (1 / 8)


@cases(
    "events, changes, expected",
    four_times_the_first_batch=([], {}, 256.0),
    relatives_at_this_stage=([RELATIVE], {"epoch": 2}, 32.0),
    relatives_at_another_stage=([RELATIVE], {"epoch": 4}, 256.0),
    relatives_at_a_later_stage=([RELATIVE, LATER], {"epoch": 8}, 2048.0),
    no_family=([epoch(B, family="", epoch=1, noise_scale=32.0)], {"family": ""}, 256.0),
    telemetry=([steps(1, noise_scale=1024.0), RELATIVE], {"noise_scale": 16.0}, 1024.0),
    view=([], {"noise_scale": 1024.0}, 1024.0),
    rounded_down_to_an_eighth_of_a_doubling=([], {"noise_scale": 267.0}, 256.0),
    rounded_up_to_an_eighth_of_a_doubling=([], {"noise_scale": 268.0}, 256.0 * EIGHTH),
    the_same_eighth=([], {"noise_scale": 279.0}, 256.0 * EIGHTH),
)
def test_a_noise_scale_is_the_jobs_own_or_its_relatives_or_the_prior(
    events: list[Any], changes: dict[str, Any], expected: float
) -> None:
    assert phi(*events, **changes) == expected


@pytest.mark.parametrize("hostile", [0.0, -5.0, NAN, INF, 5e-324, 1e308])
def test_implausible_noise_scales_are_ignored(hostile: float) -> None:
    reports = [epoch(noise_scale=hostile), steps(1, noise_scale=hostile)]

    assert phi(*reports, noise_scale=hostile) == 256.0


@given(
    told=st.lists(st.floats() | st.none(), max_size=8),
    relatives=st.lists(st.floats() | st.none(), max_size=4),
    shown=st.floats() | st.none(),
)
def test_the_noise_scale_is_always_finite_and_positive(
    told: list[float | None], relatives: list[float | None], shown: float | None
) -> None:
    events: list[Any] = [epoch(B, epoch=1, noise_scale=value) for value in relatives]
    events += [steps(step, noise_scale=value) for step, value in enumerate(told)]

    found = phi(*events, noise_scale=shown)

    assert 0.0 < found < 1e16
    assert 8 * np.log2(found) == pytest.approx(round(8 * np.log2(found)), abs=1e-6)


# --- types of GPU


class Told:
    """Telemetry of whoever trains on two nodes of two slots, as long as their steps take."""

    def __init__(self, *models: str, noise: float = 0.0) -> None:
        self.estimates = knowing()
        self.models = models or ("", "")
        self.noise, self.rng, self.group = noise, default_rng(0), 0

    def train(self, *jobs: JobView, reports: int = 12, **step_s: float) -> None:
        """They train so for a while; a step takes a family 0.1 s if nothing else is said."""
        met(self.estimates, *jobs, models=self.models)
        self.group += 1
        for job in jobs:
            for step in range(reports + 1):
                seconds = step_s.get(job.family, 0.1)
                seconds *= 1.0 + self.noise * float(self.rng.standard_normal())
                done = 10_000 * self.group + 64 * step
                self.estimates.observe(
                    steps(step, job.job, family=job.family, group=self.group, samples_done=done,
                          samples_per_s=64 / seconds),
                    Seconds(1.0),
                )  # fmt: skip
        for family in {job.family for job in jobs}:
            self.estimates.families[family].speed_model(64)


def at(slot: SlotId, family: str, number: int = 1) -> JobView:
    return job_view(JobId(f"{family}-{number}"), family=family, running_on={slot: 64})


F_FIRST, G_FIRST = (at(S0, "f"), at(T0, "g")), (at(T0, "f"), at(S0, "g"))
BY_TYPE = [(F_FIRST, {"f": 0.1, "g": 0.3}), (G_FIRST, {"f": 0.2, "g": 0.2})] * 3
MEAN = pytest.approx((2.0 * 1.5) ** 0.5, rel=0.05)


@cases(
    "models, noise, rounds, families, slowdowns",
    by_family=(("fast", "slow"), 0.05, BY_TYPE, "fg",
               [[1.0, pytest.approx(2.0, rel=0.1)], [1.0, pytest.approx(1.5, rel=0.1)]]),
    # H trained before anybody knew of types.
    a_family_without_a_measurement_uses_the_mean_of_others=(
        ("fast", "slow"), 0.0, [((at(S0, "h"),), {}), *BY_TYPE], "uh", [[1.0, MEAN], [1.0, MEAN]]),
    # The level of a family's costs means nothing.
    an_unmeasured_type_is_slower_relative_to_measured_types=(
        ("fast", "slow"), 0.0, [((at(S0, "h"), at(S1, "g")), {}), ((at(S0, "h"),), {}),
        *[((at(S0, "f"),), {"f": 0.1}), ((at(T0, "f"),), {"f": 0.2})] * 3], "h",
        [[1.0, pytest.approx(2.0, rel=0.05)]]),
    types_that_are_alike=(("one", "other"), 0.05, [(F_FIRST, {}), (G_FIRST, {})] * 3, "fg", None),
    one_type=(("one", "one"), 0.05, [(F_FIRST, {})], "fg", None),
)  # fmt: skip
def test_the_slow_down_of_a_gpu_type_is_learnt(
    models: tuple[str, str], noise: float, rounds: Any, families: str, slowdowns: Any
) -> None:
    told = Told(*models, noise=noise)
    for jobs, step_s in rounds:
        told.train(*jobs, **step_s)

    found = told.estimates.type_slowdowns(tuple(dict.fromkeys(models)), families)

    assert (None if found is None else found.tolist()) == slowdowns


# --- from history

PAST: list[tuple[float, Any]] = [
    (1.0, epoch(slots=1)),
    (3.0, epoch(slots=1, samples_per_s=600.0)),
    (5.0, epoch(slots=2, global_batch=128, samples_per_s=1100.0)),
    (6.0, JobEnded(job=B, family="f", samples_done=900, succeeded=True)),
]


def test_a_restarted_search_learns_the_same_speeds_and_lengths() -> None:
    lived = Estimates(OPTIONS)
    for at, event in PAST:
        lived.observe(event, Seconds(at))
        met(lived, running(), now=at)
        lived.families["f"].speed_model(64)
    again = met(knowing(*PAST), running(), now=7.0)

    assert sizes(again) == sizes(lived)
    assert again.lengths.remaining(running()) == lived.lengths.remaining(running()) == 900
    assert again.families["f"].largest == lived.families["f"].largest == 2
    assert again.limit(running()) == 128
    size = (np.array([1, 1]), np.array([1, 2]), np.array([64.0, 64.0]))
    one, other = (k.families["f"].speed_model(64).step_s(*size) for k in (lived, again))
    assert other == pytest.approx(one, rel=0.15)


@settings(max_examples=examples(80))
@given(
    doublings=st.integers(0, 6), batch=st.sampled_from([64, 128, 512, 5000]), moment=st.floats(0, 9)
)
def test_a_limit_learnt_again_is_within_the_users_bounds(
    doublings: int, batch: int, moment: float
) -> None:
    past = [(float(n), epoch(global_batch=batch)) for n in range(doublings)]

    estimates = met(knowing(*past), running(), now=doublings + moment)

    assert 64 <= estimates.limit(running()) <= 1024
