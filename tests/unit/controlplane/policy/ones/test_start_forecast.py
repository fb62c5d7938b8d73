"""When waiting jobs are expected to start."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.policy.api import ClusterView, JobView, StartForecast
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, A, B, C, job_view
from tests.support.views import LINEAR, row_of, view_of

NOW = Seconds(1000.0)
D = JobId("d-4")


def a_job(name: JobId, seconds: float, *on: SlotId, **changes: Any) -> JobView:
    """Warm, of one slot, with so many seconds to go."""
    view = job_view(
        name, at=0.0, family="f", epoch=1, start_s=0.0, running_on=dict.fromkeys(on, 64),
        stop_samples=round(100 * seconds),
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def a_policy(**options: Any) -> Ones:
    policy = Ones(OnesOptions(**options))
    for at, event in LINEAR:
        policy.observe(event, Seconds(at))
    return policy


def waits(policy: Ones, view: ClusterView, now: float = NOW) -> dict[JobId, float]:
    """Seconds that each waiting job is expected to wait."""
    return {name: said.at - now for name, said in policy.plan(view, Seconds(now)).starts.items()}


def test_freed_slots_go_to_the_shortest_job_first() -> None:
    view = view_of(row_of(2), a_job(A, 100, S0), a_job(B, 300, S1), a_job(C, 5000), a_job(D, 4000))

    assert waits(a_policy(), view) == {D: pytest.approx(100.0), C: pytest.approx(300.0)}


def test_the_next_job_holds_its_slot_until_it_ends() -> None:
    view = view_of(row_of(1), a_job(A, 100, S0), a_job(C, 900), a_job(D, 400))

    assert waits(a_policy(), view) == {D: pytest.approx(100.0), C: pytest.approx(500.0)}


def test_a_job_that_does_not_fit_is_skipped() -> None:
    pair = a_job(C, 900, least=2, most=2, wanted=2, priority=20.0)
    view = view_of(row_of(2), a_job(A, 1000, S0), a_job(B, 3000, S1), pair, a_job(D, 40_000))
    policy = a_policy(pause_margin=100.0)

    assert waits(policy, view) == {  # D starts beside B, and ends long after it
        D: pytest.approx(1000.0),
        C: pytest.approx(41_000.0),
    }

    later = view_of(row_of(2), a_job(A, 1000, S0), a_job(B, 3000, S1), pair, version=2)
    assert waits(policy, later, NOW + 10.0) == {C: pytest.approx(3000.0)}


def test_the_interval_is_wide_without_outcomes() -> None:
    view = view_of(row_of(1), a_job(A, 95, S0), a_job(C, 900))

    said = a_policy().plan(view, NOW).starts[C]

    assert said == StartForecast(
        at=Seconds(pytest.approx(NOW + 95.0)),
        earliest=Seconds(pytest.approx(NOW + 100.0 / 4.0**0.8 - 5.0)),
        latest=Seconds(pytest.approx(NOW + 100.0 * 4.0**0.8 - 5.0)),
    )


def test_outcomes_correct_the_next_forecasts() -> None:
    """Every job waits exactly three times as long as the schedule says."""
    policy, now, version = a_policy(), float(NOW), 1
    for number in range(60):
        waiting = JobId(f"w-{number + 10}")
        view = view_of(row_of(1), a_job(A, 95, S0), a_job(waiting, 900), version=version)
        policy.plan(view, Seconds(now))
        now, version = now + 295.0, version + 1
        started = view_of(row_of(1), a_job(waiting, 900, S0), version=version)
        policy.plan(started, Seconds(now))
        now, version = now + 10.0, version + 1
    view = view_of(row_of(1), a_job(A, 95, S0), a_job(C, 900), version=version)

    said = policy.plan(view, Seconds(now)).starts[C]

    ends = [said.earliest - now, said.at - now, said.latest - now]
    assert ends == pytest.approx([295.0, 295.0, 295.0], abs=1.0)


def test_jobs_that_run_start_or_never_fit_have_no_forecast() -> None:
    view = view_of(row_of(2), a_job(A, 100, S0), a_job(B, 50), a_job(C, 90, least=3, most=4))

    assert waits(a_policy(), view) == {}


def test_forecasts_can_be_switched_off() -> None:
    view = view_of(row_of(1), a_job(A, 100, S0), a_job(C, 900))

    assert a_policy(forecast_starts=False).plan(view, NOW).starts == {}


def test_forecasts_of_one_view_are_equal() -> None:
    policy, view = a_policy(), view_of(row_of(1), a_job(A, 100, S0), a_job(C, 900))

    assert policy.plan(view, NOW).starts == policy.plan(view, NOW).starts
