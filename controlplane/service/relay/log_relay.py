"""Log relay, which transfers output and working directories on sockets of its own.

`LogRates` limits the rate at which each job's output is accepted. Excess output waits in the files
of the job's workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import structlog

from controlplane.core.history import Process
from controlplane.core.model.job import Job
from controlplane.core.model.node import NodePhase
from controlplane.core.state import State
from controlplane.journal.records import JobRecords
from controlplane.service.api.fair_queue import (
    FairQueue,
    Timer,
    TokenBucket,
    WaitingRequests,
    deadline_of,
    failure_reply,
)
from controlplane.service.relay.job_files import JobFiles
from controlplane.service.relay.log_store import LogStore
from controlplane.service.relay.stream_relay import StreamRelay
from controlplane.service.rights import (
    NODE,
    Action,
    Right,
    permit,
    refuse_revoked,
    speaks_for,
)
from controlplane.service.uploads import StoredArchives
from schemas.codec import FROM_SHIPPER, READ_LOG, encode
from schemas.errors import DeniedError, OnesError, UnavailableError
from schemas.host.logging import Audit
from schemas.ids import JobId, NodeId, Rank, Seconds, Version, WorkerId, node_of, worker_id
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming, Socket
from schemas.wire import Message, feed
from schemas.wire.files import FileList, FilePiece, FilesRefused, FromFollower, ListFiles, ReadFile
from schemas.wire.streams import FromClient, FromNode, OpenStream

log = structlog.get_logger("relay")
BURST_S: Final = 16.0  # seconds of output at the full rate that a job may ship at once
MAX_CREDIT_BYTES: Final = 2 << 20  # per stream: bytes an agent may send beyond the stored ones
MIN_CREDIT_BYTES: Final = 256 << 10  # the same for a job above its rate
MAX_STREAMS: Final = 1000  # before more are added, streams with their full burst are forgotten
Sender = TypeVar("Sender", bound=Hashable)
StreamKey = tuple[str, str]  # job and stream


@dataclass(slots=True)
class _Stream(TokenBucket, Generic[Sender]):  # a token is a byte
    took_at: float = float("-inf")  # time of the last output
    waiting: dict[Sender, None] = field(default_factory=dict)  # waiting senders, in order


class LogRates(Generic[Sender]):
    """Limits on output. Each stream of a job gets credit at a rate, up to a burst.

    Output that arrives is stored at once, whatever its rate. Only the acknowledgement, which also
    grants credit for more output, is delayed. So nothing is lost, and no other job waits.

    `answer` reports to a sender how much is stored, and how many more bytes it may send.
    """

    def __init__(
        self,
        answer: Callable[[Sender, int], None],
        per_s: Callable[[], float],
        clock: Callable[[], float] | None = None,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self._answer = answer
        self._per_s = per_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._later = later or (lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._streams: dict[StreamKey, _Stream[Sender]] = {}

    def count_output(self, key: StreamKey, size: int) -> None:
        """Deduct `size` bytes of stored output from the stream's tokens."""
        stream = self._refilled(key)
        stream.tokens -= size
        stream.took_at = stream.at

    def answer(self, key: StreamKey, sender: Sender) -> None:
        """Grant credit now, or once the stream is within its rate.

        A sender that already waits for credit keeps its place in the queue and gets one reply.
        """
        stream = self._refilled(key)
        if not stream.waiting and stream.tokens >= 0:
            self._answer(sender, self._credit(stream))
            return
        if not stream.waiting:
            self._schedule_grants(key, stream)
        stream.waiting[sender] = None

    def quiet_s(self, key: StreamKey) -> float:
        """Return the seconds since the stream's last output, or infinity if there was none."""
        stream = self._streams.get(key)
        return float("inf") if stream is None else self._clock() - stream.took_at

    def _schedule_grants(self, key: StreamKey, stream: _Stream[Sender]) -> None:
        wait_s = max(MIN_CREDIT_BYTES, -stream.tokens) / self._per_s()
        self._later(wait_s, lambda: self._grant_waiting(key, stream))

    def _grant_waiting(self, key: StreamKey, stream: _Stream[Sender]) -> None:
        """Grant credit to as many waiting senders as the rate allows, the longest waiting first."""
        self._refilled(key)
        room = stream.tokens
        while stream.waiting and room >= 0:
            sender = next(iter(stream.waiting))
            del stream.waiting[sender]
            self._answer(sender, self._credit(stream))
            room -= MIN_CREDIT_BYTES
        if stream.waiting:
            self._schedule_grants(key, stream)

    def _credit(self, stream: _Stream[Sender]) -> int:
        return int(min(MAX_CREDIT_BYTES, max(MIN_CREDIT_BYTES, stream.tokens)))

    def _refilled(self, key: StreamKey) -> _Stream[Sender]:
        now, per_s = self._clock(), self._per_s()
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._forget()
            stream = self._streams[key] = _Stream(BURST_S * per_s, now)
        stream.refill(now, per_s, BURST_S)
        return stream

    def _forget(self) -> None:
        """Forget streams that have their full burst again, because new streams have the same."""
        now, per_s = self._clock(), self._per_s()
        for key, stream in list(self._streams.items()):
            if stream.refill(now, per_s, BURST_S) and not stream.waiting:
                del self._streams[key]


