"""How much jobs have left, by each model.

When a stop rule on a metric will be met.
"""

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

EPOCH = 100  # samples
MODELS = get_args(LengthModelName)
TARGET = StopRule(metric="accuracy", at_least=0.9, consecutive=10)


def a_job(name: JobId = A, **changes: Any) -> JobView:
    done = int(changes.pop("epochs", 0))
    known = {"epoch": done, "samples_done": EPOCH * done, "epoch_samples": EPOCH, "family": "u/f"}
    return job_view(name, **{**known, **changes})


def epoch(number: int, job: JobId = A, **changes: Any) -> EpochSeen:
    return EpochSeen(
        job=job, family="u/f", slots=1, nodes=1, global_batch=10, samples_per_s=1.0, whole=True,
        epoch=number, samples_done=EPOCH * number, **changes,
    )  # fmt: skip


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
def test_a_stated_rule_is_exact_whatever_relatives_did(model: LengthModelName) -> None:
    lengths = knowing(model, ended(5000))

    assert lengths.remaining(a_job(epochs=2, stop_samples=1000)) == 800.0


@pytest.mark.parametrize("model", MODELS)
def test_of_a_job_that_has_done_nothing_in_a_family_without_a_past_nothing_is_known(
    model: LengthModelName,
) -> None:
    assert knowing(model).remaining(a_job()) is None


@pytest.mark.parametrize("model", MODELS)
def test_before_a_relative_has_finished_as_much_again_is_expected(model: LengthModelName) -> None:
    lengths = knowing(model, epoch(3))

    assert lengths.remaining(a_job(epochs=3)) == 300.0


@pytest.mark.parametrize("model", MODELS)
def test_relatives_that_all_took_ten_epochs_tell_that_a_half_is_left(
    model: LengthModelName,
) -> None:
    past = [event for number in range(8) for event in lived(number, 10)]

    left = knowing(model, *past, *(epoch(at) for at in range(1, 6))).remaining(a_job(epochs=5))

    assert left == pytest.approx(500.0, rel=0.15)


def test_who_has_outlived_all_relatives_is_nearly_done_by_the_mixture() -> None:
    past = [event for number in range(8) for event in lived(number, 10)]
    job = a_job(epochs=11)

    assert knowing("residual", *past).remaining(job) == 1100.0
    assert (knowing("mixture", *past).remaining(job) or 0.0) < 150.0


def test_progress_counts_as_telemetry_tells_it_between_epochs() -> None:
    steps = StepsSeen(
        job=A, family="u/f", group=1, slots=1, nodes=1, global_batch=10, step=25, samples_done=250,
    )  # fmt: skip

    assert knowing("residual", ended(1000), steps).remaining(a_job(epochs=2)) == 750.0


def test_a_target_that_is_met_leaves_the_epochs_for_which_it_has_to_be_held() -> None:
    values = [0.5, 0.8, 0.91, 0.92]
    events = [epoch(at, stop_metric=value) for at, value in enumerate(values, start=1)]

    lengths = knowing("mixture", ended(2000), *events)

    left = lengths.remaining(a_job(epochs=4, stop=TARGET))
    assert left == pytest.approx(800.0, rel=0.1), "8 of 10 epochs, whatever the relative took"


def test_a_target_that_is_not_met_leaves_at_least_all_of_them() -> None:
    lengths = knowing("mixture", ended(500), epoch(4, stop_metric=0.5))

    assert lengths.remaining(a_job(epochs=4, stop=TARGET)) == 1000.0


def test_a_bound_beside_a_metric_is_believed_as_far_as_it_came_true_in_the_family() -> None:
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


def test_no_more_is_left_than_a_bound_allows() -> None:
    bounded = StopRule(metric="accuracy", plateau=5, epochs=10)
    lengths = knowing("mixture", ended(100 * EPOCH), epoch(8, stop_metric=0.1))

    assert (lengths.remaining(a_job(epochs=8, stop=bounded)) or 0.0) <= 200.0


def test_a_rule_before_which_a_relative_left_is_believed_no_more_than_the_relatives() -> None:
    """Scripts that leave their loop early: what they state is a bound."""
    lengths = JobLengths("mixture")
    for number in range(4):
        name = JobId(f"r-{number}")
        assert lengths.remaining(a_job(name, stop_samples=1000)) == 1000.0 or number
        lengths.observe(ended(400, name))

    assert lengths.remaining(a_job(stop_samples=1000)) == pytest.approx(400.0, rel=0.2)


