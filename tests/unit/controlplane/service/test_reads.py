"""Jobs in a list."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from controlplane.core.model.job import Job
from controlplane.journal.database import open_for_writing
from controlplane.journal.ended import EndedJobs
from controlplane.journal.records import append_rows, rows_of
from controlplane.service.api.reads import job_rows
from controlplane.service.api.replies import job_summary
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import BadFieldError
from schemas.ids import Seconds
from schemas.wire.client import JobSummary, ListJobs
from tests.support import builders
from tests.support.builders import S0, A, B, C, cancelled
from tests.support.controller import Controller, cluster_of


def a_cluster(*, leaves: bool = False) -> Controller:
    """A runs, B was cancelled, C waits; perhaps B left the state."""
    controller = cluster_of(n1=1)
    controller.submit("a")
    controller.submit("b")
    controller.submit("c")
    controller.place({A: S0})
    controller.take(cancelled(B))
    if leaves:
        controller.take(builders.greeting())
    assert (B in controller.state.jobs) != leaves
    return controller


def listed(controller: Controller, request_: ListJobs, after: int = 0) -> list[str]:
    with contextlib.closing(open_for_writing(Path(":memory:"))) as database:
        append_rows(database, [(1, row) for row in rows_of(controller.left)])
        rows = job_rows(controller.state, EndedJobs(database), request_, summary)
        return [line.job for _, line in rows.after(after)]


def summary(job: Job) -> JobSummary:
    return job_summary(job, None, TelemetryTable(), Seconds(0.0))


@pytest.mark.parametrize(
    ("request_", "jobs"),
    [
        (ListJobs(), [A, C]),
        (ListJobs(ended=True), [A, B, C]),
        (ListJobs(states=("queued",)), [C]),
        (ListJobs(states=("starting", "cancelled")), [A, B]),
        (ListJobs(name="c"), [C]),
        (ListJobs(name="?-[13]"), [A, C]),
        (ListJobs(name="b"), []),
        (ListJobs(ended=True, name="B"), []),
        (ListJobs(user="nobody"), []),
    ],
)
@pytest.mark.parametrize("leaves", [False, True], ids=["all are here", "the ended one left"])
def test_a_list_contains_the_matching_jobs(
    request_: ListJobs, jobs: list[str], *, leaves: bool
) -> None:
    assert listed(a_cluster(leaves=leaves), request_) == jobs


def test_a_list_filters_by_user() -> None:
    controller = a_cluster()

    assert listed(controller, ListJobs(user=controller.job(A).user)) == [A, C]


def test_a_list_continues_after_a_job_that_may_have_left() -> None:
    for leaves in (False, True):
        controller = a_cluster(leaves=leaves)
        assert [listed(controller, ListJobs(ended=True), after) for after in (1, 2, 3)] == [
            [B, C], [C], []
        ]  # fmt: skip


def test_an_oversized_pattern_is_refused() -> None:
    with pytest.raises(BadFieldError, match="pattern of 2000000 characters exceeds 200"):
        listed(a_cluster(), ListJobs(name="*a" * 1_000_000))


def test_an_unknown_state_is_named() -> None:
    with pytest.raises(BadFieldError, match="unknown state 'done'; use one of queued, starting"):
        listed(a_cluster(), ListJobs(states=("done",)))
