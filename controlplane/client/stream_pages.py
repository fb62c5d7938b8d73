"""What a job writes and what happens in a cluster, followed a page at a time."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from controlplane.client.cluster_connection import PIECE
from controlplane.client.joined_pages import JoinedPages
from schemas.errors import BadFieldError
from schemas.ids import JobId, Rank, Version
from schemas.jobs import ENDED
from schemas.messages.client import EventsPage, ReadEvents
from schemas.messages.feed import FeedEvent
from schemas.messages.logs import LOG, SAMPLES, LogPiece, ReadLog, Stream

POLL_S: Final = 3.0  # of one long poll; an answer that a crash took is asked for again after it
LOOK_S: Final = 0.001  # of a poll for what is there now
Who = tuple[Version, Rank]
NOBODY: Final = (Version(0), Rank(0))  # no worker is of this version: a remark of our own


class OutputLine(NamedTuple):
    """A line that a worker wrote."""

    rank: int | None  # None: a remark of the client's own
    text: str  # without its newline


class StreamPages(JoinedPages):
    """Feed events, output and sample records as they come, many in one page."""

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
            if page.events:
                yield page.events
            elif not follow and page.next_seq <= from_seq:  # else it passed over others' events
                return
            from_seq = max(from_seq, page.next_seq)

    async def sample_pages(self, job: str) -> AsyncIterator[list[dict[str, Any]]]:
        """Sample records as they come from the controller.

        Args:
            job: its name.

        Yields:
            Records as `samples` gives them; a page may be empty.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if its job file does not ask for `record_samples`.
        """
        detail = await self.job(job)
        if not detail.spec.record_samples:
            hint = "put `record_samples = true` into its job file, and submit it again"
            raise BadFieldError(f"{job} does not record its samples", hint, "record_samples")
        restarts = [(v.version, v.resumed_step) for v in detail.versions if v.kind == "start"]
        seen: set[tuple[int, int, int]] = set()
        async for page in self.line_pages(job, SAMPLES, None, follow=False):
            fresh = []
            for (born, _), line in page:
                if line[-1:] != b"}":
                    continue
                record = json.loads(line)
                taken_back = any(v > born and record["step"] > step for v, step in restarts)
                key = (record["epoch"], record["step"], record["rank"])
                if not taken_back and key not in seen:
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
    ) -> AsyncIterator[list[OutputLine]]:
        """Lines of a job's output, as they come.

        Args:
            job: its name.
            rank: only of this worker; None: of all.
            follow: until the job has ended.
            since: only what reached the controller then or later, seconds since the epoch.
            last: of what there is now, only so many lines; None: all.
            matching: a regular expression that a line has to have a match of.

        Raises:
            UnknownJobError: if there is no such job.
            BadFieldError: if `matching` is no regular expression.
        """
        found = _pattern(matching)
        held = None if last is None else deque[OutputLine](maxlen=last)
        async for page in self.line_pages(job, LOG, rank, follow=follow, since=since):
            lines = [_output_line(who, line) for who, line in page]
            lines = [line for line in lines if found.search(line.text)]
            if held is None:
                yield lines
                continue
            held.extend(lines)
            if follow and not page:  # that is all there is so far
                yield list(held)
                held = None
        if held:
            yield list(held)

    async def line_pages(
        self, job: str, stream: Stream, rank: int | None, *, follow: bool, since: float = 0.0
    ) -> AsyncIterator[list[tuple[Who, bytes]]]:
        """Whole lines with version and rank of their worker, as they come from the log relay.

        Args:
            job: its name.
            stream: log or samples.
            rank: only of this worker; None: of all.
            follow: until the job has ended.
            since: only what was stored then or later, seconds since the epoch.

        Yields:
            An empty page, too: at the end of what there is so far.
        """
        rest: dict[Who, bytes] = {}
        async for pieces in self.piece_pages(job, stream, rank, follow=follow, since=since):
            page: list[tuple[Who, bytes]] = []
            for piece in pieces:
                who = (piece.version, piece.rank)
                *lines, rest[who] = (rest.get(who, b"") + piece.data).split(b"\n")
                page += [(who, line) for line in lines]
            if page or not pieces:
                yield page
        if left := [(who, line) for who, line in rest.items() if line]:
            yield left

    async def piece_pages(
        self, job: str, stream: Stream, rank: int | None, *, follow: bool, since: float = 0.0
    ) -> AsyncIterator[tuple[LogPiece, ...]]:
        """Raw pieces of a stream in the order in which they were stored.

        Args:
            job: its name.
            stream: log or samples.
            rank: only of workers of this rank; None: of all.
            follow: until the job has ended; else end behind the last piece there is.
            since: only what was stored then or later, seconds since the epoch.

        Yields:
            Pieces of the stream, which may break lines; none at the end of what there is so far;
            behind a log, one line for each of these workers whose output did not all arrive.

        Raises:
            UnknownJobError: if there is no such job.
        """
        cursor, wait_s = 0, LOOK_S
        while True:
            state = "" if follow else (await self.state(job)).state
            asked = ReadLog(
                job=JobId(job),
                stream=stream,
                rank=None if rank is None else Rank(rank),
                cursor=cursor,
                max_bytes=PIECE,
                wait_s=wait_s if follow else POLL_S if state in ENDED else 0.0,
                since=since,
            )
            page = await self._page(asked)
            if page.pieces or not page.ended:
                yield page.pieces
            cursor, wait_s = page.cursor, LOOK_S if page.pieces else POLL_S
            if page.ended or (not page.pieces and not follow):
                if page.missing and stream == LOG:
                    yield tuple(map(_note, page.missing))
                return


def _note(worker: str) -> LogPiece:
    said = f"[ones] output of {worker} ends early: not all of it arrived\n"
    return LogPiece(version=NOBODY[0], rank=NOBODY[1], offset=0, data=said.encode())


def _output_line(who: Who, line: bytes) -> OutputLine:
    return OutputLine(None if who == NOBODY else who[1], line.decode("utf-8", "replace"))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        hint = "put a backslash before a sign that stands for itself"
        raise BadFieldError(f"{text!r} is no regular expression: {error}", hint, "grep") from None
