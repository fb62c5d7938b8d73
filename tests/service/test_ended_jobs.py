"""Jobs that left the state are shown, waited for, cancelled and submitted again as all others."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.core import policy_events
from controlplane.core.handlers import lifecycle
from controlplane.journal.database import open_for_reading
from controlplane.journal.ended import forget_ended
from controlplane.policy.api import JobEnded
from schemas.errors import BadFieldError, DeniedError, UnknownJobError
from schemas.ids import JobId
from schemas.transport.keys import Identity
from schemas.wire.client import (
    CancelJob,
    ExplainJob,
    GetJob,
    JobAccepted,
    ListJobs,
    ResizeJob,
    SubmitJob,
    WaitJob,
)
from tests.support import builders
from tests.support.builders import SNAPSHOT, A, job_spec
from tests.support.service import LiveService

B, GHOST = JobId("b-2"), JobId("ghost-7")


async def a_job_left(folder: Path) -> LiveService:
    """Job a has ended and left; job b waits."""
    service = LiveService(folder)
    service.loop.begin("0")
    service.train()
    service.tell(builders.epoch_end(A, 1))
    service.finish()
    service.take(builders.submission("b", key="kb"))
    await service.loop.caught_up()
    assert list(service.loop.committed.state.jobs) == [B]
    service.server._changes.snapshots.has = lambda _: True  # type: ignore[method-assign]
    return service


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    made = await a_job_left(tmp_path)
    yield made
    made.loop.close()


async def told(service: LiveService) -> dict[str, Any]:
    """All that is told of job a."""
    detail = await service.ask(GetJob(job=A))
    jobs = (await service.ask(ListJobs(ended=True))).jobs
    return {
        "list": [(job.job, job.state, job.epoch) for job in jobs],
        "detail": detail,
        "explain": await service.ask(ExplainJob(job=A)),
        "state": await service.ask(WaitJob(job=A, wait_s=30.0)),
    }


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_job_that_is_just_leaving_is_listed_once(
    service: LiveService, *, newest_first: bool
) -> None:
    state, left = service.loop.committed.state, service.loop.reader.ended.get(A)
    assert left is not None
    state.jobs = {A: left, **state.jobs}  # its end is durable, but not handled yet

    asked = ListJobs(ended=True, newest_first=newest_first, limit=3)
    jobs = [job.job for job in (await service.ask(asked)).jobs]

    assert sorted(jobs) == [A, B]


async def test_replies_about_an_ended_job_survive_a_restart(tmp_path: Path) -> None:
    service = await a_job_left(tmp_path)
    before = await told(service)
    service.loop.close()
    again = LiveService(tmp_path)
    assert await told(again) == before
    again.loop.close()

    detail = before["detail"]
    assert before["list"] == [(A, "succeeded", 1), (B, "queued", 0)]
    assert [change.to_state for change in detail.history] == ["starting", "running", "succeeded"]
    assert (len(detail.epochs), detail.exit_code, detail.notes) == (1, 0, ())
    assert [one.outcome for one in before["explain"].decisions] == ["formed"]
    assert (before["state"].state, before["state"].exit_code) == ("succeeded", 0)


async def test_lists_filter_jobs_that_left_the_state(service: LiveService) -> None:
    for request, expected in (
        (ListJobs(), [B]),
        (ListJobs(states=("succeeded",)), [A]),
        (ListJobs(ended=True, name="a"), [A]),
        (ListJobs(ended=True, user="nobody"), []),
        (ListJobs(ended=True, cursor="jobs.1"), [B]),
    ):
        assert [job.job for job in (await service.ask(request)).jobs] == expected


async def test_a_job_that_left_the_state_cannot_be_changed(service: LiveService) -> None:
    assert (await service.ask(CancelJob(job=A))).summary.state == "succeeded"
    with pytest.raises(BadFieldError, match="a-1 has succeeded"):
        await service.ask(ResizeJob(job=A, slots=1))
    with pytest.raises(DeniedError, match="belongs to ann"):
        await service.ask(ResizeJob(job=A, slots=1), Identity("user", "bob", ("ann",)))
    for request in (CancelJob(job=GHOST), GetJob(job=GHOST), WaitJob(job=GHOST)):
        with pytest.raises(UnknownJobError):
            await service.ask(request)


@pytest.mark.parametrize("kept", [0, 1], ids=["its key is in the table", "in the state, too"])
async def test_a_repeated_submission_finds_the_job_that_left(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MAX_LEFT_KEYS", kept)
    service = await a_job_left(tmp_path)
    assert len(service.loop.reactor.state.left_submission_keys) == kept
    again = SubmitJob(spec=job_spec("a"), snapshot=SNAPSHOT, key="k")

    assert await service.ask(again) == JobAccepted(job=A, state="succeeded")
    assert list(service.loop.committed.state.jobs) == [B]
    service.loop.close()


async def test_a_job_that_leaves_on_a_full_disk_is_shown_as_before(service: LiveService) -> None:
    async with service.full_disk():
        service.take(builders.cancelled(B))
        service.take(builders.greeting())
        assert B not in service.loop.reactor.state.jobs

        assert (await service.ask(GetJob(job=B))).summary.state == "queued"
    assert (await service.ask(GetJob(job=B))).summary.state == "cancelled"


async def test_a_restarted_search_observes_jobs_that_left(service: LiveService) -> None:
    left = service.loop.reader.ended.latest(10)
    learnt = policy_events.history(left, service.loop.records)

    assert [job.job for job in left] == [A]
    assert [event for _, event in learnt if isinstance(event, JobEnded)] == [
        event for event in service.heard if isinstance(event, JobEnded)
    ]
    assert len(learnt) == 2  # and its epoch


FOREVER = 1e12


async def test_the_oldest_ended_jobs_are_forgotten_with_their_records(
    service: LiveService, tmp_path: Path
) -> None:
    for number in range(3, 7):
        service.take(builders.submission("c"))
        service.take(builders.cancelled(JobId(f"c-{number}")))
    service.take(builders.greeting())
    await service.loop.caught_up()
    with contextlib.closing(open_for_reading(tmp_path / "journal.sqlite")) as database:
        (at,) = database.execute("SELECT ended FROM ended_jobs WHERE job = 'c-3'").fetchone()
        assert forget_ended(database, before=at) == (A,)
        assert forget_ended(database, before=FOREVER, user="nobody") == ()
        assert forget_ended(database, before=FOREVER, most=1) == ("c-3",)
        assert _jobs_in(database) == {"b-2", "c-4", "c-5", "c-6"}
    with pytest.raises(UnknownJobError):
        await service.ask(GetJob(job=A))


def _jobs_in(database: sqlite3.Connection) -> set[str]:
    """Jobs of which a past is kept."""
    left = {job for (job,) in database.execute("SELECT job FROM ended_jobs")}
    select = "SELECT job FROM job_records UNION SELECT job FROM recent_records"
    recorded = {job for (job,) in database.execute(select)}
    assert recorded - {"b-2"} == left
    return recorded | {"b-2"}
