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


@pytest.mark.parametrize("model", MODELS)
def test_a_stated_end_is_exact(model: LengthModelName) -> None:
    lengths = knowing(model, ended(5000))

    assert lengths.remaining(a_job(epochs=2, stop_samples=1000)) == 800.0


@pytest.mark.parametrize("model", MODELS)
def test_the_length_of_a_first_job_is_unknown(model: LengthModelName) -> None:
    assert knowing(model).remaining(a_job()) is None


@pytest.mark.parametrize("model", MODELS)
def test_without_finished_relatives_the_work_doubles(model: LengthModelName) -> None:
    lengths = knowing(model, epoch(3))

    assert lengths.remaining(a_job(epochs=3)) == 300.0


@pytest.mark.parametrize("model", MODELS)
def test_relatives_of_ten_epochs_predict_five_more_after_five(model: LengthModelName) -> None:
    past = [event for number in range(8) for event in lived(number, 10)]

    left = knowing(model, *past, *(epoch(at) for at in range(1, 6))).remaining(a_job(epochs=5))

    assert left == pytest.approx(500.0, rel=0.15)


def test_the_mixture_expects_a_job_that_outlived_its_relatives_to_end() -> None:
    past = [event for number in range(8) for event in lived(number, 10)]
    job = a_job(epochs=11)

    assert knowing("residual", *past).remaining(job) == 1100.0
    assert (knowing("mixture", *past).remaining(job) or 0.0) < 150.0


def test_telemetry_updates_the_progress_between_epochs() -> None:
    steps = StepsSeen(
        job=A, family="u/f", group=1, slots=1, nodes=1, global_batch=10, step=25, samples_done=250,
    )  # fmt: skip

    assert knowing("residual", ended(1000), steps).remaining(a_job(epochs=2)) == 750.0


def test_a_met_target_leaves_the_epochs_that_hold_it() -> None:
    values = [0.5, 0.8, 0.91, 0.92]
    events = [epoch(at, stop_metric=value) for at, value in enumerate(values, start=1)]

    lengths = knowing("mixture", ended(2000), *events)

    left = lengths.remaining(a_job(epochs=4, stop=TARGET))
    assert left == pytest.approx(800.0, rel=0.1), "8 of 10 epochs, whatever the relative took"


def test_an_unmet_target_leaves_at_least_all_epochs_that_hold_it() -> None:
    lengths = knowing("mixture", ended(500), epoch(4, stop_metric=0.5))

    assert lengths.remaining(a_job(epochs=4, stop=TARGET)) == 1000.0


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


def test_a_bound_limits_the_remaining_work() -> None:
    bounded = StopRule(metric="accuracy", plateau=5, epochs=10)
    lengths = knowing("mixture", ended(100 * EPOCH), epoch(8, stop_metric=0.1))

    assert (lengths.remaining(a_job(epochs=8, stop=bounded)) or 0.0) <= 200.0


def test_a_rule_is_only_evidence_if_relatives_left_early() -> None:
    """Scripts that leave their loop early: what they state is a bound."""
    lengths = JobLengths("mixture")
    for number in range(4):
        name = JobId(f"r-{number}")
        assert lengths.remaining(a_job(name, stop_samples=1000)) == 1000.0 or number
        lengths.observe(ended(400, name))

    assert lengths.remaining(a_job(stop_samples=1000)) == pytest.approx(400.0, rel=0.2)


def test_jobs_given_up_do_not_shorten_a_family() -> None:
    past = [ended(1000, JobId(f"r-{n}")) for n in range(3)]
    lost = [ended(100, JobId(f"c-{n}"), succeeded=False) for n in range(9)]

    assert knowing("mixture", *past, *lost).remaining(a_job()) == pytest.approx(1000.0, rel=0.15)


@pytest.mark.parametrize("model", MODELS)
def test_predictions_are_compared_with_actual_lengths(model: LengthModelName) -> None:
    past = [event for number in range(8) for event in lived(number, 10)]
    lengths = knowing(model, *past)
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


def test_other_families_predict_the_epochs_of_a_new_family() -> None:
    lengths = knowing("mixture", *strangers(20, 20, 20))

    assert lengths.remaining(a_job(epochs=5)) == pytest.approx(1500.0, rel=0.25)
    assert lengths.informed(A)


def test_two_jobs_of_other_families_predict_nothing() -> None:
    lengths = knowing("mixture", *strangers(20, 20))

    assert lengths.remaining(a_job(epochs=5)) == 500.0
    assert not lengths.informed(A)


def test_relatives_count_more_than_other_families() -> None:
    lengths = knowing("mixture", *strangers(20, 20, 20), ended(1000))

    assert lengths.remaining(a_job(epochs=5)) == pytest.approx(500.0, rel=0.3)


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


@pytest.mark.parametrize(
    ("values", "rule", "least", "end"),
    [
        ([], TARGET, 10, None),
        ([0.5, 0.8, 0.91, 0.92, 0.93], TARGET, 7, 12.0),
        ([0.5, 0.8, 0.91, 0.92, 0.89], TARGET, 10, ...),
        ([0.5, math.nan, math.nan], TARGET, 10, None),
        ([0.5, math.nan, math.nan], PLATEAU, 3, ...),
        ([0.5, 0.8, 0.9, 0.85, 0.88], PLATEAU, 3, ...),
    ],
    ids=["no report", "met", "lost again", "nan", "nan is no increase", "two after the best"],
)
def test_a_rule_requires_the_epochs_for_which_a_target_is_held_or_no_increase_comes(
    values: list[float], rule: StopRule, least: int, end: float | None
) -> None:
    log = reported(*values)

    assert log.least_left(rule) == least
    if end is not ...:
        assert log.end(rule) == end


def test_a_curve_predicts_when_a_target_is_met() -> None:
    """0.9 after epoch 23.03, so that epochs 24 to 33 are above it."""
    assert reported(*rising(12)).end(TARGET) == pytest.approx(33.0, abs=2.5)


@pytest.mark.parametrize("values", [[0.5 * value for value in rising(30)], rising(3)])
def test_a_curve_below_the_target_or_of_few_reports_predicts_no_end(values: list[float]) -> None:
    assert reported(*values).end(TARGET) is None


def test_a_curve_that_rises_less_than_it_scatters_is_on_its_plateau() -> None:
    noise = [0.01, -0.01, 0.004, -0.006, 0.008, -0.003] * 5
    values = [value + off for value, off in zip(rising(30, 0.3), noise, strict=True)]

    end = reported(*values[:10]).end(PLATEAU)

    assert end is not None
    assert 12 <= end <= 30


def test_an_epoch_reported_twice_counts_once() -> None:
    log = reported(0.5, 0.95)
    log.add(2, 0.95)

    assert log.least_left(TARGET) == 9
