"""Replies joined from several pages, and streams of feed events, output and samples."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from controlplane.client.connection import PIECE_BYTES, ClusterConnection
from schemas.errors import BadFieldError, UnreachableError
from schemas.ids import JobId, Rank, Version
from schemas.jobs import ENDED
from schemas.wire import Message
from schemas.wire import client as wire
from schemas.wire.feed import LOG, SAMPLES, FeedEvent, LogPage, LogPiece, ReadLog, Stream

Page = TypeVar(
    "Page", wire.Jobs, wire.JobDetail, wire.Explanation, wire.Nodes, wire.Keys, wire.Usage
)
JOB_LISTS: Final = ("workers", "history", "epochs", "versions", "promises")
POLL_S: Final = 3.0  # length of a long poll; after it, a lost reply is requested again
NOW_S: Final = 0.001  # length of a poll for output that exists already
LATE_S: Final = 6.0  # without new output of an ended job; nodes return to a new controller sooner
WorkerKey = tuple[Version, Rank]
RAW_END: Final = re.compile(rb"(?<=[\r\n])")
NO_WORKER: Final = (Version(0), Rank(0))  # stands for no worker, in remarks of the client


class OutputLine(NamedTuple):
    """Line of a worker's output."""

    rank: int | None  # None: a remark of the client
    text: str  # without its terminator; only the last state of a progress bar
    time: float | None = None  # when the line's end reached the controller, seconds since the epoch
    node: str | None = None
    end: str = "\n"  # "\n" finished; "\r" unfinished progress bar; "" other unfinished line


class WorkerLine(NamedTuple):
    """Line as a worker wrote it, or the part received so far."""

    data: bytes  # without its newline
    piece: LogPiece  # contains the end of the line
    whole: bool = True


