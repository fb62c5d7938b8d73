"""A job starts from nothing or from its checkpoint: ordered, ready, formed, or too late.

Makes groups of workers, and writes down that they were ordered and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import end, fail, restart_from_checkpoint
from controlplane.core.history import GroupOrdered
from controlplane.core.inputs import StartExpired
from controlplane.core.model.job import CORRECTION, Job, SpeedPromise
from controlplane.core.model.job_phases import JobTrigger, Paused, Running, Starting
from controlplane.core.model.worker import ExitCause, Worker, WorkerPhase, exit_cause
from controlplane.core.state import START_LIMIT_S
from controlplane.policy.api import Reason
from schemas.ids import NodeId, Rank, SlotId, Version, WorkerId, node_of, worker_id
from schemas.nodes import Group, Member, ResumePoint
from schemas.wire.agent import START, GroupFormed, WorkerExited
from schemas.wire.client import Decision, Size, VersionInfo
from schemas.wire.feed import Detail

POLICY: Final = "policy"  # who decides
OPERATOR: Final = "operator"
CLUSTER: Final = "cluster"


def make_group(
    job: Job,
    version: Version,
    rows: Sequence[tuple[WorkerId, SlotId, int]],
    resume: ResumePoint | None = None,
) -> Group:
    """A group of `job`.

    Args:
        rows: process, slot and local batch (samples per step) of each member, in rank order.
        resume: the checkpoint that it starts from.
    """
    members = tuple(
        Member(rank=Rank(rank), slot=slot, local_batch=batch, worker=name)
        for rank, (name, slot, batch) in enumerate(rows)
    )
    return Group(
        version=version,
        members=members,
        lr=job.spec.lr,
        base_batch=job.spec.batch_size,
        resume=resume,
    )


def share_batch(workers: Sequence[Worker], batch: int) -> list[tuple[WorkerId, SlotId, int]]:
    """A global batch in parts as equal as can be, the larger ones first.

    Args:
        workers: at least one, in rank order.
        batch: global, samples per step.

    Returns:
        Process, slot and local batch of each.
    """
    share, more = divmod(batch, len(workers))
    return [
        (worker.worker, worker.slot, share + (rank < more)) for rank, worker in enumerate(workers)
    ]


def add_workers(job: Job, members: Sequence[Member], version: Version) -> None:
    """Give `job` a worker for each of `members`, which are new with `version`.

    Args:
        job: it is changed in place, and remembers their nodes.
        members: with their slots and local batches (samples per step).
        version: of the group that brings them.
    """
    for member in members:
        job.workers[member.worker] = Worker(
            worker=member.worker,
            version=version,
            rank=member.rank,
            slot=member.slot,
            local_batch=member.local_batch,
        )
        job.nodes[node_of(member.slot)] = None


def note_order(
    ctx: HandlerContext, job: Job, group: Group, kind: str, reason: Reason, *, by: str
) -> None:
    """Write down that `group` was ordered, before `job` comes to the phase that has it.

    Args:
        group: that was ordered.
        kind: start, join, recover or suspend.
    """
    job.version = group.version
    job.promise = _promise(group.version, reason.numbers)
    slots = tuple(member.slot for member in group.members)
    decision = Decision(
        time=ctx.now,
        was=Size() if kind == START else job.size,
        to=Size(slots=slots, batch=group.global_batch),
        why=reason.text,
        code=reason.code,
        by=by,
        numbers=reason.numbers,
        version=group.version,
    )
    info = VersionInfo(
        version=group.version,
        resumed_epoch=job.progress.epoch,
        kind=kind,
        resumed_step=job.progress.step,
        time=ctx.now,
        slots=slots,
        global_batch=group.global_batch,
    )
    ctx.records.append(GroupOrdered(job=job.job, decision=decision, version=info))


def _promise(version: Version, numbers: dict[str, float]) -> SpeedPromise | None:
    then, now = numbers.get("speed_then"), numbers.get("speed_now")
    if then is None or not now:
        return None
    correction = numbers.get(CORRECTION)
    return SpeedPromise(version=version, now=now, then=then, correction=correction)


def names_of(group: Group) -> list[WorkerId]:
    """Its processes, in rank order.

    Args:
        group: may be empty, as that of a suspension is.
    """
    return [member.worker for member in group.members]


def nodes_of(group: Group | None) -> list[NodeId]:
    """Where its members are, in rank order; a node with several comes several times.

    Args:
        group: None has no members.
    """
    return [node_of(member.slot) for member in group.members] if group else []


def trains_on(group: Group) -> str:
    """What a job does, in words.

    Args:
        group: its slots and its global batch (samples per step) are named.
    """
    slots = len(group.members)
    return f"trains on {slots} slot{'s' * (slots != 1)}, batch {group.global_batch}"


ENDED_ALONE: Final = "its script ended on one slot, while another waited for it"
SIX_LINES: Final = (
    "from elastic import ScalingAgent; agent = ScalingAgent.from_env(); "
    "model, optimizer, loader = agent.load(...); for epoch in agent.epochs(...); "
    "for ... in loader; agent.report(...)"
)


def start(
    ctx: HandlerContext,
    job: Job,
    placed: Mapping[SlotId, int],
    reason: Reason,
    by: str = POLICY,
) -> None:
    """Order a group, from the job's checkpoint if it has one.

    Args:
        placed: slot -> local batch, samples per step; in rank order. The slots are free, or their
            owners trade places with the job: its workers are prepared beside them.
    """
    version = Version(job.version + 1)
    checkpoint = job.progress.checkpoint
    rows = [
        (worker_id(job.job, version, Rank(rank)), slot, batch)
        for rank, (slot, batch) in enumerate(placed.items())
    ]
    group = make_group(job, version, rows, checkpoint)
    owners = ctx.state.slot_index.owners()
    add_workers(job, group.members, version)
    for member in group.members:
        job.workers[member.worker].reserved = member.slot in owners
    note_order(ctx, job, group, START, reason, by=by)
    job.override_waits, job.attempts.exit_code = "", None
    ctx.state.slot_index.job_begins(job.job)
    ctx.state.jobs_with_processes[job.job] = None
    ctx.state.deadlines.expect_start(job.job, version, ctx.now)
    slots = ", ".join(member.slot for member in group.members)
    resumes = f", resumes after epoch {job.progress.epoch}" if checkpoint else ""
    suspended = isinstance(job.status, Paused) and job.status.suspended
    status = Starting(group=group, resumes=suspended)
    why = f"{reason.text}: {slots}{resumes}"
    ctx.advance(job, JobTrigger.GROUP_ORDERED, status, why, {"slots": slots})
    ctx.send(job)


def form_when_ready(ctx: HandlerContext, job: Job, status: Starting) -> None:
    """Let the group meet when all of its workers are ready.

    Args:
        job: that is started. It fails if one worker ended and all others wait for it.
        status: of `job`; nothing happens if its group meets already.
    """
    if status.meeting:
        return
    phases = {worker.phase for worker in job.group_workers()}
    if phases == {WorkerPhase.READY}:
        status.meeting = True
        ctx.send(job)
    elif phases >= {WorkerPhase.READY, WorkerPhase.EXITED}:
        fail(ctx, job, ENDED_ALONE)


def on_group_formed(ctx: HandlerContext, job: Job, status: Starting, event: GroupFormed) -> None:
    """A worker of a group that is started is a member: when all are, the job trains.

    Args:
        event: of the member that came last, with the epoch and step that it goes on from.
    """
    group = status.group
    if any(worker.formed != group.version for worker in job.group_workers()):
        return
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "formed", event)
    account = job.accounting
    account.started_s = ctx.now - account.since
    account.rescales += status.resumes
    ctx.totals.rescales += status.resumes
    job.attempts.recoveries = 0
    why = trains_on(group)
    if event.step:
        why += f", resumed after epoch {event.epoch}, step {event.step}"
    detail: Detail = {"slots": len(group.members), "epoch": event.epoch}
    if ctx.state.rules:
        detail["batch"] = group.global_batch
    running = Running(group=group, script=status.script)
    ctx.advance(job, JobTrigger.GROUP_FORMED, running, why, detail)
    ctx.send(job)
    ctx.ask = True


def on_worker_exited(
    ctx: HandlerContext, job: Job, status: Starting, event: WorkerExited, was: WorkerPhase
) -> None:
    """A worker of a group that is started ended; the group cannot do without it.

    A script that ends without having come to an epoch has trained nothing. Alone it may be what
    its user wanted; several would train apart, each for itself, so that is a failure. One that was
    a member has trained with the others, whose node may not have told of it yet.

    Args:
        job: that is started: it starts again, fails, ends, or waits for the others.
        was: where the worker stood before.
    """
    cause, why = exit_cause(event, status.script, job.progress.epoch)
    if cause is ExitCause.LOST:
        restart_from_checkpoint(ctx, job, why)
        return
    job.attempts.exit_code = 128 + event.signal if event.signal is not None else event.code
    if cause is ExitCause.FAILED:
        fail(ctx, job, why)
    elif was in {WorkerPhase.ORDERED, WorkerPhase.STARTED} and job.progress.checkpoint is None:
        _end_untrained(ctx, job, status, why)
    elif all(worker.phase is WorkerPhase.EXITED for worker in job.group_workers()):
        end(ctx, job, JobTrigger.FINISHED, why)
    else:
        form_when_ready(ctx, job, status)


def _end_untrained(ctx: HandlerContext, job: Job, status: Starting, why: str) -> None:
    slots = len(status.group.members)
    if slots == 1:
        why = f"nothing was trained: {why} and never came to agent.epochs of elastic.ScalingAgent"
        end(ctx, job, JobTrigger.FINISHED, why)
    elif any(worker.phase is WorkerPhase.READY for worker in job.group_workers()):
        fail(ctx, job, ENDED_ALONE)
    else:
        never = "never came to agent.epochs, which joins them"
        why = f"nothing was trained: {why} on one of its {slots} slots and {never}"
        where = f"`ones init {job.spec.script}` says where"
        fail(ctx, job, f"{why}; on all it needs: {SIX_LINES}; {where}; or ask for slots = [1, 1]")


def on_start_expired(ctx: HandlerContext, event: StartExpired) -> None:
    """A group did not form in time.

    A script that runs is waited for, however long: it may prepare its data before it loads. One
    that raised is not: a thread of it may go on.

    Args:
        event: the job, and the version that was waited for. Nothing happens if that wait is over.
    """
    job = ctx.state.jobs.get(event.job)
    deadline = ctx.state.deadlines.starts.get(event.job)
    if job is None or deadline is None or deadline.version != event.version:
        return
    status = job.status
    raised = status.script.error if isinstance(status, Starting) and ctx.state.rules else ""
    started = any(worker.phase is WorkerPhase.STARTED for worker in job.group_workers())
    if started and not raised:
        ctx.state.deadlines.expect_start(event.job, event.version, ctx.now)
        return
    late = f"its script did not come to its first epoch within {START_LIMIT_S:.0f} s"
    fail(ctx, job, raised or late)
