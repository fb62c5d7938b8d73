"""Jobs in a list."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from controlplane.core.model.job import Job
from controlplane.journal.database import open_for_writing
from controlplane.journal.ended import EndedJobs
from controlplane.journal.records import append_rows, rows_of
from controlplane.policy.api import Plan, Reason
from controlplane.service.api.reads import NEWEST, ReadRequests, job_rows
from controlplane.service.api.replies import job_summary
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.errors import BadFieldError
from schemas.ids import JobId, Seconds
from schemas.transport.keys import Identity
from schemas.wire.client import JobSummary, ListJobs, PlannedJob, SearchInfo
from tests.support import builders
from tests.support.builders import S0, S1, A, B, C, cancelled
from tests.support.controller import Controller, cluster_of


def a_cluster(*, leaves: bool = False) -> Controller:
    """A runs, B was cancelled, C waits; perhaps B left the state."""
    controller = cluster_of(n1=1)
    controller.submit("a", labels={"team": "vision", "run": "1"})
    controller.submit("b", labels={"team": "vision"})
    controller.now += 50.0
    controller.submit("c", labels={"team": "nlp"})
    controller.place({A: S0})
    controller.take(cancelled(B))
    if leaves:
        controller.take(builders.greeting())
    assert (B in controller.state.jobs) != leaves
    return controller


LATER: Final = Seconds(1100.0)


def listed(controller: Controller, request_: ListJobs, after: int = 0) -> list[str]:
    with contextlib.closing(open_for_writing(Path(":memory:"))) as database:
        append_rows(database, [(1, row) for row in rows_of(controller.left)])
        rows = job_rows(controller.state, EndedJobs(database), request_, summary, now=LATER)
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
        (ListJobs(labels={"team": "vision"}), [A]),
        (ListJobs(labels={"team": "vision"}, ended=True), [A, B]),
        (ListJobs(labels={"team": "vision", "run": "2"}, ended=True), []),
        (ListJobs(older_s=100.0), [A]),
        (ListJobs(older_s=100.0, ended=True), [A, B]),
        (ListJobs(older_s=50.0, states=("queued",)), [C]),
        (ListJobs(ended=True, newest_first=True), [C, B, A]),
        (ListJobs(ended=True, newest_first=True, limit=2), [C, B]),
        (ListJobs(states=("cancelled", "failed"), newest_first=True), [B]),
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


def test_a_reversed_list_continues_although_jobs_were_accepted_meanwhile() -> None:
    for leaves in (False, True):
        controller = a_cluster(leaves=leaves)
        request_ = ListJobs(ended=True, newest_first=True)
        before = listed(controller, request_, NEWEST - 3)
        controller.submit("d")
        assert listed(controller, request_, NEWEST - 3) == before == [B, A]


def test_an_oversized_pattern_is_refused() -> None:
    with pytest.raises(BadFieldError, match="pattern of 2000000 characters exceeds 200"):
        listed(a_cluster(), ListJobs(name="*a" * 1_000_000))


def test_an_unknown_state_is_named() -> None:
    with pytest.raises(BadFieldError, match="unknown state 'done'; use one of queued, starting"):
        listed(a_cluster(), ListJobs(states=("done",)))


WAITS: Final = Reason("capacity", "waits for 1 slot, 0 free")
GROWS: Final = Reason("grow", "grows", {"speed_now": 100.0, "speed_then": 150.0})


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        (Identity("viewer", "x"), [A, C]),
        (Identity("user", "ann"), [A]),
        (Identity("user", "eve"), []),
    ],
    ids=str,
)
def test_the_latest_plan_names_the_jobs_that_its_reader_may_see(
    who: Identity, seen: list[str]
) -> None:
    controller = cluster_of(n1=1)
    for name, user in (("a", "ann"), ("b", "ann"), ("c", "bob")):
        controller.submit(name, user=user)
    controller.take(cancelled(B))
    plan = Plan(
        based_on=7, local_batch={A: {S0: 64, S1: 32}}, reasons={A: GROWS, B: WAITS, C: WAITS}
    )
    none: Any = None
    reads = ReadRequests(
        commit_loop=cast("Any", SimpleNamespace(committed=controller.reactor)), feed=none,
        plans=cast("Any", SimpleNamespace(latest=plan, latest_at=50.0)), telemetry=none,
        notes=none, owners=cast("Any", SimpleNamespace(of=None)),
    )  # fmt: skip

    found = reads.search(SearchInfo(policy="ones", running=True), who)

    every = {
        A: PlannedJob(job=A, slots=2, batch=96, reason="grows", expected_gain=1.5),
        C: PlannedJob(job=C, slots=0, batch=0, reason=WAITS.text),
    }
    assert found.planned == tuple(every[JobId(name)] for name in seen)
    assert found.planned_at == 50.0
