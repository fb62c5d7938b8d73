"""Request server (port 7702): permits and answers the requests of clients.

`LoopTime` measures how long a coroutine occupied the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any, Final, TypeVar

import structlog
from msgspec.structs import asdict

from controlplane.core.inputs import (
    CancelRequested,
    JobSubmitted,
    PauseRequested,
    ResizeRequested,
    ResumeRequested,
    SweepChangeRequested,
)
from controlplane.service.api.changes import ChangeRequests, JobQuota
from controlplane.service.api.fair_queue import RequestShares, WaitingRequests, failed
from controlplane.service.api.reads import ReadRequests
from controlplane.service.api.replies import PolicyNotes
from controlplane.service.api.views import answer_about_keys
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.keys import KeyTable
from controlplane.service.planner.plan_coordinator import PlanCoordinator
from controlplane.service.rights import JobOwners, permit, refuse_revoked
from controlplane.service.settings import Limits
from controlplane.service.uploads import SnapshotStore
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.codec import MAX_BYTES, REQUEST, encode
from schemas.errors import BadFieldError, OnesError, TooLargeError, UnavailableError
from schemas.host.logging import Audit
from schemas.transport import Identity, Incoming, Socket
from schemas.wire import Message
from schemas.wire.client import (
    AddKey,
    CancelJob,
    ChangeSweep,
    CheckJob,
    Cluster,
    DrainNode,
    GetCluster,
    GetSearch,
    ListKeys,
    PauseJob,
    ResizeJob,
    ResumeJob,
    RevokeKey,
    SearchInfo,
    UndrainNode,
)

T = TypeVar("T")


class LoopTime:
    """Stopwatch for the time that coroutines occupy the event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.busy_s = 0.0

    @coroutine
    def of(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await a coroutine and count the seconds for which it ran, without those it waited."""
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            began = self._clock()
            try:
                awaited = resume()
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                self.busy_s += self._clock() - began
            try:
                resume = partial(work.send, (yield awaited))
            except BaseException as error:  # noqa: BLE001 - the coroutine handles its cancellation
                resume = partial(work.throw, error)


log = structlog.get_logger("client_api")
TWO_FRAMES: Final = ("a request has two frames", "send [id, message]", "frames")
NOTED: Final = (DrainNode, UndrainNode, AddKey, RevokeKey)  # audited
ON_JOBS: Final = (CancelJob, ResizeJob, PauseJob, ResumeJob, ChangeSweep)  # on others' jobs
MAX_REPLY: Final = 2 << 20
Override = ResizeRequested | PauseRequested | ResumeRequested
Asked = JobSubmitted | CancelRequested | Override | SweepChangeRequested


class RequestServer:
    """Answers every request exactly once; a failed request changes nothing and gets the reason."""

    def __init__(
        self,
        *,
        commit_loop: CommitLoop,
        plans: PlanCoordinator,
        socket: Socket,
        feed: EventFeed,
        snapshots: SnapshotStore,
        telemetry: TelemetryTable,
        audit: Audit,
        policy: str,
        cluster_info: Callable[[Identity], Cluster],
        search_info: Callable[[], SearchInfo],
        owners: JobOwners,
        limits: Limits,
        keys: KeyTable,
    ) -> None:
        self.limits = limits
        self._commit_loop = commit_loop
        self._socket = socket
        self._audit = audit
        self._reads = ReadRequests(
            commit_loop=commit_loop,
            plans=plans,
            feed=feed,
            telemetry=telemetry,
            notes=PolicyNotes(policy),
            owners=owners,
        )
        quota = JobQuota(lambda: commit_loop.reactor.state, lambda: self.limits.live_jobs)
        self._changes = ChangeRequests(commit_loop, self._reads, snapshots, quota)
        self._cluster_info = cluster_info
        self._search_info = search_info
        self._owners = owners
        self._shares = RequestShares(self._begin, lambda: self.limits.requests_per_s)
        self._keys = keys
        self._under_way: set[asyncio.Task[None]] = set()
        self._waiting = WaitingRequests()

    def end_revoked(self) -> None:
        """Answer the waiting requests whose keys were revoked."""
        self._waiting.end_revoked()

    async def serve(self) -> None:
        """Handle requests until cancelled."""
        async for incoming in self._socket:
            user = str(incoming.identity)
            try:
                self._shares.put(user, incoming, sum(map(len, incoming.frames)))
            except UnavailableError as error:
                if not self._shares.floods(user):
                    self._fail(incoming, error)
                elif self._socket.cut(incoming):
                    self._audit.refused("flood", str(error), peer=user)

    def _begin(self, incoming: Incoming) -> None:
        task = asyncio.create_task(self._answer(incoming))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, incoming: Incoming) -> None:
        user, reply, took = str(incoming.identity), b"", LoopTime()
        try:
            refuse_revoked(incoming)
            if len(incoming.frames) != 3 or len(incoming.frames[1]) > 32:  # noqa: PLR2004
                raise BadFieldError(*TWO_FRAMES)  # noqa: TRY301 - answered like any other error
            request = REQUEST.decode(incoming.frames[2])
            incoming = replace(incoming, frames=incoming.frames[:2])  # frees the payload
            who = incoming.identity or Identity("", "")
            wait_s = getattr(request, "wait_s", 0.0)
            with self._shares.waits(user, wait_s), self._waiting.held(incoming, wait_s):
                reply = _fitting(await self._dispatch(request, who, took))
            if not isinstance(request, RevokeKey):  # reply even if it revoked its own key
                refuse_revoked(incoming)  # the key may have been revoked during the wait
        except OnesError as error:
            self._fail(incoming, error)
        except Exception:
            log.exception("request failed", peer=str(incoming.identity))
            what = "the request failed because of an error in the controller"
            self._fail(incoming, UnavailableError(what, "see the controller's log"))
        else:
            self._socket.send(*incoming.frames, reply)
        finally:
            self._shares.ended(user, len(reply), took.busy_s)

    def _fail(self, incoming: Incoming, error: OnesError) -> None:
        self._audit.refused("request", str(error), peer=str(incoming.identity))
        self._socket.send(*incoming.frames[:2], encode(failed(error)))

    async def _dispatch(self, request: Message, who: Identity, took: LoopTime) -> Message:
        name = getattr(request, "job", None)
        owner = None if name is None else self._owners.of(name)
        permit(who, request, owner)
        reply = await self._reply(request, who, took)
        of_others = owner is not None and owner.user != who.name
        if isinstance(request, NOTED) or (of_others and isinstance(request, ON_JOBS)):
            detail = {name: str(value)[:200] for name, value in asdict(request).items()}
            self._audit.done(type(request).__name__, by=str(who), **detail)
        return reply

    async def _reply(self, request: Message, who: Identity, took: LoopTime) -> Message:
        match request:
            case AddKey() | ListKeys() | RevokeKey():
                return answer_about_keys(self._keys, request, who)
            case GetCluster():
                return self._cluster_info(who)
            case GetSearch():
                return self._search_info()
            case CheckJob():
                return self._changes.check(request)
        reply = await took.of(self._reads.answer(request, who))
        return reply if reply is not None else await self._changes.answer(request, who)


def _fitting(reply: Message) -> bytes:
    """Encode a reply; refuse one that exceeds a message, for which the peer would disconnect."""
    data = encode(reply)
    if len(data) > MAX_BYTES:
        what = f"{type(reply).__name__} of {len(data)} bytes exceeds {MAX_BYTES} bytes"
        raise TooLargeError(what, "request less; `ones wait` and `ones ps` show the state of a job")
    return data