MAX_PAGE: Final = 1 << 20
FOLLOWER_RIGHTS: Final[Mapping[type[Message], Right]] = {
    feed.ReadLog: Action.OUTPUT,
    ListFiles: Action.FILES,
    ReadFile: Action.FILES,
    OpenStream: Action.ATTACH,
}
PAGES_PER_S: Final = 2000.0  # for one user
PAGE_TOKEN_BYTES: Final = 64 << 10  # bytes of a page that cost one more token
FORMER_S: Final = 1.0  # age of the list of a job's former processes
SHIPPING_TIMEOUT_S: Final = 60.0  # after a job's end; later output is no longer awaited


class _WorkerStream(NamedTuple):
    """A worker's stream, and the route to its agent."""

    route: bytes
    job: JobId
    stream: feed.Stream
    version: Version
    rank: Rank


@dataclass(kw_only=True, eq=False)
class LogRelay:
    """Relay that stores what agents ship, and serves followers one page for each request.

    A follower holds credit for exactly one page at a time, so a stalled follower costs nothing.
    `catch_up` is called before each message is handled, to bring the state and the keys up to date.
    """

    shippers: Socket
    followers: Socket
    store: LogStore
    snapshots: StoredArchives
    files: JobFiles
    streams: StreamRelay
    state: Callable[[], State]
    job: Callable[[JobId], Job]
    records: JobRecords
    catch_up: Callable[[], None]
    now: Callable[[], Seconds]
    audit: Audit
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Set up the state that no caller passes."""
        self._waiters: dict[JobId, asyncio.Future[None]] = {}
        self._rates: LogRates[_WorkerStream] = LogRates(self._give_credit, lambda: self.bytes_per_s)
        self._queue = FairQueue(self._start, lambda: PAGES_PER_S, PAGE_TOKEN_BYTES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._former: dict[JobId, tuple[float, Mapping[WorkerId, Process]]] = {}
        self.waiting = WaitingRequests()

    async def serve_shippers(self) -> None:
        """Handle what agents ship until cancelled."""
        async for incoming in self.shippers:
            try:
                self.catch_up()
                self._shipped(incoming)
            except OnesError as error:
                self._audit_refusal(incoming, error)
            except (ValueError, ArithmeticError) as error:  # no frame must stop the controller
                self.audit.refused("log", repr(error), peer=str(incoming.identity))
            except OSError as error:  # full disk: nothing was stored, and the agent sends again
                self.audit.refused("log", str(error), peer=str(incoming.identity))

    async def serve_followers(self) -> None:
        """Serve pages until cancelled."""
        async for incoming in self.followers:
            try:
                self.catch_up()
                refuse_revoked(incoming)
                request = READ_LOG.decode(incoming.frames[-1])
                who = incoming.identity or Identity("", "")
                if isinstance(request, feed.ReadLog | FromFollower | OpenStream):
                    right = FOLLOWER_RIGHTS[type(request)]
                    permit(who, right, request, self.job(request.job).owner)
                self._queue.put(str(who), (incoming, request), len(incoming.frames[-1]))
            except OnesError as error:
                if not self._queue.floods(str(incoming.identity or "")):
                    self._send_error(incoming, error)
                elif self.followers.cut(incoming):
                    self._audit_refusal(incoming, error)

    def _start(self, asked: tuple[Incoming, feed.ReadLog | FromFollower | FromClient]) -> None:
        incoming, request = asked
        if isinstance(request, FromClient):
            self._take_stream(incoming, request)
            return
        task = asyncio.create_task(self._answer(incoming, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_stream(self, incoming: Incoming, message: FromClient) -> None:
        who = incoming.identity or Identity("", "")
        try:
            refuse_revoked(incoming)
            self.streams.from_client(incoming, who, message)
        except OnesError as error:
            self._send_error(incoming, error)
        finally:
            self._queue.ended(str(who))

    def _send_error(self, incoming: Incoming, error: OnesError) -> None:
        self._audit_refusal(incoming, error)
        self.followers.send(*incoming.frames[:-1], encode(failure_reply(error)))

    def _shipped(self, incoming: Incoming) -> None:
        if not incoming.identity or incoming.identity.role != NODE:
            raise DeniedError(f"{incoming.identity} may not ship logs")
        message = FROM_SHIPPER.decode(incoming.frames[-1])
        if isinstance(message, feed.GetSnapshot):
            data, total = self.snapshots.piece(message.digest, message.offset)
            piece = feed.SnapshotPiece(
                digest=message.digest, offset=message.offset, data=data, total=total
            )
            self.shippers.send(incoming.route, encode(piece))
            return
        if isinstance(message, FileList | FilePiece | FilesRefused):
            self.files.receive(NodeId(incoming.identity.name), message)
            return
        if isinstance(message, FromNode):
            self.streams.from_node(incoming, message)
            return
        job = self.job(message.job)
        if message.journal != job.journal:
            raise DeniedError(f"{message.job} of journal {message.journal} is another job")
        if not speaks_for(
            incoming.identity,
            job,
            message.version,
            message.rank,
            processes=self._former_processes,
            state=self.state(),
        ):
            worker = worker_id(message.job, message.version, message.rank)
            raise DeniedError(f"{worker} never ran on {incoming.identity.name}")
        key, who = (message.job, message.stream), (message.version, message.rank)
        shipped = _WorkerStream(incoming.route, *key, *who)
        match message:
            case feed.LogHello():
                pass
            case feed.LogChunk(offset=offset, data=data):
                self.store.append(*key, who, offset, data)
                self._rates.count_output(key, len(data))
                self._wake(message.job)
            case feed.LogEnded(size=size):
                self.store.end(*key, who, size)
                self._wake(message.job)
                self._give_credit(shipped, MIN_CREDIT_BYTES)  # the stream is complete
                return
        self._rates.answer(key, shipped)

    def _former_processes(self, job: JobId) -> Mapping[WorkerId, Process]:
        """Return processes of a job that are not its workers any more, as last read."""
        known = self._former.get(job)
        if known is None or time.monotonic() - known[0] > FORMER_S:
            if len(self._former) >= MAX_STREAMS:
                self._former.clear()
            known = self._former[job] = time.monotonic(), self.records.processes(job)
        return known[1]

    def _give_credit(self, to: _WorkerStream, credit: int) -> None:
        size, ended = self.store.stored(to.job, to.stream, (to.version, to.rank))
        stored = feed.LogStored(
            job=to.job,
            version=to.version,
            rank=to.rank,
            stream=to.stream,
            size=size,
            ended=ended,
            credit=credit,
            full=self.store.full(to.job, to.stream),
        )
        self.shippers.send(to.route, encode(stored))

    async def _answer(self, incoming: Incoming, request: feed.ReadLog | FromFollower) -> None:
        who, reply = incoming.identity or Identity("", ""), b""
        incoming = replace(incoming, frames=(*incoming.frames[:-1], b""))  # frees the payload
        try:
            if isinstance(request, feed.ReadLog):
                wait_s = request.wait_s
                with (
                    self._queue.waits(str(who), wait_s),
                    self.waiting.interruptible(incoming, wait_s),
                ):
                    reply = encode(await self._wait_for_page(request))
            else:
                reply = encode(await self.files.reply(request, who))
            refuse_revoked(incoming)  # the key may have been revoked during the wait
        except OnesError as error:
            self._send_error(incoming, error)
        except OSError as error:
            what = f"the output cannot be read: {error.strerror}"
            self._send_error(incoming, UnavailableError(what))
        except Exception:
            log.exception("request failed", peer=str(incoming.identity))
            what = "the request failed because of an error in the controller"
            self._send_error(incoming, UnavailableError(what, "see the controller's log"))
        else:
            self.followers.send(*incoming.frames[:-1], reply)
        finally:
            self._queue.ended(str(who), len(reply))

    async def _wait_for_page(self, request: feed.ReadLog) -> feed.LogPage:
        loop = asyncio.get_running_loop()
        deadline = deadline_of(request.wait_s)
        while True:
            waiter = self._waiter(request.job)
            page = self._page(request)
            left = deadline - loop.time()
            if page.pieces or page.ended or left <= 0:
                return page
            await asyncio.wait([waiter], timeout=min(left, 1.0))

    def _page(self, request: feed.ReadLog) -> feed.LogPage:
        job = self.job(request.job)
        started = self.records.processes(job.job)
        ordered = {
            worker.worker: Process(node_of(worker.slot), confirmed=worker.pid is not None)
            for worker in job.workers.values()
            if worker.worker not in started
        }
        processes = started | ordered
        missing, final = self._missing(job, request, processes, ordered.keys())
        pieces, cursor = self.store.read(
            request.job,
            request.stream,
            request.rank,
            request.cursor,
            max(1, min(request.max_bytes, MAX_PAGE)),
            since=request.since,
        )
        return feed.LogPage(
            job=request.job,
            pieces=tuple(_with_node(job.job, piece, processes) for piece in pieces),
            cursor=cursor,
            ended=final and not pieces,
            missing=missing if job.ended else (),
        )

    def _missing(
        self,
        job: Job,
        request: feed.ReadLog,
        processes: Mapping[WorkerId, Process],
        ordered: Container[WorkerId],
    ) -> tuple[tuple[str, ...], bool]:
        """Return the workers with incomplete output, and whether no more output can arrive.

        The list has only workers of the requested rank. The second value is about all ranks.
        """
        missing, final = [], job.ended
        late = job.ended and self.now() - job.accounting.since > SHIPPING_TIMEOUT_S
        late = late and self._rates.quiet_s((job.job, request.stream)) > SHIPPING_TIMEOUT_S
        for name, (node, confirmed) in processes.items():
            version, rank = name.removeprefix(f"{job.job}.v").split(".r")
            if self.store.stored(job.job, request.stream, (int(version), int(rank)))[1]:
                continue
            host = self.state().nodes.get(node)
            gone = host is None or host.phase is NodePhase.LOST
            lost = gone or late or not (confirmed or name in ordered)
            if request.rank in (None, int(rank)) and (lost or confirmed):
                what = ", which is lost" if gone else "" if confirmed else ", if it ran there"
                missing.append(f"{name} on {node}{what}")
            final = final and lost
        return tuple(missing), final

    def _waiter(self, job: JobId) -> asyncio.Future[None]:
        waiter = self._waiters.get(job)
        if waiter is None or waiter.done():
            waiter = self._waiters[job] = asyncio.get_running_loop().create_future()
        return waiter

    def _wake(self, job: JobId) -> None:
        waiter = self._waiters.pop(job, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def job_changed(self, job: JobId) -> None:
        """Wake the followers of a job after its state changed."""
        self._wake(job)

    def _audit_refusal(self, incoming: Incoming, error: OnesError) -> None:
        self.audit.refused("log message", str(error), peer=str(incoming.identity))


def _with_node(
    job: JobId, piece: feed.LogPiece, processes: Mapping[WorkerId, Process]
) -> feed.LogPiece:
    process = processes.get(worker_id(job, piece.version, piece.rank))
    return piece if process is None else msgspec.structs.replace(piece, node=process.node)
