"""What users change: each request checked against the newest state, then made an input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from controlplane.core.commands import Accept, Command
from controlplane.core.inputs import (
    CancelRequested,
    DrainRequested,
    JobSubmitted,
    PauseRequested,
    ResizeRequested,
    ResumeRequested,
    SweepChangeRequested,
    UndrainRequested,
)
from controlplane.core.model.job import Job
from controlplane.core.state import State
from controlplane.service.client_api import sweep_changes, sweep_replies
from controlplane.service.client_api.drain_requests import drain_input
from controlplane.service.client_api.job_quota import JobQuota
from controlplane.service.client_api.policy_notes import size_notes
from controlplane.service.client_api.read_requests import ReadRequests
from controlplane.service.client_api.replies import node_info
from controlplane.service.client_api.resize_checks import check_resize
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.role_permissions import Action, may, projects_of
from controlplane.service.workdir_snapshots import SnapshotStore
from schemas.errors import BadFieldError, OnesError, UnavailableError
from schemas.ids import JobId
from schemas.jobs import JobSpec, problems
from schemas.link import Identity
from schemas.messages import Message
from schemas.messages.client import (
    CancelJob,
    ChangeSweep,
    CheckJob,
    DrainNode,
    JobAccepted,
    JobChecked,
    Nodes,
    PauseJob,
    PutSnapshot,
    ResizeJob,
    ResumeJob,
    SnapshotStored,
    SubmitJob,
    SweepChanged,
    UndrainNode,
)

MAX_KEY: Final = 200  # characters of a request's; all of them are kept
Override = ResizeRequested | PauseRequested | ResumeRequested
Drains = DrainRequested | UndrainRequested
Asked = JobSubmitted | CancelRequested | Override | Drains | SweepChangeRequested
T = TypeVar("T")


class ChangeRequests:
    """Requests that become inputs; each is answered when its input is durable.

    Args:
        reads: what is told of a job afterwards.
        snapshots: archives of working directories.
    """

    def __init__(
        self,
        commit_loop: CommitLoop,
        reads: ReadRequests,
        snapshots: SnapshotStore,
        quota: JobQuota,
    ) -> None:
        self._quota = quota
        self._commit_loop = commit_loop
        self._reads = reads
        self._snapshots = snapshots

    @property
    def _state(self) -> State:
        """Of all that is durable: what may be told."""
        return self._commit_loop.committed.state

    @property
    def _newest(self) -> State:
        """Ahead of the journal: what decisions are made on."""
        return self._commit_loop.reactor.state

    def check(self, request: CheckJob) -> JobChecked:
        """Whether a job would be accepted.

        Raises:
            BadFieldError: if it would not.
        """
        _check(request.spec)
        notes = self._reads.notes.of_spec(request.spec)
        return JobChecked(notes=(*size_notes(self._state, request.spec), *notes))

    async def answer(self, request: Message, who: Identity) -> Message:
        """Do what is asked, and say what came of it.

        Args:
            who: the owner of the key that asks.

        Raises:
            OnesError: if it cannot be done; nothing was changed.
        """
        match request:
            case PutSnapshot():
                size = await self._snapshots.put(
                    who.name, request.digest, request.offset, request.data, request.total
                )
                return SnapshotStored(digest=request.digest, size=size)
            case SubmitJob():
                return await self._submit(request, who)
            case CancelJob():
                return await self._cancel(request, who)
            case ResizeJob() | PauseJob() | ResumeJob():
                return await self._override(request, who)
            case DrainNode() | UndrainNode():
                return await self._drain(request, who)
            case ChangeSweep():
                return await self._change_sweep(request, who)
            case _:
                raise BadFieldError(f"{type(request).__name__} is no request", "", "type")

    async def _submit(self, request: SubmitJob, who: Identity) -> JobAccepted:
        _check(request.spec)
        _check_key(request.key)
        if not self._may_use(request.snapshot, who):
            what = f"snapshot {request.snapshot[:64]!r} is not stored here"
            raise BadFieldError(what, "send it with PutSnapshot first", "snapshot")
        await self._snapshots.inspect(request.snapshot)
        submitted = JobSubmitted(
            spec=request.spec,
            snapshot=request.snapshot,
            user=who.name,
            key=request.key,
            project=_project(request.project, who),
        )
        known = self._known(f"{who.name}/{request.key}") if request.key else None
        if known and (self._commit_loop.stalled or known not in self._newest.jobs):
            if self._is_durable(known):
                return self._accepted(known)
            if not self._commit_loop.stalled:
                await self._commit_loop.caught_up()
                return self._accepted(known)
            what = f"{known} waits until the journal can be written ({self._commit_loop.stalled})"
            raise UnavailableError(what, "free space there; it need not be submitted again")
        if known is None:
            self._quota.take(who.name)
        for command in await self._durable(submitted):
            if isinstance(command, Accept):
                return self._accepted(command.job)
        raise UnavailableError("the submission was not taken", "look at the controller's log")

    def _may_use(self, snapshot: str, who: Identity) -> bool:
        """Whether an archive is here, and not only somebody else's who may keep it to himself."""
        if self._snapshots.is_of(who.name, snapshot):
            return True
        jobs = self._newest.jobs.values()
        return self._snapshots.has(snapshot) and any(
            job.snapshot == snapshot and may(who, Action.FILES, job.owner) for job in jobs
        )

    def _known(self, key: str) -> JobId | None:
        """The job of an earlier submission with that key, whether it is here or has left."""
        newest = self._newest
        known = newest.keys.get(key) or newest.left_keys.get(key)
        return known or self._commit_loop.reader.ended.of_key(key)

    def _is_durable(self, name: JobId) -> bool:
        return name in self._state.jobs or self._commit_loop.reader.ended.get(name) is not None

    def _accepted(self, name: JobId) -> JobAccepted:
        job = self._commit_loop.job(name)
        size = () if job.ended else size_notes(self._state, job.spec)
        notes = (*size, *self._reads.notes.of(job))
        return JobAccepted(job=name, state=job.phase.value, notes=notes)

    async def _cancel(self, request: CancelJob, who: Identity) -> Message:
        job = self._newest.jobs.get(request.job)
        if job is None or job.ended:
            await self._commit_loop.caught_up()
        else:
            await self._durable(CancelRequested(job=request.job, user=who.name))
        return self._reads.detail(self._commit_loop.job(request.job), self._reads.view(who))

    async def _override(self, request: ResizeJob | PauseJob | ResumeJob, who: Identity) -> Message:
        """Override the policy for a job, or give the job back to it."""
        event = await self._checked(lambda: self._override_input(request, who))
        await self._durable(event)
        return self._reads.detail(self._commit_loop.job(request.job), self._reads.view(who))

    def _override_input(self, request: ResizeJob | PauseJob | ResumeJob, who: Identity) -> Override:
        job = self._newest.jobs.get(request.job) or self._commit_loop.job(request.job)
        if job.ended or job.job not in self._newest.jobs:
            raise BadFieldError(f"job: {job.job} has {_end_of(job)}", "submit it again", "job")
        match request:
            case ResizeJob(slots=slots, batch=batch, on=on):
                check_resize(self._newest, job, request)
                return ResizeRequested(job=job.job, user=who.name, slots=slots, batch=batch, on=on)
            case PauseJob():
                return PauseRequested(job=job.job, user=who.name)
            case ResumeJob(auto=auto):
                if job.override is None:
                    what = f"job: {job.job} is under no manual override"
                    raise BadFieldError(what, "the policy rules it already", "job")
                return ResumeRequested(job=job.job, user=who.name, auto=auto)

    async def _drain(self, request: DrainNode | UndrainNode, who: Identity) -> Nodes:
        event = await self._checked(lambda: drain_input(self._newest, request, who))
        if event is None:
            await self._commit_loop.caught_up()
        else:
            await self._durable(event)
        return Nodes(nodes=(self._reads.view(who).node(node_info(self._state, request.node)),))

    async def _change_sweep(self, request: ChangeSweep, who: Identity) -> SweepChanged:
        _check_key(request.key)

        def check() -> tuple[int, SweepChangeRequested | None]:
            job = self._newest.jobs.get(request.job) or self._commit_loop.job(request.job)
            sweep, _ = sweep_replies.sweep_of(job)
            known = sweep_changes.known_change(job, request, who.name)
            if known is not None:
                return known, None
            event = sweep_changes.checked_change(job, request, who.name)
            return event.trial if event.trial is not None else len(sweep.engine.state.trials), event

        number, event = await self._checked(check)
        if event is None:
            await self._commit_loop.caught_up()
        else:
            await self._durable(event)
        job = self._commit_loop.job(request.job)
        sweep, _ = sweep_replies.sweep_of(job)
        return sweep_changes.changed(job, sweep, number)

    async def _checked(self, check: Callable[[], T]) -> T:
        """What `check` finds in the newest state; a refusal leaves when its reason is durable."""
        try:
            return check()
        except OnesError:
            await self._commit_loop.caught_up()
            raise

    async def _durable(self, event: Asked) -> list[Command]:
        done: asyncio.Future[list[Command]] = asyncio.get_running_loop().create_future()

        def committed(commands: list[Command]) -> None:
            if not done.done():
                done.set_result(commands)

        self._commit_loop.handle_unless_stalled(event, committed)
        return await done


def _end_of(job: Job) -> str:
    return job.phase.value if job.ended else "ended"


def _project(asked: str, who: Identity) -> str:
    mine = projects_of(who)
    if asked and asked not in mine:
        what = f"project: {asked[:64]!r} is none of {', '.join(mine)}"
        raise BadFieldError(what, "leave it out, or ask an admin for a key of it", "project")
    return asked or mine[0]


def _check_key(key: str) -> None:
    if len(key) > MAX_KEY:
        what = f"key: it has {len(key)} characters, at most {MAX_KEY}"
        raise BadFieldError(what, "give a short one that is yours alone", "key")


def _check(spec: JobSpec) -> None:
    for problem in problems(spec):
        raise BadFieldError(f"{problem.field}: {problem.what}", problem.remedy, problem.field)
