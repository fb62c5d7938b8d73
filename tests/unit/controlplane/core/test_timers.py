"""Times at which something is due for a job."""

from __future__ import annotations

import math

from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.core.timers import JobTimers
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B
from tests.support.controller import Controller, cluster_of

NEVER = Seconds(math.inf)


def timers(**times: float) -> tuple[JobTimers, dict[JobId, Seconds], list[JobId]]:
    """Timers of two jobs; their times, which may be changed; and the jobs that were visited."""
    controller: Controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b")
    known, visited = {A: Seconds(times["a"]), B: Seconds(times["b"])}, list[JobId]()

    def next_time(_state: State, job: Job, _now: Seconds) -> Seconds:
        visited.append(job.job)
        return known[job.job]

    return JobTimers(controller.state, next_time), known, visited


def test_jobs_are_due_in_order_of_arrival_until_their_times_change() -> None:
    due, known, _ = timers(a=20.0, b=10.0)

    assert due.passed(Seconds(5.0)) == []
    assert due.passed(Seconds(10.0)) == [B]
    assert due.passed(Seconds(20.0)) == [A, B]
    assert due.passed(Seconds(20.0)) == [A, B]
    known[B] = NEVER
    assert due.passed(Seconds(20.0)) == [A]


def test_a_job_whose_time_has_not_come_is_not_visited() -> None:
    due, known, visited = timers(a=20.0, b=NEVER)
    due.passed(Seconds(0.0))
    visited.clear()

    assert due.passed(Seconds(19.0)) == []
    assert visited == []
    known[B] = Seconds(19.5)
    due.touch({B: None})
    assert due.passed(Seconds(19.5)) == [B]
    assert set(visited) == {B}


def test_a_job_that_changes_often_leaves_no_trace() -> None:
    due, known, _ = timers(a=1e6, b=NEVER)
    for number in range(1000):
        known[A] = Seconds(1e6 + number)
        due.touch({A: None})
        due.passed(Seconds(0.0))

    assert due.size < 100