def test_users_who_give_up_do_not_make_a_family_seem_short() -> None:
    past = [ended(1000, JobId(f"r-{n}")) for n in range(3)]
    lost = [ended(100, JobId(f"c-{n}"), succeeded=False) for n in range(9)]

    assert knowing("mixture", *past, *lost).remaining(a_job()) == pytest.approx(1000.0, rel=0.15)


@pytest.mark.parametrize("model", MODELS)
def test_predictions_are_held_against_what_came(model: LengthModelName) -> None:
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


def test_a_job_that_was_given_up_proves_no_prediction_wrong() -> None:
    lengths = knowing("residual", ended(1000))
    lengths.remaining(a_job())

    lengths.observe(ended(100, A, succeeded=False))

    assert accuracy(lengths) == SearchStats()


@pytest.mark.parametrize("model", MODELS)
def test_jobs_that_nobody_will_hear_of_again_are_forgotten_some_day(model: LengthModelName) -> None:
    lengths = knowing(model, *(epoch(5, JobId(f"r-{n}")) for n in range(200)), epoch(3))

    lengths.forget({A})

    assert lengths.family("u/f").at_work == {A: 300}


# --- families without a past


def strangers(*epochs: int) -> list[PolicyEvent]:
    """Jobs of other families that took so many epochs."""
    found: list[PolicyEvent] = []
    for number, many in enumerate(epochs):
        name = JobId(f"s-{number}")
        seen = msgspec.structs.replace(epoch(many, name), family=f"v/{number}")
        found += [seen, ended(many * 7000, name, family=f"v/{number}")]
    return found


def test_a_job_of_a_new_family_may_take_as_many_epochs_as_strangers_did() -> None:
    lengths = knowing("mixture", *strangers(20, 20, 20))

    assert lengths.remaining(a_job(epochs=5)) == pytest.approx(1500.0, rel=0.25)
    assert lengths.informed(A)


def test_two_strangers_tell_nothing_yet() -> None:
    lengths = knowing("mixture", *strangers(20, 20))

    assert lengths.remaining(a_job(epochs=5)) == 500.0
    assert not lengths.informed(A)


def test_relatives_count_for_more_than_strangers() -> None:
    lengths = knowing("mixture", *strangers(20, 20, 20), ended(1000))

    assert lengths.remaining(a_job(epochs=5)) == pytest.approx(500.0, rel=0.3)


def test_where_scripts_leave_before_their_target_is_met_nothing_is_certain() -> None:
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


def test_before_any_report_a_target_has_to_be_held_to_its_end() -> None:
    assert reported().least_left(TARGET) == 10
    assert reported().end(TARGET) is None


def test_a_target_that_is_met_has_to_be_held_for_the_rest() -> None:
    log = reported(0.5, 0.8, 0.91, 0.92, 0.93)

    assert log.least_left(TARGET) == 7
    assert log.end(TARGET) == 12.0


def test_a_target_that_was_lost_again_begins_anew() -> None:
    assert reported(0.5, 0.8, 0.91, 0.92, 0.89).least_left(TARGET) == 10


def test_a_curve_tells_when_a_target_will_be_met() -> None:
    """0.9 after epoch 23.03, so that epochs 24 to 33 are above it."""
    assert reported(*rising(12)).end(TARGET) == pytest.approx(33.0, abs=2.5)


def test_a_curve_that_never_comes_so_far_tells_nothing() -> None:
    assert reported(*(0.5 * value for value in rising(30))).end(TARGET) is None


def test_too_few_reports_tell_nothing() -> None:
    assert reported(*rising(3)).end(TARGET) is None


def test_a_plateau_ends_so_many_epochs_after_the_best_one() -> None:
    log = reported(0.5, 0.8, 0.9, 0.85, 0.88)

    assert log.least_left(PLATEAU) == 3


def test_a_curve_that_rises_no_more_than_it_scatters_has_come_to_its_plateau() -> None:
    noise = [0.01, -0.01, 0.004, -0.006, 0.008, -0.003] * 5
    values = [value + off for value, off in zip(rising(30, 0.3), noise, strict=True)]

    end = reported(*values[:10]).end(PLATEAU)

    assert end is not None
    assert 12 <= end <= 30


def test_an_epoch_that_is_reported_twice_counts_once() -> None:
    log = reported(0.5, 0.95)
    log.add(2, 0.95)

    assert log.least_left(TARGET) == 9


def test_what_is_no_number_is_no_increase_and_meets_nothing() -> None:
    log = reported(0.5, math.nan, math.nan)

    assert (log.least_left(PLATEAU), log.least_left(TARGET), log.end(TARGET)) == (3, 10, None)