class StreamPages(ClusterConnection):
    """The requests with replies joined from pages, and streams of events, output and samples."""

    async def some_job_names(self) -> list[str]:
        """Return names of jobs, oldest first, with at most two requests.

        If the jobs fit into one page, return all names. Otherwise return the names on the first
        page and the names of jobs that have not ended.
        """
        page = await self._call(wire.ListJobs(ended=True), wire.Jobs)
        live = (await self._call(wire.ListJobs(), wire.Jobs)).jobs if page.next else ()
        return [job.job for job in (*page.jobs, *live)]

    async def job(self, job: str) -> wire.JobDetail:
        """Return all details of a job; `job` is a name that `submit` returned."""
        return await self._detail(wire.GetJob(job=JobId(job)), JobId(job))

    async def state(
        self, job: str, wait_s: float = 0.0, failures: int | None = None
    ) -> wire.JobState:
        """Return the state of a job, without its history.

        Args:
            wait_s: seconds, at most 30, for which the controller delays the reply unless the job
                ends.
            failures: number of failed tries above which the reply is not delayed; None: any.
        """
        request = wire.WaitJob(job=JobId(job), wait_s=wait_s, failures=failures)
        return await self._call(request, wire.JobState, wait_s)

    async def _detail(self, request: Message, job: JobId) -> wire.JobDetail:
        """Send a request for a job's detail, and join the pages of the reply."""
        return await self._joined(request, wire.JobDetail, *JOB_LISTS, more=wire.GetJob(job=job))

    async def _joined(
        self, request: Message, kind: type[Page], *lists: str, more: Message | None = None
    ) -> Page:
        """Return the reply with all pages of its lists. `more` requests all later pages."""
        page = await self._call(request, kind)
        rows = {name: list(getattr(page, name)) for name in lists}
        while cursor := page.next:
            page = await self._call(msgspec.structs.replace(more or request, cursor=cursor), kind)
            if page.next == cursor:
                problem = f"the controller repeats the page at {cursor}"
                raise UnreachableError(problem, "compare releases")
            for name in lists:
                rows[name] += getattr(page, name)
        return msgspec.structs.replace(page, **{name: tuple(rows[name]) for name in lists})

    async def event_pages(
        self, from_seq: int, *, follow: bool
    ) -> AsyncIterator[tuple[FeedEvent, ...]]:
        """Yield feed events from number `from_seq` (1-based) on, without gaps; no page is empty.

        With `follow` the stream continues until cancelled, else it ends after the newest event.
        """
        while True:
            wait_s = POLL_S if follow else 0.0
            request = wire.ReadEvents(from_seq=from_seq, wait_s=wait_s)
            page = await self._call(request, wire.EventsPage, wait_s)
            if page.events:
                yield page.events
            elif not follow and page.next_seq <= from_seq:  # otherwise events were skipped
                return
            from_seq = max(from_seq, page.next_seq)

    async def sample_pages(self, job: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield pages of the records that `Client.samples` yields; a page may be empty."""
        detail = await self.job(job)
        if not detail.spec.record_samples:
            hint = "set `record_samples = true` in the job file and submit it again"
            raise BadFieldError(f"{job} does not record its samples", hint, "record_samples")
        restarts = [(v.version, v.resumed_step) for v in detail.versions if v.kind == "start"]
        seen: set[tuple[int, int, int]] = set()
        async for page in self.line_pages(job, SAMPLES, None, follow=False):
            fresh = []
            for line, piece, _ in page:
                if line[-1:] != b"}":
                    continue
                record = json.loads(line)
                born = piece.version
                rolled_back = any(v > born and record["step"] > step for v, step in restarts)
                key = (record["epoch"], record["step"], record["rank"])
                if not rolled_back and key not in seen:
                    seen.add(key)
                    fresh.append(record)
            yield fresh

    async def output_pages(
        self,
        job: str,
        rank: int | None = None,
        *,
        follow: bool,
        since: float = 0.0,
        last: int | None = None,
        matching: str = "",
        unfinished: bool = False,
        raw: bool = False,
    ) -> AsyncIterator[list[OutputLine]]:
        """Yield lines of a job's output as they arrive.

        Args:
            rank: only this worker; None: all.
            follow: True continues until the job has ended; False ends after the newest line.
            since: seconds since the epoch; skip output that reached the controller earlier.
            last: start with this many of the lines that exist now; None: all.
            matching: regular expression; skip lines without a match.
            unfinished: at the end of each page, also yield the received part of lines that have no
                terminator yet.
            raw: yield each state of a progress bar as a line that ends with a carriage return.
        """
        found = line_pattern(matching)
        held = None if last is None else deque[OutputLine](maxlen=last)
        source = self.line_pages(
            job, LOG, rank, follow=follow, since=since, unfinished=unfinished, raw=raw
        )
        async for page in source:
            lines = [_output_line(*line, raw=raw) for line in page]
            lines = [line for line in lines if found.search(line.text)]
            if held is None:
                yield lines
                continue
            held.extend(line for line in lines if raw or line.end == "\n")
            if follow and not page:  # end of the output that has arrived so far
                yield list(held)
                held = None
        if held:
            yield list(held)

    async def line_pages(
        self,
        job: str,
        stream: Stream,
        rank: int | None,
        *,
        follow: bool,
        since: float = 0.0,
        unfinished: bool = False,
        raw: bool = False,
    ) -> AsyncIterator[list[WorkerLine]]:
        """Yield complete lines of workers as they arrive, with the arguments of `output_pages`.

        An empty page marks the end of the output that has arrived so far. With `unfinished`,
        unfinished lines follow the finished ones. `raw` also splits after carriage returns, and
        keeps them.
        """
        rest: dict[WorkerKey, WorkerLine] = {}
        async for pieces in self.piece_pages(job, stream, rank, follow=follow, since=since):
            page: list[WorkerLine] = []
            began: dict[WorkerKey, WorkerLine] = {}
            for piece in pieces:
                who = (piece.version, piece.rank)
                data = (rest[who].data if who in rest else b"") + piece.data
                *lines, last = _split_raw(data) if raw else data.split(b"\n")
                page += [WorkerLine(line, piece) for line in lines]
                last = last if raw else _visible(last)
                rest[who] = began[who] = WorkerLine(last, piece, whole=False)
            if unfinished and not raw:
                page += [line for line in began.values() if line.data]
            if page or not pieces:
                yield page
        if left := [WorkerLine(line.data, line.piece) for line in rest.values() if line.data]:
            yield left

    async def piece_pages(
        self, job: str, stream: Stream, rank: int | None, *, follow: bool, since: float = 0.0
    ) -> AsyncIterator[tuple[LogPiece, ...]]:
        """Yield raw pieces of a job's output in the order in which they were stored.

        Pieces can split lines. An empty page marks the end of the output that has arrived so far.
        The last output of an ended job is awaited. The output ends with one remark for each
        selected worker with incomplete output.
        """
        cursor, wait_s, loop = 0, NOW_S, asyncio.get_running_loop()
        new_at = loop.time()  # time of the last new output
        while True:
            state = "" if follow else (await self.state(job)).state
            asked = ReadLog(
                job=JobId(job),
                stream=stream,
                rank=None if rank is None else Rank(rank),
                cursor=cursor,
                max_bytes=PIECE_BYTES,
                wait_s=wait_s if follow else POLL_S if state in ENDED else 0.0,
                since=since,
            )
            page = await self._bulk_call(asked, LogPage, asked.wait_s)
            if page.pieces or not page.ended:
                yield page.pieces
            cursor, wait_s = page.cursor, NOW_S if page.pieces else POLL_S
            if page.pieces:
                new_at = loop.time()
            waits = follow or (state in ENDED and loop.time() - new_at < LATE_S)
            if page.ended or not (page.pieces or waits):
                if page.missing and stream == LOG:
                    yield tuple(map(_missing_remark, page.missing))
                return


def _missing_remark(worker: str) -> LogPiece:
    said = f"[ones] output of {worker} is incomplete: its end did not arrive\n"
    return LogPiece(version=NO_WORKER[0], rank=NO_WORKER[1], offset=0, data=said.encode())


def _split_raw(data: bytes) -> list[bytes]:
    """Split after each newline and carriage return. Drop newlines, keep carriage returns."""
    *lines, last = RAW_END.split(data)
    return [*(line.removesuffix(b"\n") for line in lines), last]


def _visible(line: bytes) -> bytes:
    """Drop the text that a later carriage return overwrote."""
    return line[max(0, line.rstrip(b"\r").rfind(b"\r")) :] if b"\r" in line else line


def _output_line(data: bytes, piece: LogPiece, whole: bool, *, raw: bool) -> OutputLine:
    bar = b"\r" in (data[-1:] if raw else data)
    end = "\r" if bar and (raw or not whole) else "\n" if whole else ""
    text = data.removesuffix(b"\r") if raw else _visible(data).strip(b"\r") if bar else data
    remark = (piece.version, piece.rank) == NO_WORKER
    return OutputLine(
        None if remark else piece.rank,
        text.decode("utf-8", "replace"),
        piece.time or None,
        piece.node or None,
        end,
    )


def line_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression for lines, or raise `BadFieldError`."""
    try:
        return re.compile(text)
    except re.error as error:
        problem = f"{text!r} is not a regular expression: {error}"
        hint = "escape special characters with a backslash"
        raise BadFieldError(problem, hint, "grep") from None
