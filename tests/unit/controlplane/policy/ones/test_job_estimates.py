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
from controlplane.policy.ones.job_rows import SizeTable, size_table
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.observed_families import Colocation
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import epoch_seen, row_of, steps_seen, view_of

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


def test_a_whole_epoch_measures_its_size() -> None:
    assert sizes(knowing((1.0, epoch()))) == {(1, 2, 32, "", None): 0.1}


@pytest.mark.parametrize(
    "changes",
    [{"whole": False}, {"samples_per_s": 0.0}, {"samples_per_s": float("inf")}, {"slots": 0}],
    ids=str,
)
def test_an_epoch_of_several_groups_or_without_speed_measures_nothing(
    changes: dict[str, Any],
) -> None:
    assert sizes(knowing((1.0, epoch(**changes)))) == {}


def test_the_second_report_of_a_group_is_a_measurement() -> None:
    estimates = knowing((10.0, steps(2)))
    assert sizes(estimates) == {}

    estimates.observe(steps(4, samples_per_s=320.0), Seconds(10.01))  # held up, or early

    assert sizes(estimates) == {(1, 1, 64, "", None): 0.2}


@pytest.mark.parametrize(
    "other",
    [
        {"group": 2}, {"global_batch": 128}, {"samples_done": 3}, {"samples_per_s": 0.0},
        {"samples_per_s": float("inf")}, {"samples_per_s": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_a_report_of_another_group_or_without_progress_or_speed_measures_nothing(
    other: dict[str, Any],
) -> None:
    estimates = knowing((10.0, steps(0, samples_done=5)), (13.0, steps(5, **other)))

    assert sizes(estimates) == {}


def test_a_new_measurement_counts_three_tenths() -> None:
    estimates = knowing((1.0, epoch()), (2.0, epoch(samples_per_s=320.0)))

    assert sizes(estimates) == {(1, 2, 32, "", None): pytest.approx(0.13)}


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


def test_families_are_measured_separately() -> None:
    estimates = knowing((1.0, epoch()))

    assert not estimates.families["g"].speed_model(32).known
    assert estimates.families["f"].speed_model(32).known
    assert (estimates.families["f"].largest, estimates.families["g"].largest) == (2, 1)


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


@pytest.mark.parametrize(
    ("moved_at", "epoch_at", "now", "gated"),
    [
        (100.0, 90.0, 110.0, True),
        (100.0, 100.0, 110.0, True),
        (100.0, 105.0, 110.0, False),
        (100.0, 90.0, 129.9, True),
        (100.0, 90.0, 130.0, False),
    ],
    ids=["just moved", "an epoch before", "an epoch since", "almost an interval", "an interval"],
)
def test_a_moved_job_is_gated_for_an_epoch_or_a_report_interval(
    moved_at: float,
    epoch_at: float,
    now: float,
    gated: bool,  # noqa: FBT001
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


def test_jobs_with_more_service_predict_the_rest() -> None:
    estimates = knowing((1.0, ended(100.0)), (2.0, ended(300.0)), (3.0, ended(800.0)))
    served = [running(slot_s=slot_s, running_on={}) for slot_s in (0.0, 100.0, 500.0, 800.0)]

    left = [estimates.remaining_service(job, Seconds(9.0)) for job in served]

    assert left == [400.0, 450.0, 300.0, None]


@pytest.mark.parametrize(
    ("past", "changes", "left"),
    [
        ([ended(100.0)], {}, 100.0),
        ([ended(100.0)], {"moved_at": Seconds(-30.0), "slot_s": 20.0}, 50.0),
        ([ended(100.0)], {"stop_samples": 9}, None),
        ([ended(100.0), ended(100.0, family="f")], {}, None),
        ([], {}, None),
        ([ended(100.0, succeeded=False)], {}, None),
    ],
    ids=["new", "running", "stated end", "a relative finished", "no job ended", "failed"],
)
def test_service_predicts_the_rest_of_a_job_without_better_evidence(
    past: list[JobEnded], changes: dict[str, Any], left: float | None
) -> None:
    events = [(1.0, event) for event in past]
    alone = knowing(*events, options=OnesOptions(share_lengths=False))

    assert knowing(*events).remaining_service(running(**changes), Seconds(0.0)) == left
    assert alone.remaining_service(running(**changes), Seconds(0.0)) is None


# --- noise scales


def phi(*events: Any, **changes: Any) -> float:
    """What is believed of a job that began with a batch of 64, after these reports."""
    estimates = knowing(*((1.0, each) for each in events))
    return estimates.noise_scale(running(**changes))


RELATIVE = epoch(B, epoch=1, noise_scale=32.0)


@pytest.mark.parametrize(
    ("events", "changes", "expected"),
    [
        ([], {}, 256.0),
        ([RELATIVE], {"epoch": 2}, 32.0),
        ([RELATIVE], {"epoch": 4}, 256.0),
        ([RELATIVE, epoch(B, epoch=9, noise_scale=2048.0)], {"epoch": 8}, 2048.0),
        ([epoch(B, family="", epoch=1, noise_scale=32.0)], {"family": ""}, 256.0),
        ([steps(1, noise_scale=1024.0), RELATIVE], {"noise_scale": 16.0}, 1024.0),
        ([], {"noise_scale": 1024.0}, 1024.0),
    ],
    ids=[
        "four times the first batch", "relatives at this stage", "relatives at another stage",
        "relatives at a later stage", "no family", "telemetry", "view",
    ],
)  # fmt: skip
def test_a_noise_scale_is_the_jobs_own_or_its_relatives_or_the_prior(
    events: list[Any], changes: dict[str, Any], expected: float
) -> None:
    assert phi(*events, **changes) == expected


def test_a_noise_scale_is_rounded_to_an_eighth_of_a_doubling() -> None:
    told = [phi(noise_scale=at) for at in (256.0, 260.0, 267.0, 268.0, 279.0)]

    assert told == [256.0, 256.0, 256.0, 256 * 2 ** (1 / 8), 256 * 2 ** (1 / 8)]


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


@pytest.mark.parametrize("hostile", [0.0, -5.0, float("nan"), float("inf"), 5e-324, 1e308])
def test_implausible_noise_scales_are_ignored(hostile: float) -> None:
    reports = [epoch(noise_scale=hostile), steps(1, noise_scale=hostile)]

    assert phi(*reports, noise_scale=hostile) == 256.0


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

    def type_slowdowns(self, *families: str) -> list[list[float]] | None:
        found = self.estimates.type_slowdowns(self.models, families)
        return None if found is None else found.tolist()


def at(slot: SlotId, family: str, number: int = 1) -> JobView:
    return job_view(JobId(f"{family}-{number}"), family=family, running_on={slot: 64})


def test_the_slow_down_of_a_gpu_type_is_learnt_by_family() -> None:
    told = Told("fast", "slow", noise=0.05)
    for _ in range(3):
        told.train(at(S0, "f"), at(T0, "g"), f=0.1, g=0.3)
        told.train(at(T0, "f"), at(S0, "g"), f=0.2, g=0.2)

    assert told.type_slowdowns("f", "g") == [
        [1.0, pytest.approx(2.0, rel=0.1)],
        [1.0, pytest.approx(1.5, rel=0.1)],
    ]


def test_a_family_without_a_measurement_uses_the_mean_of_others() -> None:
    told = Told("fast", "slow")
    told.train(at(S0, "h"), h=0.1)  # before anybody knew of types
    for _ in range(3):
        told.train(at(S0, "f"), at(T0, "g"), f=0.1, g=0.3)
        told.train(at(T0, "f"), at(S0, "g"), f=0.2, g=0.2)

    mean = pytest.approx((2.0 * 1.5) ** 0.5, rel=0.05)
    assert told.type_slowdowns("unseen", "h") == [[1.0, mean], [1.0, mean]]


def test_an_unmeasured_type_is_slower_relative_to_measured_types() -> None:
    """Only differences are measured: the level of a family's costs means nothing."""
    told = Told("fast", "slow")
    told.train(at(S0, "h"), at(S1, "g"), h=0.1)
    told.train(at(S0, "h"), h=0.1)  # alone: neighbours are told apart, types are not
    for _ in range(3):
        told.train(at(S0, "f"), f=0.1)
        told.train(at(T0, "f"), f=0.2)

    assert told.type_slowdowns("h") == [[1.0, pytest.approx(2.0, rel=0.05)]]


def test_types_that_are_alike_cause_no_slow_down() -> None:
    alike = Told("one", "other", noise=0.05)
    for _ in range(3):
        alike.train(at(S0, "f"), at(T0, "g"))
        alike.train(at(T0, "f"), at(S0, "g"))
    one = Told("one", "one", noise=0.05)
    one.train(at(S0, "f"), at(T0, "g"))

    assert alike.type_slowdowns("f", "g") is None
    assert one.estimates.type_slowdowns(("one",), ["f", "g"]) is None


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


def test_neighbours_without_an_effect_do_not_matter() -> None:
    told = Told(noise=0.05)
    for _ in range(3):
        told.train(at(S0, "f"), at(S1, "g"))
        told.train(at(S0, "f"), at(T0, "g"))

    assert told.estimates.log_slowdowns(["f", "g"]) is None


def test_a_neighbour_that_seems_to_help_costs_nothing() -> None:
    told = Told()
    for _ in range(3):
        told.train(at(S0, "f"), at(S1, "g"), f=0.07)
        told.train(at(S0, "f"), at(T0, "g"), f=0.1)

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


MEASURED = [(1, 1), (1, 2)]


def gain(predicted: float, realised: float, correction: float | None = 1.0) -> GainSeen:
    return GainSeen(
        job=A, family="f", predicted=predicted, realised=realised, correction=correction
    )


def corrected_by(*events: GainSeen) -> GainCorrections:
    corrections = GainCorrections()
    for event in events:
        corrections.observe(event)
    return corrections


@pytest.mark.parametrize(
    ("gains", "factor"),
    [
        ([], 1.0),
        ([gain(2.0, 1.0)], 0.5 ** (1 / 1.5)),
        ([gain(2.0, 1.0, None)], 1.0),
        ([gain(10.0, 0.1)] * 50, MIN_FACTOR),
        ([gain(0.1, 10.0)] * 50, MAX_FACTOR),
        *(
            ([gain(bad, 1.0), gain(1.0, bad), gain(1.0, 1.0, bad)], 1.0)
            for bad in (0.0, -1.0, float("nan"))
        ),
    ],
)
def test_outcomes_of_predictions_correct_the_next_predictions_of_the_family(
    gains: list[GainSeen], factor: float
) -> None:
    learnt = corrected_by(*gains)

    assert learnt.factor("f") == pytest.approx(factor)
    assert learnt.factor("g") == 1.0


def test_corrected_predictions_are_compared_with_the_model() -> None:
    once = corrected_by(gain(2.0, 1.0)).factor("f")

    again = corrected_by(gain(2.0, 1.0), *[gain(2.0 * once, 1.0, once)] * 20)

    assert again.factor("f") == pytest.approx(0.5, rel=0.05)


def test_only_sizes_beyond_the_measured_ones_are_corrected() -> None:
    learnt, nodes, slots = (
        corrected_by(gain(2.0, 1.0)),
        np.array([1, 1, 1, 2]),
        np.array([1, 2, 4, 2]),
    )
    known, factor = np.nan, learnt.factor("f")

    np.testing.assert_equal(
        learnt.corrections("f", MEASURED, nodes, slots), [known, known, factor, factor]
    )
    np.testing.assert_equal(learnt.corrections("f", [], nodes, slots), [known] * 4)


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
    return size_table(job, estimates, chosen, sizes, np.ones_like(sizes), keep_batch=False)


def test_a_wrong_prediction_corrects_the_table_of_the_next_job() -> None:
    before, after = promised(), promised(gain(2.0, 1.0))

    factor = 0.5 ** (1 / 1.5)
    assert (after.speeds / before.speeds).tolist() == pytest.approx([1.0, 1.0, factor])
    assert (after.gains / before.gains).tolist() == pytest.approx([1.0, 1.0, factor])
    np.testing.assert_allclose(after.corrections, [np.nan, np.nan, factor])


def test_a_size_measured_meanwhile_is_not_corrected() -> None:
    after = promised(gain(2.0, 1.0), measured(4, 0.05))

    assert after.speeds.tolist() == pytest.approx([640.0, 64 / 0.06, 1280.0])


def test_the_correction_can_be_switched_off() -> None:
    off = promised(gain(2.0, 1.0), gain_correction=False)

    assert off.speeds.tolist() == promised().speeds.tolist()
