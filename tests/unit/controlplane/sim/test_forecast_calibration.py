"""How right policies were about when waiting jobs start."""

from __future__ import annotations

from controlplane.sim.analysis.summary import forecast_figures
from controlplane.sim.results import JobResult, StartForecast
from schemas.ids import Seconds
from tests.support.simulations import job_result, result

NOTHING = {"start_forecasts": 0, "start_error_median": None, "start_coverage": None}


def told(name: str, at: float, interval: tuple[float, float], started: float | None) -> JobResult:
    """A job that was told at second 100 when it would start."""
    said = StartForecast(Seconds(100.0), Seconds(at), *map(Seconds, interval))
    return job_result(
        name, 500.0, forecast=said, started_at=None if started is None else Seconds(started)
    )


def test_errors_are_shares_of_the_real_wait_and_intervals_are_counted() -> None:
    found = result(
        told("a", 150.0, (120.0, 200.0), started=200.0),  # 50 of 100 s, just within
        told("b", 140.0, (110.0, 150.0), started=120.0),  # 40 of 20 s, within
        told("c", 110.0, (105.0, 120.0), started=140.0),  # 10 of 40 s, not within
        told("d", 170.0, (165.0, 180.0), started=160.0),  # 70 of 60 s, not within
    )

    assert forecast_figures(found) == {
        "start_forecasts": 4, "start_error_median": (0.5 + 0.75) / 2, "start_coverage": 0.5,
    }  # fmt: skip


def test_jobs_that_started_as_they_were_told_or_never_say_nothing() -> None:
    uncounted = told("d", 150.0, (120.0, 200.0), started=200.0)
    assert forecast_figures(result()) == NOTHING
    assert (
        forecast_figures(
            result(
                told("a", 150.0, (120.0, 200.0), started=100.0),
                told("b", 150.0, (120.0, 200.0), started=None),
                job_result("c", 50.0),
                job_result("w", 50.0, forecast=uncounted.forecast, counted=False),
            )
        )
        == NOTHING
    )
