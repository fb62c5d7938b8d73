"""Nothing is told that a crash could take back; what is durable is told on a full disk, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.journal import writer as writer_module
from controlplane.policy.api import EpochSeen
from schemas.errors import BadFieldError, UnavailableError
from schemas.transport.keys import Identity
from schemas.wire.client import (
    CancelJob,
    CheckJob,
    ExplainJob,
    GetJob,
    JobAccepted,
    ListJobs,
    ListNodes,
    ResizeJob,
    SubmitJob,
)
from schemas.wire.feed import ReadLog
from tests.support import builders
from tests.support.builders import SNAPSHOT, A, job_spec
from tests.support.service import LiveService


@pytest.fixture(autouse=True)
def retried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", 0.001)


async def test_a_wait_returns_when_the_end_is_durable(service: LiveService) -> None:
    async with service.full_disk():
        service.finish()
        assert service.loop.reactor.state.job(A).phase.value == "succeeded"
        waits = asyncio.create_task(service.ask(GetJob(job=A, wait_s=30.0)))
        seen = await service.ask(GetJob(job=A))

        assert (seen.summary.state, waits.done()) == ("running", False)
    detail = await waits
    assert detail.summary.state == "succeeded"


async def test_lists_and_details_show_the_durable_state_on_a_full_disk(
    service: LiveService,
) -> None:
    before = await service.ask(ListNodes())
    async with service.full_disk():
        service.tell(builders.epoch_end(A, 1))
        service.finish()
        jobs = (await service.ask(ListJobs(ended=True))).jobs
        detail = await service.ask(GetJob(job=A))
        explained = await service.ask(ExplainJob(job=A))

        assert [(job.job, job.state, job.epoch) for job in jobs] == [(A, "running", 0)]
        assert (detail.epochs, detail.history[-1].to_state) == ((), "running")
        assert (explained.state, explained.decisions[-1].outcome) == ("running", "formed")
        assert await service.ask(ListNodes()) == before


async def test_a_refusal_is_sent_when_its_reason_is_durable(service: LiveService) -> None:
    async with service.full_disk():
        service.finish()
        with pytest.raises(UnavailableError, match="cannot write its journal"):
            await service.ask(ResizeJob(job=A, slots=1))
        with pytest.raises(UnavailableError, match="cannot write its journal"):
            await service.ask(CancelJob(job=A))

    with pytest.raises(BadFieldError, match="a-1 has succeeded"):
        await service.ask(ResizeJob(job=A, slots=1))
    assert (await service.ask(CancelJob(job=A))).summary.state == "succeeded"


async def test_a_job_larger_than_the_cluster_gets_a_note(service: LiveService) -> None:
    note = (
        "it needs 8 slots, the cluster has 1: it waits until nodes join; "
        "`slots` in the job file may ask for fewer"
    )

    service.server._changes.snapshots.has = lambda _: True  # type: ignore[method-assign]
    spec = job_spec("b", slots=8)

    service.take(builders.submission("b", key="k2", slots=8))
    checked = await service.ask(CheckJob(spec=spec))
    accepted = await service.ask(SubmitJob(spec=spec, snapshot=SNAPSHOT, key="k2"))

    assert (checked.notes, accepted.notes) == ((note,), (note,))


async def test_a_start_is_predicted_without_names_of_jobs_that_the_user_may_not_see(
    service: LiveService,
) -> None:
    """The only slot is a-1's, of ann, until its turn is over."""
    spec = job_spec("c", kind="command", command=("true",), slots=1, batch_size=1, script="")
    bob = Identity("user", "bob")

    mine = (await service.ask(CheckJob(spec=spec, when=True))).start
    his = (await service.ask(CheckJob(spec=spec, when=True), bob)).start
    unasked = (await service.ask(CheckJob(spec=spec))).start
    wrong = (await service.ask(CheckJob(spec=spec, when=True, project="nlp"), bob)).start

    assert (mine.starts, mine.after) == ("later", A)
    assert (his.starts, his.after) == ("later", "a job of others")
    assert unasked is None
    assert (wrong.starts, wrong.reason) == ("unknown", "project 'nlp' is not one of bob")


async def test_a_repeated_submission_is_answered_on_a_full_disk_if_the_first_one_is_durable(
    service: LiveService,
) -> None:
    def again(key: str) -> SubmitJob:
        return SubmitJob(spec=job_spec("a"), snapshot=SNAPSHOT, key=key)

    service.server._changes.snapshots.has = lambda _: True  # type: ignore[method-assign]
    async with service.full_disk():
        service.take(builders.submission("b", key="later"))

        assert await service.ask(again("k")) == JobAccepted(job=A, state="running")
        with pytest.raises(UnavailableError, match="b-3 waits until the journal can be"):
            await service.ask(again("later"))
        with pytest.raises(UnavailableError, match="cannot write its journal"):
            await service.ask(again("new"))


async def test_the_policy_observes_each_of_two_epochs_committed_together(
    service: LiveService,
) -> None:
    async with service.full_disk():
        service.tell(builders.epoch_end(A, 1))
        service.tell(builders.epoch_end(A, 2))

    learnt = [event.epoch for event in service.heard if isinstance(event, EpochSeen)]
    assert learnt == [1, 2]


async def test_replies_after_a_restart_equal_those_before(
    service: LiveService, tmp_path: Path
) -> None:
    service.tell(builders.epoch_end(A, 1))
    await service.loop.caught_up()
    before, state = await service.ask(ExplainJob(job=A)), service.loop.committed.state
    assert state == service.loop.reactor.state
    service.loop.close()

    again = LiveService(tmp_path)

    assert again.loop.committed.state == again.loop.reactor.state == state
    assert await again.ask(ExplainJob(job=A)) == before
    service.loop = again.loop  # which the fixture closes


async def test_a_request_of_another_port_is_refused_by_name(service: LiveService) -> None:
    with pytest.raises(BadFieldError, match=r"^ReadLog is not served on this port") as refused:
        await service.ask(ReadLog(job=A))
    assert refused.value.field == "type"
