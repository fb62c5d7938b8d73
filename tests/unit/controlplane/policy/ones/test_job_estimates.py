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
    GainSeen,
    JobEnded,
    JobView,
    PlanTaken,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.ones.job_estimates import (
    MAX_FACTOR,
    MIN_FACTOR,
    Estimates,
    GainCorrections,
)
from controlplane.policy.ones.job_history import BatchHold
from controlplane.policy.ones.job_rows import SizeTable, size_table
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.observed_families import Colocation
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import epoch_seen, row_of, steps_seen, view_of
from tests.unit.controlplane.policy.tables import cases

OPTIONS = OnesOptions(warmup_steps=10, report_interval_s=30.0, length_model="residual")


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


Size = tuple[int, int, int, str, Colocation | None]


def sizes(estimates: Estimates) -> dict[Size, float]:
    """Mean step times by nodes, slots, local batch, type of GPU and colocation."""
    return {size: mean.step_s for size, mean in estimates.families["f"].means.items()}


# --- speeds


NAN, INF = float("nan"), float("inf")


def two_reports(**other: Any) -> list[StepsSeen]:
    return [steps(0, samples_done=5), steps(5, **other)]


@cases(
    "events, expected",
    a_whole_epoch=([epoch()], {(1, 2, 32, "", None): 0.1}),
    a_new_measurement_counts_three_tenths=(
        [epoch(), epoch(samples_per_s=320.0)], {(1, 2, 32, "", None): pytest.approx(0.13)},
    ),
    an_epoch_of_several_groups=([epoch(whole=False)], {}),
    epochs_without_a_speed=([epoch(samples_per_s=speed) for speed in (0.0, INF)], {}),
    an_epoch_without_slots=([epoch(slots=0)], {}),
    the_first_report_of_a_group=([steps(2)], {}),
    the_second_report_of_a_group=([steps(2), steps(4)], {(1, 1, 64, "", None): 0.2}),
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


def test_an_epoch_beside_neighbours_measures_nothing() -> None:
    estimates = met(knowing(), running(), job_view(B, family="g", running_on={S1: 64}))

    estimates.observe(epoch(), Seconds(2.0))

    assert sizes(estimates) == {}


@pytest.mark.parametrize(
    ("options", "movable", "expected"),
    [
        (OPTIONS, True, {(1, 1, 64, "v100", (False, "g", True)): 0.2}),
        (OnesOptions(gpu_types=False, interference=False), True, {(1, 1, 64, "", None): 0.2}),
        (OPTIONS, False, {}),  # the view shows the future slots, not those of the telemetry
    ],
    ids=["learnt", "switched off", "changing"],
)
def test_telemetry_is_recorded_with_the_gpu_type_and_the_worst_neighbour(
    options: OnesOptions,
    movable: bool,  # noqa: FBT001
    expected: dict[Size, float],
) -> None:
    neighbour = job_view(B, family="g", running_on={S1: 64, T0: 64})
    mine = running(movable=movable)
    estimates = met(knowing(options=options), mine, neighbour, models=("v100", "a100"))

    for step in (2, 4):
        estimates.observe(steps(step), Seconds(2.0))

    assert sizes(estimates) == expected
    if not options.gpu_types:
        assert estimates.type_slowdowns(("v100", "a100"), ["f"]) is None
        assert estimates.log_slowdowns(["f", "g"]) is None


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


# --- types of GPU, and neighbours


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
    # H alone, too: neighbours are told apart, types are not. The level of a family's costs means nothing.
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


def test_slow_downs_by_neighbours_are_learnt_from_both_placements() -> None:
    told = Told(noise=0.05)
    for _ in range(3):
        told.train(at(S0, "f"), at(T0, "g"), at(S1, "g", 2), f=0.15, g=0.1)
        told.train(at(S0, "f"), at(T0, "g"))
        told.train(at(S0, "g"), at(S1, "g", 2))

    log_slowdowns = told.estimates.log_slowdowns(["f", "g"])

    # classes: f on one node, on several, g on one node, on several
    assert log_slowdowns is not None
    assert np.exp(log_slowdowns[0, 2]) == pytest.approx(1.5, rel=0.1), "f beside g"
    assert log_slowdowns[2, 0] == pytest.approx(0.0, abs=0.05), "g beside f"
    assert log_slowdowns[2, 2] == pytest.approx(0.0, abs=0.05), "g beside g"
    assert (log_slowdowns >= 0.0).all()


@pytest.mark.parametrize(("beside_s", "noise"), [(0.1, 0.05), (0.07, 0.0)], ids=["no", "help"])
def test_neighbours_without_an_effect_or_that_seem_to_help_cost_nothing(
    beside_s: float, noise: float
) -> None:
    told = Told(noise=noise)
    for _ in range(3):
        told.train(at(S0, "f"), at(S1, "g"), f=beside_s)
        told.train(at(S0, "f"), at(T0, "g"))

    assert told.estimates.log_slowdowns(["f", "g"]) is None


def test_families_that_never_met_use_the_mean_slow_down() -> None:
    told = Told()
    for _ in range(3):
        told.train(at(S0, "f"), at(S1, "g"), f=0.15, g=0.15)
        told.train(at(S0, "f"), at(T0, "g"), f=0.1, g=0.1)

    log_slowdowns = told.estimates.log_slowdowns(["new", "newer"])

    assert log_slowdowns is not None
    assert log_slowdowns[0, 2] == log_slowdowns[2, 0] == pytest.approx(np.log(1.5), rel=0.1)


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


def gain(predicted: float, realised: float, correction: float | None = 1.0) -> GainSeen:
    return GainSeen(
        job=A, family="f", predicted=predicted, realised=realised, correction=correction
    )


def corrected_by(*events: GainSeen) -> GainCorrections:
    corrections = GainCorrections()
    for event in events:
        corrections.observe(event)
    return corrections


ONCE = 0.5 ** (1 / 1.5)  # the factor after one outcome of half the prediction
HALF = gain(2.0, 1.0)


@cases(
    "gains, factor",
    no_outcome=([], 1.0),
    half_of_the_prediction=([HALF], ONCE),
    corrected_predictions_are_compared_with_the_model=(
        [HALF, *[gain(2.0 * ONCE, 1.0, ONCE)] * 20], pytest.approx(0.5, rel=0.05),
    ),
    no_correction=([gain(2.0, 1.0, None)], 1.0),
    the_least_factor=([gain(10.0, 0.1)] * 50, MIN_FACTOR),
    the_largest_factor=([gain(0.1, 10.0)] * 50, MAX_FACTOR),
    hostile_values=(
        [each for bad in (0.0, -1.0, NAN)
         for each in (gain(bad, 1.0), gain(1.0, bad), gain(1.0, 1.0, bad))], 1.0,
    ),
)  # fmt: skip
def test_outcomes_of_predictions_correct_the_next_predictions_of_the_family(
    gains: list[GainSeen], factor: Any
) -> None:
    learnt = corrected_by(*gains)

    assert learnt.factor("f") == (pytest.approx(factor) if isinstance(factor, float) else factor)
    assert learnt.factor("g") == 1.0


def test_only_sizes_beyond_the_measured_ones_are_corrected() -> None:
    learnt, nodes, slots = corrected_by(HALF), np.array([1, 1, 1, 2]), np.array([1, 2, 4, 2])
    known, factor = np.nan, learnt.factor("f")

    for measured, expected in (
        ([(1, 1), (1, 2)], [known, known, factor, factor]), ([], [known] * 4),
    ):  # fmt: skip
        np.testing.assert_equal(learnt.corrections("f", measured, nodes, slots), expected)


# --- the next job of the family


def measured(slots: int, step_s: float) -> EpochSeen:
    return epoch_seen(B, family="f", slots=slots, samples_per_s=64 / step_s)


def promised(*events: PolicyEvent, **options: Any) -> SizeTable:
    """What one, two and four slots of one node promise the next job of a family."""
    chosen = OnesOptions(**options)
    estimates = Estimates(chosen)
    for event in (measured(1, 0.1), measured(2, 0.06), *events):
        estimates.observe(event, Seconds(1.0))
    job = job_view(A, slots=(1, 4), family="f", batch_limit=64, local_limit=64)
    sizes = np.array([1, 2, 4])
    return size_table(job, estimates, chosen, sizes, np.ones_like(sizes), hold=BatchHold.NO)


def test_a_wrong_prediction_corrects_unmeasured_sizes_of_the_next_job() -> None:
    before, after = promised(), promised(HALF)
    meanwhile = promised(HALF, measured(4, 0.05))
    off = promised(HALF, gain_correction=False)

    assert (after.speeds / before.speeds).tolist() == pytest.approx([1.0, 1.0, ONCE])
    assert (after.gains / before.gains).tolist() == pytest.approx([1.0, 1.0, ONCE])
    np.testing.assert_allclose(after.corrections, [np.nan, np.nan, ONCE])
    assert meanwhile.speeds.tolist() == pytest.approx([640.0, 64 / 0.06, 1280.0])
    assert off.speeds.tolist() == before.speeds.tolist()
