"""When waiting jobs are expected to start."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controlplane.policy.api import JobView, StartForecast
from controlplane.policy.ones.policy import Ones
from controlplane.policy.options import OnesOptions
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, A, B, C, job_view
from tests.support.views import LINEAR, row_of, view_of
from tests.unit.controlplane.policy.tables import cases

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


PAIR = a_job(C, 900, least=2, most=2, wanted=2, priority=20.0)
LONG = [a_job(A, 1000, S0), a_job(B, 3000, S1), PAIR]
PATIENT: dict[str, Any] = {"pause_margin": 100.0}


@cases(
    "slots, jobs, options, expected",
    freed_slots_go_to_the_shortest_job_first=(
        2, [a_job(A, 100, S0), a_job(B, 300, S1), a_job(C, 5000), a_job(D, 4000)], {},
        {D: 100.0, C: 300.0}),
    the_next_job_holds_its_slot_until_it_ends=(
        1, [a_job(A, 100, S0), a_job(C, 900), a_job(D, 400)], {}, {D: 100.0, C: 500.0}),
    # D starts beside B, and ends long after it.
    a_job_that_does_not_fit_is_skipped=(
        2, [*LONG, a_job(D, 40_000)], PATIENT, {D: 1000.0, C: 41_000.0}),
    without_others_it_starts_when_both_slots_are_free=(2, LONG, PATIENT, {C: 3000.0}),
    jobs_that_run_start_or_never_fit_have_none=(
        2, [a_job(A, 100, S0), a_job(B, 50), a_job(C, 90, least=3, most=4)], {}, {}),
)  # fmt: skip
def test_waiting_jobs_are_expected_to_start_when_slots_are_freed(
    slots: int, jobs: list[JobView], options: dict[str, Any], expected: dict[JobId, float]
) -> None:
    policy, view = a_policy(**options), view_of(row_of(slots), *jobs)

    first, again = (policy.plan(view, NOW).starts for _ in range(2))

    assert {name: said.at - NOW for name, said in first.items()} == pytest.approx(expected)
    assert again == first


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
