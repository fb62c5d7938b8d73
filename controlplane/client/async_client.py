"""Async client: submit, look, wait, follow, across restarts of the controller."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from controlplane.client.cluster_home import Home, find_home
from controlplane.client.jobfile import checked
from controlplane.client.request_channel import RequestChannel
from controlplane.client.workdir_archive import digest_of, pack
from schemas.codec import LOG_REPLY, REPLY, Codec
from schemas.errors import TimedOutError, UnreachableError
from schemas.ids import JobId, Rank, SlotId, Version
from schemas.jobs import ENDED, JobSpec
from schemas.link import Link, load_keys, load_public
from schemas.messages import Message
from schemas.messages.client import (
    CancelJob,
    Cluster,
    EventsPage,
    ExplainJob,
    Explanation,
    GetCluster,
    GetJob,
    GetSearch,
    JobAccepted,
    JobDetail,
    Jobs,
    JobSummary,
    ListJobs,
    ListNodes,
    NodeInfo,
    Nodes,
    PauseJob,
    PutSnapshot,
    ReadEvents,
    ResizeJob,
    ResumeJob,
    SearchInfo,
    SnapshotStored,
    SubmitJob,
)
from schemas.messages.feed import FeedEvent
from schemas.messages.logs import LOG, SAMPLES, LogPage, LogPiece, ReadLog, Stream

PIECE: Final = 1 << 20
PATIENCE_S: Final = 60.0  # how long those who wait and follow bear an absent controller
POLL_S: Final = 3.0  # of one long poll; an answer that a crash took is asked for again after it
ANSWER_S: Final = 3.0  # beyond a long poll's own wait
TIMEOUT: Final = "ONES_TIMEOUT_S"
R = TypeVar("R", bound=Message)


class Client:
    """A connection to one cluster; an async context manager.

    A call raises `UnreachableError` when nothing answers for `timeout` seconds, and the error that
    the controller names when it refuses (`DeniedError`, `UnknownJobError`, ...). Those that wait or
    follow (`wait`, `tail`, `events`) bear an absent controller for a minute, and go on when it is
    back.

    Args:
        home: the cluster's folder; default: $ONES_HOME, else ~/.ones.
        timeout: seconds; default: $ONES_TIMEOUT_S, else 10.

    Raises:
        SettingsError: if there is no cluster in that folder, or its keys cannot be used.
    """

    def __init__(self, home: Home | Path | str | None = None, timeout: float | None = None) -> None:
        self._home = home if isinstance(home, Home) else find_home(home)
        self._timeout = float(os.environ.get(TIMEOUT, "10")) if timeout is None else timeout
        self._link = Link(load_keys(self._home.key))
        self._server_key = load_public(self._home.server_key)
        self._calls: RequestChannel | None = None
        self._logs: RequestChannel | None = None

    async def __aenter__(self) -> Self:
        """Open the socket; the first call finds out whether anybody is there."""
        self._calls = self._open_channel(self._home.endpoint, REPLY)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all sockets."""
        for channel in (self._calls, self._logs):
            if channel is not None:
                channel.close()
        await asyncio.sleep(0)
        self._link.close()

    # --- calls

    async def cluster(self) -> Cluster:
        """Who answers, and as whom you are known."""
        return await self._call(GetCluster(), Cluster)

    async def submit(self, spec: JobSpec, key: str | None = None) -> JobId:
        """Ship the working directory and submit.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: makes a repetition harmless: the same key gives the same job.

        Returns:
            The job's name.

        Raises:
            BadFieldError: if a field cannot be accepted; nothing was submitted.
            TooLargeError: if the working directory packs to more than the cluster takes.
        """
        accepted = await self.submit_accepted(spec, key)
        return accepted.job

    async def submit_accepted(self, spec: JobSpec, key: str | None = None) -> JobAccepted:
        """The same as `submit`, with the state that the job is in.

        Args:
            spec: what to run; relative paths are relative to the current directory.
            key: makes a repetition harmless: the same key gives the same job. None: a new job each
                time.

        Raises:
            BadFieldError: if a field cannot be accepted; nothing was submitted.
            TooLargeError: if the working directory packs to more than the cluster takes.
        """
        spec = checked(spec, Path.cwd())
        archive = await asyncio.to_thread(pack, Path(spec.workdir))
        digest = digest_of(archive)
        await self._put(digest, archive)
        request = SubmitJob(spec=spec, snapshot=digest, key=key or uuid.uuid4().hex)
        return await self._call(request, JobAccepted)

    async def jobs(self, *, ended: bool = False) -> tuple[JobSummary, ...]:
        """Summaries, oldest first; with `ended`, of ended jobs too.

        Args:
            ended: False: only jobs that have not ended.
        """
        return (await self._call(ListJobs(ended=ended), Jobs)).jobs

    async def job(self, job: str) -> JobDetail:
        """Everything about one job.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._call(GetJob(job=JobId(job)), JobDetail)

    async def explain(self, job: str) -> Explanation:
        """Why a job has the slots and the batch that it has: every decision about it.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._call(ExplainJob(job=JobId(job)), Explanation)

    async def search(self) -> SearchInfo:
        """How the scheduler stands."""
        return await self._call(GetSearch(), SearchInfo)

    async def cancel(self, job: str) -> JobDetail:
        """End a job; one that has ended stays as it is.

        Args:
            job: its name, as `submit` returned it.

        Returns:
            The job as it stands then; an end that is under way may not show yet.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
        """
        return await self._call(CancelJob(job=JobId(job)), JobDetail)

    async def resize(
        self,
        job: str,
        slots: int | None = None,
        batch: int | None = None,
        on: Sequence[str] = (),
    ) -> JobDetail:
        """Override the policy for one job: it is followed as soon as slots allow.

        The policy leaves the job alone until `resume` with `auto`.

        Args:
            job: its name.
            slots: how many; 0 pauses the job; None: as many as it has now.
            batch: global batch, samples per step; None: as it is now.
            on: exactly these slots, NODE/INDEX.

        Raises:
            BadFieldError: if it could never be followed, naming the field and the bound.
        """
        places = tuple(SlotId(slot) for slot in on)
        request = ResizeJob(job=JobId(job), slots=slots, batch=batch, on=places)
        return await self._call(request, JobDetail)

    async def pause(self, job: str) -> JobDetail:
        """Take a job's slots away; its state is kept in a checkpoint.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
            BadFieldError: if it has ended.
        """
        return await self._call(PauseJob(job=JobId(job)), JobDetail)

    async def resume(self, job: str, *, auto: bool = False) -> JobDetail:
        """End a pause; with `auto`, give the job back to the policy.

        Args:
            job: its name, as `submit` returned it.
            auto: False: the slots and the batch that were asked for by hand stay in force.

        Raises:
            UnknownJobError: if there is no such job.
            DeniedError: if it is somebody else's.
            BadFieldError: if it has ended, or was neither resized nor paused by hand.
        """
        return await self._call(ResumeJob(job=JobId(job), auto=auto), JobDetail)

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes."""
        return (await self._call(ListNodes(), Nodes)).nodes

    async def wait(self, job: str, timeout: float | None = None) -> JobDetail:  # noqa: ASYNC109
        """The job when it has ended.

        Args:
            job: its name.
            timeout: seconds; None: for ever.

        Raises:
            TimedOutError: if it has not ended after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout if timeout is not None else None
        while True:
            left = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - loop.time()))
            detail = await self._call(GetJob(job=JobId(job), wait_s=left), JobDetail, left)
            if detail.summary.state in ENDED:
                return detail
            if deadline is not None and loop.time() >= deadline:
                what = f"{job} is {detail.summary.state} after {timeout:g} s"
                raise TimedOutError(what, "wait longer, or look with `ones show`")

    async def events(self, from_seq: int = 1, follow: bool = False) -> AsyncIterator[FeedEvent]:
        """Feed events, numbered without gaps.

        Args:
            from_seq: number of the first one, 1-based.
            follow: go on for ever; else end at the last one there is.
        """
        async for page in self.event_pages(from_seq, follow=follow):
            for event in page:
                yield event

    async def tail(
        self, job: str, rank: int | None = None, follow: bool = True
    ) -> AsyncIterator[str]:
        """Lines of a job's output from its start on, without their newlines.

        Args:
            job: its name.
            rank: only of this worker; None: of all, as they arrived.
            follow: go on until the job has ended; else end at the last line there is.

        Raises:
            UnknownJobError: if there is no such job.
        """
        async for page in self.line_pages(job, LOG, rank, follow=follow):
            for _, line in page:
                yield line.decode("utf-8", "replace")

    async def samples(self, job: str) -> AsyncIterator[dict[str, Any]]:
        """Records `{"epoch", "step", "rank", "ids"}` of committed steps, each sample once an epoch.

        Steps that were lost with a worker, and done again from a checkpoint, are left out.

        Args:
            job: its name; its spec has to ask for `record_samples`, else there are none.

        Raises:
            UnknownJobError: if there is no such job.
        """
        async for page in self.sample_pages(job):
            for record in page:
                yield record

    # --- the same, a page at a time

    async def event_pages(
        self, from_seq: int, *, follow: bool
    ) -> AsyncIterator[tuple[FeedEvent, ...]]:
        """Feed events as they come from the controller.

        Args:
            from_seq: number of the first one, 1-based.
            follow: go on for ever; else end behind the last one there is.

        Yields:
            Events in order, without gaps; no page is empty.
        """
        while True:
            wait_s = POLL_S if follow else 0.0
            request = ReadEvents(from_seq=from_seq, wait_s=wait_s)
            page = await self._call(request, EventsPage, wait_s)
            from_seq = page.next_seq
            if page.events:
                yield page.events
            elif not follow:
                return

    async def sample_pages(self, job: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Sample records as they come from the controller.

        Args:
            job: its name.

        Yields:
            Records as `samples` gives them; a page may be empty.

        Raises:
            UnknownJobError: if there is no such job.
        """
        detail = await self.job(job)
        restarts = [(v.version, v.resumed_step) for v in detail.versions if v.kind == "start"]
        seen: set[tuple[int, int, int]] = set()
        async for page in self.line_pages(job, SAMPLES, None, follow=False):
            fresh = []
            for born, line in page:
                if line[-1:] != b"}":
                    continue
                record = json.loads(line)
                taken_back = any(v > born and record["step"] > step for v, step in restarts)
                key = (record["epoch"], record["step"], record["rank"])
                if not taken_back and key not in seen:
                    seen.add(key)
                    fresh.append(record)
            yield fresh

    async def line_pages(
        self, job: str, stream: Stream, rank: int | None, *, follow: bool
    ) -> AsyncIterator[list[tuple[Version, bytes]]]:
        """Whole lines with the version of their worker, as they come from the log relay.

        Args:
            job: its name.
            stream: log or samples.
            rank: only of this worker; None: of all.
            follow: until the job has ended.
        """
        rest: dict[tuple[Version, Rank], bytes] = {}
        async for piece in self.pieces(job, stream, rank, follow=follow):
            who = (piece.version, piece.rank)
            *lines, rest[who] = (rest.get(who, b"") + piece.data).split(b"\n")
            yield [(piece.version, line) for line in lines]
        yield [(version, left) for (version, _), left in rest.items() if left]

    async def pieces(
        self, job: str, stream: Stream, rank: int | None, *, follow: bool
    ) -> AsyncIterator[LogPiece]:
        """Raw pieces of a stream in the order in which they were stored.

        Args:
            job: its name.
            stream: log or samples.
            rank: only of workers of this rank; None: of all.
            follow: until the job has ended; else end behind the last piece there is.

        Yields:
            Pieces of the stream, which may break lines; behind a log, one line for each worker
            whose output did not all arrive.

        Raises:
            UnknownJobError: if there is no such job.
        """
        cursor = 0
        while True:
            state = "" if follow else (await self.job(job)).summary.state
            wait_s = POLL_S if follow or state in ENDED else 0.0
            page = await self._page(
                ReadLog(
                    job=JobId(job),
                    stream=stream,
                    rank=None if rank is None else Rank(rank),
                    cursor=cursor,
                    max_bytes=PIECE,
                    wait_s=wait_s,
                )
            )
            for piece in page.pieces:
                yield piece
            cursor = page.cursor
            if page.ended or (not page.pieces and not follow):
                for worker in page.missing if stream == LOG else ():
                    note = f"[ones] output of {worker} ends early: not all of it arrived\n"
                    yield LogPiece(version=Version(0), rank=Rank(0), offset=0, data=note.encode())
                return

    # --- helpers

    async def _put(self, digest: str, archive: bytes) -> None:
        offset = 0
        while offset < len(archive) or offset == 0:
            piece = archive[offset : offset + PIECE]
            request = PutSnapshot(digest=digest, offset=offset, data=piece, total=len(archive))
            stored = await self._call(request, SnapshotStored)
            offset = stored.size
            if offset == len(archive):
                return

    async def _call(self, request: Message, kind: type[R], wait_s: float = 0.0) -> R:
        if self._calls is None:
            raise UnreachableError("the client is not open", "use `async with Client() as client`")
        answer_s = wait_s + ANSWER_S
        limit_s = PATIENCE_S if wait_s else self._timeout
        reply = await self._calls.call(request, answer_s, limit_s)
        return _expected(reply, kind)

    async def _page(self, request: ReadLog) -> LogPage:
        if self._logs is None:
            cluster = await self.cluster()
            endpoint = f"tcp://{self._home.host}:{cluster.log_port}"
            self._logs = self._open_channel(endpoint, LOG_REPLY)
        answer_s = request.wait_s + ANSWER_S
        limit_s = PATIENCE_S if request.wait_s else self._timeout
        reply = await self._logs.call(request, answer_s, limit_s)
        return _expected(reply, LogPage)

    def _open_channel(self, endpoint: str, codec: Codec[Any]) -> RequestChannel:
        return RequestChannel(self._link.connect("DEALER", endpoint, self._server_key), codec)


def _expected(reply: Any, kind: type[R]) -> R:
    if not isinstance(reply, kind):
        raise UnreachableError(
            f"the controller answered {type(reply).__name__}", "compare releases"
        )
    return reply
