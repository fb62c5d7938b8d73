"""When a job is done, and how fast it goes."""

from __future__ import annotations

import math

import pytest

from elastic.metrics import SpeedMeter, StopState, stop_reason
from elastic.training_errors import MissingMetricError
from schemas.jobs import StopRule


def first_end(rule: StopRule, values: list[float]) -> int | None:
    """The first epoch (1-based) after which the rule ends a job that reports `values`."""
    state = StopState()
    for epoch, value in enumerate(values, start=1):
        if stop_reason(rule, state, epoch, epoch * 100, {"accuracy": value}):
            return epoch
    return None


@pytest.mark.parametrize(
    ("rule", "values", "end"),
    [
        (StopRule(epochs=3), [0.0] * 9, 3),
        (StopRule(samples=250), [0.0] * 9, 3),
        (StopRule(metric="accuracy", at_least=0.9), [0.5, 0.9, 1.0], 2),
        (
            StopRule(metric="accuracy", at_least=0.9, consecutive=3),
            [0.9, 0.9, 0.1, 0.9, 0.95, 0.9],
            6,
        ),
        (StopRule(metric="accuracy", at_least=2.0, epochs=4), [0.9] * 9, 4),
        (StopRule(metric="accuracy", plateau=2), [0.1, 0.3, 0.2, 0.4, 0.4, 0.4], 6),
        (StopRule(metric="accuracy", plateau=2), [math.nan, math.nan], 2),
        (StopRule(metric="accuracy", at_least=0.9), [0.1] * 9, None),
    ],
)
def test_a_rule_ends_a_job_at_its_epoch(
    rule: StopRule, values: list[float], end: int | None
) -> None:
    assert first_end(rule, values) == end


def test_a_metric_that_is_not_reported_is_named_with_what_was() -> None:
    with pytest.raises(MissingMetricError, match=r"'accuracy', the script reported loss, mse"):
        stop_reason(
            StopRule(metric="accuracy", plateau=1), StopState(), 1, 1, {"loss": 1, "mse": 2}
        )


def test_speed_is_measured_over_the_epoch() -> None:
    speed = SpeedMeter(now=0.0)
    for samples in (100, 300, 10):
        speed.add(samples)

    assert speed.over_epoch(2.5) == (164.0, 2.5)
