"""Copy of a cluster's state that all open pages share.

One client follows the feed. The other requests repeat only while a page is open and the feed
brings news, and take at most 2% of the time, so that a page costs the controller no more than a
follower.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog

from controlplane.client.allocations import Window
from controlplane.client.client import Client
from controlplane.client.connection import Home
from controlplane.web.past import Holder, Past, carried, charted, holders, joined, opened, read_past
from schemas.errors import DeniedError, OnesError, UnavailableError, UnreachableError, root_cause
from schemas.ids import JobId, Seconds
from schemas.wire.client import (
    Cluster,
    Explanation,
    JobDetail,
    JobSummary,
    NodeInfo,
    SearchInfo,
    SharingInfo,
    SweepDetail,
    Usage,
)
from schemas.wire.feed import FeedEvent

log = structlog.get_logger("web")
T = TypeVar("T")
MAX_EVENTS: Final = 100_000  # latest events that are read at first, and of charts that are kept
BURST_S: Final = 60.0  # time whose share of work may be taken at once
BITS: Final = 5  # precision of the begin of a range, in bits of its length
MAX_PASTS: Final = 8  # ranges of older events that are kept
MAX_WAITING: Final = 8  # ranges of older events
ENDED_SHOWN: Final = 100  # ended jobs on the first page
MAX_ENDED: Final = 1000  # ended jobs that are compared
MIN_INTERVAL_S: Final = 1.0  # between two refreshes
LOAD: Final = 0.02  # largest share of time that the controller works for the pages
MAX_AGE_S: Final = 10.0  # age after which the state is refreshed without news
RETRY_S: Final = 1.0
IDLE_S: Final = 30.0  # details of a job are forgotten after so long without a page
ABSENT: Final = "The controller does not reply. This is its last known state; the page reconnects."


class State(msgspec.Struct, frozen=True, kw_only=True):
    """State of the cluster at one moment."""

    version: int = 0  # counts the refreshes
    history: int = 0  # changes when the feed begins anew, as after a restored backup
    at: float = 0.0  # monotonic
    clock: float = msgspec.field(default_factory=lambda: time.time() - time.monotonic())
    problem: str = "This page has not reached the controller yet."  # empty: none
    cluster: Cluster | None = None
    jobs: tuple[JobSummary, ...] = ()  # live ones, then the latest ended ones
    nodes: tuple[NodeInfo, ...] = ()
    search: SearchInfo | None = None
    sharing: SharingInfo | None = None

    def now(self) -> Seconds:
        """Return the time by the controller's clock, whatever happens to this host's clock."""
        return Seconds(time.monotonic() + self.clock)


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """Details of one job, with its decisions."""

    detail: JobDetail
    explanation: Explanation


@dataclass(slots=True)
class _Shared:
    """Answer that several pages wait for or show."""

    begun: float  # monotonic
    answer: asyncio.Future[Any]
    pause_s: float = MIN_INTERVAL_S  # until it may be read again

    def measure(self, answer: asyncio.Future[Any]) -> None:
        """Set the pause by the time that the answer took."""
        took = time.monotonic() - self.begun
        self.pause_s = max(MIN_INTERVAL_S, took / LOAD)
        if not answer.cancelled():
            answer.exception()  # each page that waits gets it


class ClusterMirror:
    """Copy of the state of one cluster."""

    def __init__(self, home: Home) -> None:
        self.state = State()
        self._events: list[FeedEvent] = []  # that charts are made from
        self._last_seq = 0
        self._held: list[Holder] = []  # slots of jobs at the time of the first event
        self._held_from = Seconds(0.0)  # begin of the events; 0: that of the journal
        self._reading = asyncio.Lock()  # one range at a time
        self._read_at = 0.0  # monotonic; time until which the controller has been asked enough
        self.changed = asyncio.Condition()  # notified after each refresh
        self._home = home
        self._client: Client | None = None
        self._watchers = 0
        self._news = asyncio.Event()
        self._pasts: dict[str, Past] = {}  # latest ranges that were read
        self._waiting = 0  # ranges that are asked for
        self._details: dict[tuple[str, str], _Shared] = {}
        self._last_events: dict[JobId, float] = {}  # monotonic

    async def run(self) -> None:
        """Follow the cluster until cancelled, across absences of its controller."""
        while True:
            try:
                async with Client(self._home) as client:
                    await self._follow(client)
            except* Exception as group:
                error = root_cause(group)
                if not isinstance(error, OnesError):
                    log.exception("the cluster cannot be followed")
                denied = isinstance(error, DeniedError)
                await self._publish(problem=str(error) if denied else ABSENT)
            await asyncio.sleep(RETRY_S)

    async def _follow(self, client: Client) -> None:
        cluster = await client.cluster()
        if cluster.last_seq < self._last_seq:
            self._details.clear()
            self._pasts.clear()
            await self._publish(history=self.state.history + 1)
            self._last_seq = 0
        first = max(self._last_seq + 1, cluster.last_seq - MAX_EVENTS, 1)
        if first > self._last_seq + 1 or first == 1:
            self._events, self._held, self._held_from = [], [], Seconds(0.0)
            self._last_seq = 0
        self._client = client
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_events(client, first))
                tasks.create_task(self._refresh(client))
        finally:
            self._client = None

    async def _read_events(self, client: Client, first: int) -> None:
        async for page in client.event_pages(first, follow=True):
            if first > 1 and not self._last_seq:
                self._held_from = page[0].time
                self._held = await holders(client, page[0].time)
            self._last_seq = page[-1].seq
            self._events += charted(page)
            if len(self._events) > MAX_EVENTS:
                self._forget_oldest()
            now = time.monotonic()
            old = {job: at for job, at in self._last_events.items() if now - at < 2 * IDLE_S}
            self._last_events = old | {one.job: now for one in page if one.job is not None}
            self._news.set()

    def _forget_oldest(self) -> None:
        older, later = self._events[: MAX_EVENTS // 2], self._events[MAX_EVENTS // 2 :]
        self._events = [*carried([*opened(self._held, self._events, self._held_from), *older])]
        self._events += later
        self._held, self._held_from = [], later[0].time

    @property
    def begin(self) -> Seconds:
        """Time of the first event of the journal, or 0 if it is not held."""
        return Seconds(0.0) if self._held_from or not self._events else self._events[0].time

    def latest_events(self) -> tuple[FeedEvent, ...]:
        """Return the events that charts are made from, without those of the far past."""
        return (
            *joined(self.state.nodes, self._held_from),
            *opened(self._held, self._events, self._held_from),
            *self._events,
        )

    async def events_of(self, window: Window) -> Past:
        """Return the events of a range of time, read from the controller if it is long ago.

        Raises:
            OnesError: if the controller does not reply, or too many ranges are asked for.
        """
        held_from, latest = self._held_from, self.latest_events()
        if window.begin >= held_from:
            return Past(latest, window.end)
        # A range that moves with the time is not read anew each time.
        step = 2.0 ** (math.frexp(window.length)[1] - BITS)
        begin = window.begin // step * step
        older = await self._older(Window(begin, min(window.end, held_from)))
        if window.end <= held_from:
            return older
        if older.end < held_from:
            return Past(latest, window.end, held_from)
        return Past((*older.events, *latest), window.end)

    async def _older(self, window: Window) -> Past:
        key = f"{window.begin:.3f} {window.end:.3f}"
        if key in self._pasts:
            return self._pasts[key]
        if self._waiting >= MAX_WAITING:
            raise UnavailableError("too many pages read older events", "try again in a minute")

        async def read(client: Client) -> Past:
            self._waiting += 1
            try:
                async with self._reading:
                    await asyncio.sleep(self._read_at - time.monotonic())
                    begun = time.monotonic()
                    past = await read_past(client, window, self._last_seq)
                    took = time.monotonic() - begun
                    self._read_at = max(self._read_at, begun - BURST_S) + took / LOAD
                    nodes = joined(self.state.nodes, Seconds(window.begin))
                    return past._replace(events=(*nodes, *past.events))
            finally:
                self._waiting -= 1

        past = await self._shared(("past", key), read)
        self._pasts = dict([*self._pasts.items(), (key, past)][-MAX_PASTS:])
        return past

    async def _refresh(self, client: Client) -> None:
        while True:
            begin = time.monotonic()
            cluster = await client.cluster()
            await self._publish(
                problem="",
                cluster=cluster,
                clock=(cluster.now or time.time()) - time.monotonic(),
                jobs=(*await client.jobs(), *(await client.history(most=ENDED_SHOWN))),
                nodes=await client.nodes(),
                search=await client.search(),
                sharing=await client.sharing(),
            )
            took = time.monotonic() - begin
            await asyncio.sleep(max(MIN_INTERVAL_S, took / LOAD))
            try:
                async with asyncio.timeout(MAX_AGE_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            async with self.changed:
                await self.changed.wait_for(lambda: self._watchers > 0)

    async def _publish(self, **changes: Any) -> None:
        version = self.state.version + 1
        self.state = msgspec.structs.replace(
            self.state, version=version, at=time.monotonic(), **changes
        )
        async with self.changed:
            self.changed.notify_all()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keep the state fresh while the context is open."""
        self._watchers += 1
        async with self.changed:
            self.changed.notify_all()
        try:
            yield
        finally:
            self._watchers -= 1

    async def fresh(self) -> State:
        """Return the state, which is at most a refresh old, if the controller replies."""
        async with self.watching():
            if self.state.at < time.monotonic() - MAX_AGE_S and not self.state.problem:
                await self.next(self.state.version, MIN_INTERVAL_S)
        return self.state

    async def next(self, version: int, limit_s: float) -> State:
        """Return the first state after `version`, or the present one after `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s), self.changed:
                await self.changed.wait_for(lambda: self.state.version != version)
        except TimeoutError:
            pass
        return self.state

    async def job(self, job: JobId) -> JobState:
        """Return the details of a job, read again after its events.

        Raises:
            OnesError: if there is no such job, or the controller does not reply.
        """

        async def read(client: Client) -> JobState:
            detail, explanation = await asyncio.gather(client.job(job), client.explain(job))
            return JobState(detail=detail, explanation=explanation)

        return await self._shared(("job", job), read)

    async def sweep(self, job: JobId) -> SweepDetail:
        """Return the details of a sweep, read again after its events.

        Raises:
            OnesError: if there is no such sweep, or the controller does not reply.
        """
        return await self._shared(("sweep", job), lambda client: client.sweep(job))

    async def usage(self, span_s: float) -> Usage:
        """Return the slot time that jobs used in the latest `span_s` seconds.

        Raises:
            OnesError: if the controller does not reply.
        """
        since = self.state.now() - span_s
        return await self._shared(("usage", f"{span_s:.0f}"), lambda client: client.usage(since))

    async def ended_jobs(self) -> Sequence[JobSummary]:
        """Return the latest jobs that ended.

        Raises:
            OnesError: if the controller does not reply.
        """
        return await self._shared(("ended", ""), lambda client: client.history(most=MAX_ENDED))

    async def _shared(self, key: tuple[str, str], read: Callable[[Client], Awaitable[T]]) -> T:
        """Return what `read` returns; all pages share it while it is recent."""
        now = time.monotonic()
        self._details = {
            k: one for k, one in self._details.items() if now - one.begun < max(IDLE_S, one.pause_s)
        }
        known = self._details.get(key)
        news = self._last_events.get(JobId(key[1]), 0.0)
        if known is None or now > known.begun + (
            known.pause_s if news > known.begun else max(MAX_AGE_S, known.pause_s)
        ):
            known = self._details[key] = _Shared(now, asyncio.ensure_future(self.ask(read)))
            known.answer.add_done_callback(known.measure)
        return cast("T", await asyncio.shield(known.answer))

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Ask the controller with the key of this page.

        Raises:
            OnesError: the controller's error, or that it does not reply.
        """
        if self._client is None:
            raise UnreachableError(ABSENT, "try again in a moment")
        return await question(self._client)
