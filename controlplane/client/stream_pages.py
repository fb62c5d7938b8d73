"""What a job writes and what happens in a cluster, followed a page at a time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

from controlplane.client.cluster_connection import PIECE, ClusterConnection
from schemas.ids import JobId, Rank, Version
from schemas.jobs import ENDED
from schemas.messages.client import EventsPage, GetJob, JobDetail, ReadEvents
from schemas.messages.feed import FeedEvent
from schemas.messages.logs import LOG, SAMPLES, LogPiece, ReadLog, Stream

POLL_S: Final = 3.0  # of one long poll; an answer that a crash took is asked for again after it


class StreamPages(ClusterConnection):
    """Feed events, output and sample records as they come, many in one page."""

    async def job(self, job: str) -> JobDetail:
        """Everything about one job.

        Args:
            job: its name, as `submit` returned it.

        Raises:
            UnknownJobError: if there is no such job.
        """
        return await self._call(GetJob(job=JobId(job)), JobDetail)

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
            Pieces of the stream, which may break lines; behind a log, one line for each of these
            workers whose output did not all arrive.

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
