"""Answers clients: what asks becomes a reply, what changes something an input of the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from controlplane.core.commands import Accept, Command
from controlplane.core.history_read_model import JobHistory
from controlplane.core.inputs import (
    CancelRequested,
    JobSubmitted,
    PauseRequested,
    ResizeRequested,
    ResumeRequested,
    SweepChangeRequested,
)
from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.service.client_api import replies, sweep_changes, sweep_replies
from controlplane.service.client_api.policy_notes import PolicyNotes
from controlplane.service.client_api.resize_checks import check_resize
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.event_feed import EventFeed
from controlplane.service.planner.plan_exchange import PlanExchange
from controlplane.service.role_permissions import READERS, WRITERS
from controlplane.service.workdir_snapshots import SnapshotStore
from controlplane.service.worker_telemetry import TelemetryTable
from schemas.codec import REQUEST, encode
from schemas.errors import BadFieldError, DeniedError, OnesError, UnavailableError
from schemas.jobs import JobSpec, problems
from schemas.link import Identity, Incoming, Socket
from schemas.logging_and_watchdog import Audit
from schemas.messages import Message
from schemas.messages.client import (
    CancelJob,
    ChangeSweep,
    CheckJob,
    Cluster,
    EventsPage,
    ExplainJob,
    Failed,
    GetCluster,
    GetJob,
    GetLedger,
    GetSearch,
    GetSweep,
    JobAccepted,
    JobChecked,
    Jobs,
    ListJobs,
    ListNodes,
    Nodes,
    PauseJob,
    PutSnapshot,
    ReadEvents,
    ResizeJob,
    ResumeJob,
    SearchInfo,
    SnapshotStored,
    SubmitJob,
    SweepChanged,
    SweepDetail,
)
from schemas.messages.logs import ReadLog

log = structlog.get_logger("client_api")
TWO_FRAMES: Final = ("a request has two frames", "send [id, message]", "frames")
MAX_WAIT_S: Final = 30.0
MAX_WAITING: Final = 1000  # requests under way at once
MAX_EVENTS: Final = 1000
MAX_REPLY: Final = 2 << 20
Asked = (
    JobSubmitted
    | CancelRequested
    | ResizeRequested
    | PauseRequested
    | ResumeRequested
    | SweepChangeRequested
)


class RequestServer:
    """Answers every request once; a request that cannot be done says why and changes nothing.

    Args:
        commit_loop: takes what a request changes; its state is what the others are answered from.
        plans: why jobs wait.
        socket: ROUTER of the client port.
        feed: wakes long polls.
        snapshots: archives of working directories.
        telemetry: what workers said last.
        audit: refused requests.
        policy: its name.
        cluster_info: what `GetCluster` tells the owner of a key.
        search_info: how the scheduler stands.
    """

    def __init__(
        self,
        *,
        commit_loop: CommitLoop,
        plans: PlanExchange,
        socket: Socket,
        feed: EventFeed,
        snapshots: SnapshotStore,
        telemetry: TelemetryTable,
        audit: Audit,
        policy: str,
        cluster_info: Callable[[Identity], Cluster],
        search_info: Callable[[], SearchInfo],
    ) -> None:
        self._commit_loop = commit_loop
        self._plans = plans
        self._socket = socket
        self._feed = feed
        self._snapshots = snapshots
        self._telemetry = telemetry
        self._audit = audit
        self._notes = PolicyNotes(policy)
        self._cluster_info = cluster_info
        self._search_info = search_info
        self._under_way: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take requests, for ever."""
        async for incoming in self._socket:
            if len(self._under_way) > MAX_WAITING:
                self._fail(incoming, UnavailableError("too many requests", "try again later"))
                continue
            task = asyncio.create_task(self._answer(incoming))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    @property
    def _state(self) -> State:
        return self._commit_loop.reactor.state

    async def _answer(self, incoming: Incoming) -> None:
        try:
            if len(incoming.frames) != 3 or len(incoming.frames[1]) > 32:  # noqa: PLR2004
                raise BadFieldError(*TWO_FRAMES)  # noqa: TRY301 - answered like any other error
            request = REQUEST.decode(incoming.frames[2])
            reply = await self._dispatch(request, incoming.identity or Identity("", ""))
        except OnesError as error:
            self._fail(incoming, error)
        except Exception:
            log.exception("request failed", peer=str(incoming.identity))
            what = "the controller could not do this, by a fault of its own"
            self._fail(incoming, UnavailableError(what, "its log says more"))
        else:
            self._socket.send(*incoming.frames[:-1], encode(reply))

    def _fail(self, incoming: Incoming, error: OnesError) -> None:
        now = self._commit_loop.now()
        self._audit.refused("request", str(error), now, peer=str(incoming.identity))
        failed = Failed(code=error.code, message=error.message, hint=error.hint, field=error.field)
        self._socket.send(*incoming.frames[:2], encode(failed))

    async def _dispatch(self, request: Message, who: Identity) -> Message:
        if who.role not in READERS:
            raise DeniedError(f"the key of {who} may not use this port", "use a user's key")
        match request:
            case GetCluster():
                return self._cluster_info(who)
            case ListJobs():
                return self._jobs(request)
            case GetJob():
                return await self._job(request)
            case ExplainJob(job=name):
                return self._explain(self._state.job(name))
            case GetSearch():
                return self._search_info()
            case CheckJob(spec=spec):
                self._check(spec)
                return JobChecked(notes=self._notes.of_spec(spec))
            case ListNodes():
                return Nodes(nodes=replies.node_infos(self._state))
            case GetSweep():
                return self._sweep(request)
            case GetLedger(job=name):
                history = self._commit_loop.reactor.histories.sweep_of(name)
                return sweep_replies.ledger(self._state.job(name), history, request)
            case ReadEvents():
                return await self._events(request)
            case ReadLog():
                raise BadFieldError("logs have a port of their own", "see log_port of GetCluster")
        if who.role not in WRITERS:
            raise DeniedError(f"{who.role} {who.name} may only read", "ask for a user's key")
        match request:
            case PutSnapshot():
                size = self._snapshots.put(
                    str(who), request.digest, request.offset, request.data, request.total
                )
                return SnapshotStored(digest=request.digest, size=size)
            case SubmitJob():
                return await self._submit(request, who)
            case CancelJob():
                return await self._cancel(request, who)
            case ResizeJob() | PauseJob() | ResumeJob():
                return await self._override(request, who)
            case ChangeSweep():
                return await self._change_sweep(request, who)
            case _:
                raise BadFieldError(f"{type(request).__name__} is no request", "", "type")

    async def _submit(self, request: SubmitJob, who: Identity) -> JobAccepted:
        self._check(request.spec)
        if not self._snapshots.has(request.snapshot):
            what = f"snapshot {request.snapshot[:64]!r} is not stored here"
            raise BadFieldError(what, "send it with PutSnapshot first", "snapshot")
        submitted = JobSubmitted(
            spec=request.spec, snapshot=request.snapshot, user=who.name, key=request.key
        )
        waiting = self._state.keys.get(f"{who.name}/{request.key}")
        if self._commit_loop.stalled and request.key and waiting:
            what = f"{waiting} waits until the journal can be written ({self._commit_loop.stalled})"
            raise UnavailableError(what, "free space there; it need not be submitted again")
        for command in await self._durable(submitted):
            if isinstance(command, Accept):
                job = self._state.job(command.job)
                notes = self._notes.of(job)
                return JobAccepted(job=command.job, state=job.phase.value, notes=notes)
        raise UnavailableError("the submission was not taken", "look at the controller's log")

    def _check(self, spec: JobSpec) -> None:
        for problem in problems(spec):
            raise BadFieldError(f"{problem.field}: {problem.what}", problem.remedy, problem.field)

    async def _cancel(self, request: CancelJob, who: Identity) -> Message:
        job = self._state.job(request.job)
        if not job.ended:
            if who.role != "admin" and who.name != job.user:
                raise DeniedError(f"{job.job} belongs to {job.user}", "ask its owner")
            await self._durable(CancelRequested(job=request.job, user=who.name))
        return self._detail(self._state.job(request.job))

    async def _override(self, request: ResizeJob | PauseJob | ResumeJob, who: Identity) -> Message:
        """Override the policy for a job, or give the job back to it."""
        job = self._state.job(request.job)
        if who.role != "admin" and who.name != job.user:
            raise DeniedError(f"{job.job} belongs to {job.user}", "ask its owner")
        if job.ended:
            raise BadFieldError(f"job: {job.job} has {job.phase.value}", "submit it again", "job")
        event: ResizeRequested | PauseRequested | ResumeRequested
        match request:
            case ResizeJob(slots=slots, batch=batch, on=on):
                check_resize(self._state, job, request)
                event = ResizeRequested(job=job.job, user=who.name, slots=slots, batch=batch, on=on)
            case PauseJob():
                event = PauseRequested(job=job.job, user=who.name)
            case ResumeJob(auto=auto):
                if job.override is None:
                    what = f"job: {job.job} is under no manual override"
                    raise BadFieldError(what, "the policy rules it already", "job")
                event = ResumeRequested(job=job.job, user=who.name, auto=auto)
        await self._durable(event)
        return self._detail(self._state.job(request.job))

    async def _change_sweep(self, request: ChangeSweep, who: Identity) -> SweepChanged:
        job = self._state.job(request.job)
        if who.role != "admin" and who.name != job.user:
            raise DeniedError(f"{job.job} belongs to {job.user}", "ask its owner")
        known = sweep_changes.known_change(job, request, who.name)
        if known is not None:
            return known
        event = sweep_changes.checked_change(job, request, who.name)
        sweep, _ = sweep_replies.sweep_of(job)
        new = len(sweep.engine.state.trials)
        await self._durable(event)
        sweep, _ = sweep_replies.sweep_of(self._state.job(request.job))
        return sweep_changes.changed(job, sweep, new if event.trial is None else event.trial)

    def _sweep(self, request: GetSweep) -> SweepDetail:
        job = self._state.job(request.job)
        sweep_replies.sweep_of(job)
        history = self._commit_loop.reactor.histories.sweep_of(job.job)
        now, reason = self._commit_loop.now(), self._plans.reason(job.job)
        summary = replies.job_summary(job, reason, self._telemetry, now)
        return sweep_replies.sweep_detail(job, history, summary, request, now)

    async def _durable(self, event: Asked) -> list[Command]:
        done: asyncio.Future[list[Command]] = asyncio.get_running_loop().create_future()

        def committed(commands: list[Command]) -> None:
            if not done.done():
                done.set_result(commands)

        self._commit_loop.handle_unless_stalled(event, committed)
        return await done

    async def _job(self, request: GetJob) -> Message:
        job = self._state.job(request.job)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_s, MAX_WAIT_S)
        while not job.ended and (left := deadline - loop.time()) > 0:
            await self._feed.wait(left)
            job = self._state.job(request.job)
        return self._detail(job)

    async def _events(self, request: ReadEvents) -> EventsPage:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_s, MAX_WAIT_S)
        first = max(1, request.from_seq)
        while self._feed.last_seq < first and (left := deadline - loop.time()) > 0:
            await self._feed.wait(left)
        events = self._commit_loop.reader.feed(first, max(1, min(request.limit, MAX_EVENTS)))
        visible = tuple(event for event in events if event.seq <= self._feed.last_seq)
        return EventsPage(events=visible, next_seq=visible[-1].seq + 1 if visible else first)

    def _jobs(self, request: ListJobs) -> Jobs:
        chosen = replies.chosen_jobs(self._state, request)
        now = self._commit_loop.now()
        lines = [
            replies.job_summary(
                job,
                self._plans.reason(job.job),
                self._telemetry,
                now,
                predicted_loss=self._plans.predicted_loss.get(job.job),
            )
            for job in chosen
        ]
        while len(lines) > 1 and len(msgspec.msgpack.encode(lines)) > MAX_REPLY:
            lines = lines[-(-len(lines) // 4) :]  # the newest
        return Jobs(jobs=tuple(lines), left_out=len(chosen) - len(lines))

    def _detail(self, job: Job) -> Message:
        reason = self._plans.reason(job.job)
        history, now = self._history_of(job), self._commit_loop.now()
        predicted = self._plans.predicted_loss.get(job.job)
        detail = replies.job_detail(
            job, history, reason, self._telemetry, now, predicted_loss=predicted
        )
        notes = self._notes.of(job, detail.summary.train_loss)
        return msgspec.structs.replace(detail, notes=notes)

    def _explain(self, job: Job) -> Message:
        reason = self._plans.reason(job.job)
        history, now = self._history_of(job), self._commit_loop.now()
        return replies.job_explanation(job, history, reason, now)

    def _history_of(self, job: Job) -> JobHistory:
        return self._commit_loop.reactor.histories.of(job.job)
