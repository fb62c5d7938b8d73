"""Remaining work of jobs by each length model, and stop rules on a metric."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest

from controlplane.policy.api import (
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    SearchStats,
    StepsSeen,
)
from controlplane.policy.ones.job_lengths import JobLengths
from controlplane.policy.ones.length_evidence import MetricLog
from controlplane.policy.options import LengthModelName
from schemas.ids import JobId
from schemas.jobs import StopRule
from tests.support.builders import A, B, job_view
from tests.support.views import epoch_seen
from tests.unit.controlplane.policy.tables import cases

EPOCH = 100  # samples
MODELS = get_args(LengthModelName)
TARGET = StopRule(metric="accuracy", at_least=0.9, consecutive=10)


def a_job(name: JobId = A, **changes: Any) -> JobView:
    done = int(changes.pop("epochs", 0))
    known = {"epoch": done, "samples_done": EPOCH * done, "epoch_samples": EPOCH, "family": "u/f"}
    return job_view(name, **{**known, **changes})


def epoch(number: int, job: JobId = A, **changes: Any) -> EpochSeen:
    done = {"epoch": number, "samples_done": EPOCH * number}
    return epoch_seen(job, family="u/f", global_batch=10, samples_per_s=1.0, **done, **changes)


def ended(total: int, job: JobId = B, *, succeeded: bool = True, family: str = "u/f") -> JobEnded:
    return JobEnded(job=job, family=family, samples_done=total, succeeded=succeeded)


def lived(number: int, epochs: int) -> list[PolicyEvent]:
    """A relative from its first epoch to its end."""
    name = JobId(f"r-{number}")
    return [*(epoch(at, name) for at in range(1, epochs + 1)), ended(EPOCH * epochs, name)]


def knowing(model: LengthModelName, *events: PolicyEvent) -> JobLengths:
    lengths = JobLengths(model)
    for event in events:
        lengths.observe(event)
    return lengths


def accuracy(lengths: JobLengths) -> SearchStats:
    return lengths.calibration.added_to(SearchStats())


TEN_EPOCHS = [event for number in range(8) for event in lived(number, 10)]


@pytest.mark.parametrize("model", MODELS)
@cases(
    "events, job, left",
    a_stated_end_is_exact=([ended(5000)], a_job(epochs=2, stop_samples=1000), 800.0),
    nothing_is_known_of_a_first_job=([], a_job(), None),
    without_finished_relatives_the_work_doubles=([epoch(3)], a_job(epochs=3), 300.0),
    relatives_of_ten_epochs_predict_five_more_after_five=(
        [*TEN_EPOCHS, *(epoch(at) for at in range(1, 6))], a_job(epochs=5),
        pytest.approx(500.0, rel=0.15),
    ),
)  # fmt: skip
def test_each_model_knows_the_remaining_work(
    model: LengthModelName, events: list[PolicyEvent], job: JobView, left: Any
) -> None:
    assert knowing(model, *events).remaining(job) == left


STEPS = StepsSeen(job=A, family="u/f", group=1, slots=1, nodes=1, global_batch=10, step=25,
                  samples_done=250)  # fmt: skip
MET = [epoch(at, stop_metric=value) for at, value in enumerate([0.5, 0.8, 0.91, 0.92], start=1)]
BOUNDED = StopRule(metric="accuracy", plateau=5, epochs=10)
PAST = [ended(1000, JobId(f"r-{n}")) for n in range(3)]
LOST = [ended(100, JobId(f"c-{n}"), succeeded=False) for n in range(9)]


@cases(
    "model, events, job, least, most",
    a_job_that_outlived_its_relatives_doubles=(
        "residual", TEN_EPOCHS, a_job(epochs=11), 1100.0, 1100.0),
    or_is_expected_to_end_by_the_mixture=("mixture", TEN_EPOCHS, a_job(epochs=11), 0.0, 150.0),
    telemetry_counts_between_epochs=(
        "residual", [ended(1000), STEPS], a_job(epochs=2), 750.0, 750.0),
    # 8 of 10 epochs, whatever the relative took
    a_met_target_leaves_the_epochs_that_hold_it=(
        "mixture", [ended(2000), *MET], a_job(epochs=4, stop=TARGET), 720.0, 880.0),
    an_unmet_target_leaves_at_least_all_of_them=(
        "mixture", [ended(500), epoch(4, stop_metric=0.5)], a_job(epochs=4, stop=TARGET),
        1000.0, 1000.0),
    a_bound_limits_the_remaining_work=(
        "mixture", [ended(100 * EPOCH), epoch(8, stop_metric=0.1)], a_job(epochs=8, stop=BOUNDED),
        0.0, 200.0),
    jobs_given_up_do_not_shorten_a_family=("mixture", [*PAST, *LOST], a_job(), 850.0, 1150.0),
)  # fmt: skip
def test_relatives_telemetry_and_stop_rules_predict_the_remaining_work(
    model: LengthModelName, events: list[PolicyEvent], job: JobView, least: float, most: float
) -> None:
    left = knowing(model, *events).remaining(job)

    assert left is not None
    assert least <= left <= most


def test_a_bound_counts_as_far_as_it_came_true_before() -> None:
    """Jobs that may train 100 epochs have always ended after 20: the next one will, too."""
    bounded = StopRule(metric="accuracy", plateau=5, epochs=100)
    lengths = JobLengths("mixture")
    new = a_job(epochs=1, stop=bounded)
    before = lengths.remaining(new)
    for number in range(6):
        name = JobId(f"r-{number}")
        lengths.observe(epoch(1, name, stop_metric=0.1))
        lengths.remaining(a_job(name, epochs=1, stop=bounded))
        lengths.observe(epoch(20, name, stop_metric=0.1))
        lengths.observe(ended(20 * EPOCH, name, family="u/g"))  # another family of this user

    after = lengths.remaining(new)

    assert before == pytest.approx(9900.0, rel=0.25)
    assert after == pytest.approx(1900.0, rel=0.5)


def test_a_rule_is_only_evidence_if_relatives_left_early() -> None:
    """Scripts that leave their loop early: what they state is a bound."""
    lengths = JobLengths("mixture")
    for number in range(4):
        name = JobId(f"r-{number}")
        assert lengths.remaining(a_job(name, stop_samples=1000)) == 1000.0 or number
        lengths.observe(ended(400, name))

    assert lengths.remaining(a_job(stop_samples=1000)) == pytest.approx(400.0, rel=0.2)


@pytest.mark.parametrize("model", MODELS)
def test_predictions_are_compared_with_actual_lengths(model: LengthModelName) -> None:
    lengths = knowing(model, *TEN_EPOCHS)
    for at in range(1, 10):
        lengths.observe(epoch(at))
        lengths.remaining(a_job(epochs=at))
    assert accuracy(lengths).length_predictions == 0, "no prediction was requested before"

    lengths.observe(ended(1000, A))

    seen = accuracy(lengths)
    assert seen.length_predictions == 7, (
        "after 1, 2, 3, 4, 5, 7 and 9 epochs: a quarter more each time"
    )
    assert seen.length_error is not None
    assert seen.length_error < 0.1


def test_a_job_given_up_is_no_outcome() -> None:
    lengths = knowing("residual", ended(1000))
    lengths.remaining(a_job())

    lengths.observe(ended(100, A, succeeded=False))

    assert accuracy(lengths) == SearchStats()


@pytest.mark.parametrize("model", MODELS)
def test_inactive_jobs_are_forgotten(model: LengthModelName) -> None:
    lengths = knowing(model, *(epoch(5, JobId(f"r-{n}")) for n in range(200)), epoch(3))

    lengths.forget({A})

    assert lengths.families["u/f"].at_work == {A: 300}


# --- families without a past


def strangers(*epochs: int) -> list[PolicyEvent]:
    """Jobs of other families that took so many epochs."""
    found: list[PolicyEvent] = []
    for number, many in enumerate(epochs):
        name = JobId(f"s-{number}")
        seen = msgspec.structs.replace(epoch(many, name), family=f"v/{number}")
        found += [seen, ended(many * 7000, name, family=f"v/{number}")]
    return found


@cases(
    "events, left, informed",
    three_jobs_of_other_families=(strangers(20, 20, 20), pytest.approx(1500.0, rel=0.25), True),
    two_jobs_of_other_families=(strangers(20, 20), 500.0, False),
    relatives_count_more=(
        [*strangers(20, 20, 20), ended(1000)], pytest.approx(500.0, rel=0.3), True),
)  # fmt: skip
def test_other_families_predict_the_epochs_of_a_new_family(
    *, events: list[PolicyEvent], left: Any, informed: bool
) -> None:
    lengths = knowing("mixture", *events)

    assert (lengths.remaining(a_job(epochs=5)), lengths.informed(A)) == (left, informed)


def test_no_epoch_is_certain_if_scripts_leave_early() -> None:
    lengths = JobLengths("mixture")
    for number in range(4):
        name = JobId(f"r-{number}")
        lengths.observe(epoch(5, name, stop_metric=0.5))
        lengths.remaining(a_job(name, epochs=5, stop=TARGET))
        lengths.observe(ended(500, name))

    assert (lengths.remaining(a_job(epochs=4, stop=TARGET)) or 0.0) < 500.0


PLATEAU = StopRule(metric="accuracy", plateau=5)


def reported(*values: float) -> MetricLog:
    log = MetricLog()
    for epoch, value in enumerate(values, start=1):
        log.add(epoch, value)
    return log


def rising(epochs: int, rate: float = 0.1) -> list[float]:
    """Towards 1, from 0; 0.9 is reached after 2.3 / rate epochs."""
    return [1.0 - math.exp(-rate * epoch) for epoch in range(1, epochs + 1)]


@cases(
    "values, rule, least, end",
    no_report=([], TARGET, 10, None),
    met=([0.5, 0.8, 0.91, 0.92, 0.93], TARGET, 7, 12.0),
    lost_again=([0.5, 0.8, 0.91, 0.92, 0.89], TARGET, 10, ...),
    nan=([0.5, math.nan, math.nan], TARGET, 10, None),
    nan_is_no_increase=([0.5, math.nan, math.nan], PLATEAU, 3, ...),
    two_after_the_best=([0.5, 0.8, 0.9, 0.85, 0.88], PLATEAU, 3, ...),
    # 0.9 after epoch 23.03, so that epochs 24 to 33 are above it
    a_curve_predicts_an_end=(rising(12), TARGET, 10, pytest.approx(33.0, abs=2.5)),
    a_curve_below_the_target=([0.5 * value for value in rising(30)], TARGET, 10, None),
    few_reports=(rising(3), TARGET, 10, None),
)
def test_a_rule_requires_the_epochs_for_which_a_target_is_held_or_no_increase_comes(
    values: list[float], rule: StopRule, least: int, end: Any
) -> None:
    log = reported(*values)

    assert log.least_left(rule) == least
    if end is not ...:
        assert log.end(rule) == end


def test_an_epoch_reported_twice_counts_once() -> None:
    log = reported(0.5, 0.95)
    log.add(2, 0.95)

    assert log.least_left(TARGET) == 9


def test_a_curve_that_rises_less_than_it_scatters_is_on_its_plateau() -> None:
    noise = [0.01, -0.01, 0.004, -0.006, 0.008, -0.003] * 5
    values = [value + off for value, off in zip(rising(30, 0.3), noise, strict=True)]

    end = reported(*values[:10]).end(PLATEAU)

    assert end is not None
    assert 12 <= end <= 30
