"""Request server (port 7702). It checks the rights of client requests and answers them.

`LoopUsage` measures how long a coroutine occupied the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from msgspec.structs import asdict

from controlplane.service.api.changes import ChangeRequests, JobQuota, PreparePolicy
from controlplane.service.api.fair_queue import FairQueue, WaitingRequests, failure_reply
from controlplane.service.api.reads import ReadRequests
from controlplane.service.api.replies import PolicyNotes
from controlplane.service.api.views import numbered, page_of
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.keys import KeyTable
from controlplane.service.planner.plan_coordinator import PlanCoordinator
from controlplane.service.rights import (
    ADMINS,
    KEY_ADDERS,
    OPERATORS,
    READERS,
    WRITERS,
    Action,
    JobOwners,
    Right,
    permit,
    refuse_revoked,
)
from controlplane.service.secret_store import SecretStore
from controlplane.service.settings import Limits
from controlplane.service.uploads import SnapshotStore
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.codec import MAX_BYTES, REQUEST, encode
from schemas.errors import BadFieldError, OnesError, TooLargeError, UnavailableError
from schemas.host.logging import Audit
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming, Socket
from schemas.wire import Message
from schemas.wire import client as wire

T = TypeVar("T")


class LoopUsage:
    """Stopwatch for the time that coroutines occupy the event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.busy_s = 0.0

    @coroutine
    def measure(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await a coroutine, and add the seconds for which it ran, without waits, to `busy_s`."""
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


class Route(NamedTuple):
    """Handler of one kind of request, and the right that the request needs."""

    right: Right
    handle: Callable[[Any, Identity], Message | Awaitable[Message]]
    measured: bool = False  # event loop time costs the sender tokens
    audited: bool = False  # log changes of other users' jobs for audits


class RequestServer:
    """Server that answers each request once. A failed request changes nothing and gets a reason."""

    def __init__(
        self,
        *,
        commit_loop: CommitLoop,
        plans: PlanCoordinator,
        socket: Socket,
        feed: EventFeed,
        snapshots: SnapshotStore,
        secrets: SecretStore,
        telemetry: TelemetryTable,
        audit: Audit,
        notes: PolicyNotes,
        cluster_info: Callable[[Identity], wire.Cluster],
        search_info: Callable[[], wire.SearchInfo],
        owners: JobOwners,
        limits: Limits,
        keys: KeyTable,
        prepare_policy: PreparePolicy,
        files_stored: Callable[[], Awaitable[None]],
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
            notes=notes,
            owners=owners,
        )
        quota = JobQuota(lambda: commit_loop.reactor.state, lambda: self.limits)
        self._changes = ChangeRequests(
            commit_loop,
            self._reads,
            snapshots,
            secrets,
            quota,
            lambda: self.limits,
            prepare_policy,
            files_stored,
        )

        async def add_key(request: wire.AddKey, who: Identity) -> wire.Keys:
            added = keys.add(request, who)
            await files_stored()
            return wire.Keys(keys=(added,))

        async def revoke_key(request: wire.RevokeKey, who: Identity) -> wire.Keys:
            revoked = keys.revoke(request.key, who.name)
            await files_stored()
            return wire.Keys(keys=revoked)

        reads, changes = self._reads, self._changes
        self.routes: Mapping[type[Message], Route] = {
            # replies are filtered for the reader
            wire.GetCluster: Route(READERS, lambda _, who: cluster_info(who)),
            wire.GetSearch: Route(READERS, lambda _, who: reads.search(search_info(), who)),
            wire.CheckJob: Route(READERS, changes.check),
            wire.ListJobs: Route(READERS, reads.jobs, measured=True),
            wire.ListNodes: Route(READERS, reads.nodes, measured=True),
            wire.GetUsage: Route(READERS, reads.usage, measured=True),
            wire.ReadEvents: Route(READERS, reads.events, measured=True),
            wire.GetSharing: Route(READERS, reads.sharing, measured=True),
            wire.GetPolicy: Route(READERS, reads.policy),
            # about one job
            wire.GetJob: Route(Action.STATE, reads.job, measured=True),
            wire.WaitJob: Route(Action.STATE, reads.job_state, measured=True),
            wire.ExplainJob: Route(Action.STATE, reads.explain, measured=True),
            wire.GetSweep: Route(Action.STATE, reads.sweep, measured=True),
            wire.GetLedger: Route(Action.STATE, reads.ledger, measured=True),
            wire.CancelJob: Route(Action.CHANGE, changes.change_job),
            wire.ResizeJob: Route(Action.CHANGE, changes.change_job),
            wire.PauseJob: Route(Action.CHANGE, changes.change_job),
            wire.ResumeJob: Route(Action.CHANGE, changes.change_job),
            wire.HoldJob: Route(Action.CHANGE, changes.change_job),
            wire.ReleaseJob: Route(Action.CHANGE, changes.change_job),
            wire.ChangeSweep: Route(Action.CHANGE, changes.change_sweep),
            wire.RerunJob: Route(Action.ENV, changes.rerun),
            # for some roles
            wire.PutSnapshot: Route(WRITERS, changes.put_snapshot),
            wire.SubmitJob: Route(WRITERS, changes.submit),
            wire.DrainNode: Route(OPERATORS, changes.drain, audited=True),
            wire.UndrainNode: Route(OPERATORS, changes.drain, audited=True),
            wire.ReserveNodes: Route(
                OPERATORS,
                lambda request, who: changes.reserve(request, who, dict(keys.known).values()),
                audited=True,
            ),
            wire.CancelReservation: Route(OPERATORS, changes.cancel_reservation, audited=True),
            wire.PauseScheduling: Route(OPERATORS, changes.pause_scheduling, audited=True),
            wire.ChangeSharing: Route(ADMINS, changes.change_sharing, audited=True),
            wire.ChoosePolicy: Route(ADMINS, changes.choose_policy, audited=True),
            wire.ForgetNode: Route(OPERATORS, changes.forget_node, audited=True),
            wire.AddKey: Route(KEY_ADDERS, add_key, audited=True),
            wire.ListKeys: Route(ADMINS, lambda page, _: _key_list(keys, page.cursor)),
            wire.RevokeKey: Route(ADMINS, revoke_key, audited=True),
        }
        self._owners = owners
        self._queue = FairQueue(self._start, lambda: self.limits.requests_per_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self.waiting = WaitingRequests()
        self.requests = Counter[str]()  # by user, since the start

    async def serve(self) -> None:
        """Handle requests until cancelled."""
        async for incoming in self._socket:
            user = str(incoming.identity)
            try:
                self._queue.put(user, incoming, sum(map(len, incoming.frames)))
            except UnavailableError as error:
                if not self._queue.floods(user):
                    self._send_error(incoming, error)
                elif self._socket.cut(incoming):
                    self._audit.refused("flood", str(error), peer=user)

    def close(self) -> None:
        """Answer no further request."""
        self._queue.close()
        for task in self._tasks:
            task.cancel()

    def _start(self, incoming: Incoming) -> None:
        task = asyncio.create_task(self._answer(incoming))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, incoming: Incoming) -> None:
        user, reply, usage = str(incoming.identity), b"", LoopUsage()
        try:
            refuse_revoked(incoming)
            if len(incoming.frames) != 3 or len(incoming.frames[1]) > 32:  # noqa: PLR2004
                raise BadFieldError(*TWO_FRAMES)  # noqa: TRY301 - answered like any other error
            request = REQUEST.decode(incoming.frames[2])
            incoming = replace(incoming, frames=incoming.frames[:2])  # frees the payload
            who = incoming.identity or Identity("", "")
            self.requests[who.name] += 1
            wait_s = getattr(request, "wait_s", 0.0)
            with self._queue.waits(user, wait_s), self.waiting.interruptible(incoming, wait_s):
                reply = _encode_reply(await self._dispatch(request, who, usage))
            if not isinstance(
                request, wire.RevokeKey
            ):  # reply even if a sender revoked its own key
                refuse_revoked(incoming)  # the key may have been revoked during the wait
        except OnesError as error:
            self._send_error(incoming, error)
        except Exception:
            log.exception("request failed", peer=str(incoming.identity))
            what = "the request failed because of an error in the controller"
            self._send_error(incoming, UnavailableError(what, "see the controller's log"))
        else:
            self._socket.send(*incoming.frames, reply)
        finally:
            self._queue.ended(user, len(reply), usage.busy_s)

    def _send_error(self, incoming: Incoming, error: OnesError) -> None:
        self._audit.refused("request", str(error), peer=str(incoming.identity))
        self._socket.send(*incoming.frames[:2], encode(failure_reply(error)))

    async def _dispatch(self, request: Message, who: Identity, usage: LoopUsage) -> Message:
        name = getattr(request, "job", None)
        owner = None if name is None else self._owners.of(name)
        route = self.routes.get(type(request))
        if route is None:
            what = f"{type(request).__name__} is not served on this port"
            raise BadFieldError(what, "send it to the port of output and files", "type")
        permit(who, route.right, request, owner)
        work = _carry_out(route, request, who)
        reply = await (usage.measure(work) if route.measured else work)
        of_others = owner is not None and owner.user != who.name
        if route.audited or (of_others and route.right is Action.CHANGE):
            detail = {name: str(value)[:200] for name, value in asdict(request).items()}
            self._audit.done(type(request).__name__, by=str(who), **detail)
        return reply


async def _carry_out(route: Route, request: Message, who: Identity) -> Message:
    reply = route.handle(request, who)
    return reply if isinstance(reply, Message) else await reply


def _key_list(keys: KeyTable, cursor: str) -> wire.Keys:
    lists, following = page_of({"keys": numbered(list(keys.rows()))}, cursor)
    return wire.Keys(keys=lists["keys"], next=following)


def _encode_reply(reply: Message) -> bytes:
    """Encode a reply. Refuse an oversized reply, because the peer would disconnect."""
    data = encode(reply)
    if len(data) > MAX_BYTES:
        what = f"{type(reply).__name__} of {len(data)} bytes exceeds {MAX_BYTES} bytes"
        raise TooLargeError(what, "request less; `ones wait` and `ones ps` show the state of a job")
    return data
