"""When a stop rule on a metric will be met."""

from __future__ import annotations

import math

import pytest

from controlplane.policy.ones.length_evidence import MetricLog
from schemas.jobs import StopRule

TARGET = StopRule(metric="accuracy", at_least=0.9, consecutive=10)
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
