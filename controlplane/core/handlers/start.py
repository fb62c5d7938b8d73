"""Handlers that start a job's group, and helpers that build and record groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import (
    blame_node,
    clear_strikes,
    end,
    fail,
    restart_from_checkpoint,
)
from controlplane.core.history import GroupOrdered
from controlplane.core.inputs import StartExpired
from controlplane.core.model.job import Job, SpeedPromise
from controlplane.core.model.job_phases import JobTrigger, Paused, Running, Starting
from controlplane.core.model.worker import (
    ExitCause,
    Worker,
    WorkerPhase,
    data_problem,
    exceeds_limit,
    exit_cause,
    shell_exit_code,
)
from controlplane.core.state import START_LIMIT_S
from controlplane.policy.api import Reason
from schemas.ids import NodeId, Rank, SlotId, Version, WorkerId, is_place, node_of, worker_id
from schemas.nodes import Group, Member, ResumePoint
from schemas.wire.agent import START, GroupFormed, WorkerExited
from schemas.wire.client import Decision, Size, VersionInfo
from schemas.wire.feed import Detail

POLICY: Final = "policy"  # POLICY, OPERATOR and CLUSTER are the authors of decisions
OPERATOR: Final = "operator"
CLUSTER: Final = "cluster"


def make_group(
    job: Job,
    version: Version,
    rows: Sequence[tuple[WorkerId, SlotId, int]],
    resume: ResumePoint | None = None,
) -> Group:
    """Return a new group of `job`, without ordering the group.

    Args:
        rows: process, slot and local batch (samples per step) of each member, in rank order.
        resume: checkpoint from which the group starts.
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
    """Split a global batch over workers as equally as possible, larger parts first.

    Return the id, slot and local batch (samples per step) of each worker, in the given order.
    """
    share, more = divmod(batch, len(workers))
    return [
        (worker.worker, worker.slot, share + (rank < more)) for rank, worker in enumerate(workers)
    ]


def add_workers(job: Job, members: Sequence[Member], version: Version) -> None:
    """Add a worker to `job` for each new member of group `version`. Record the members' nodes."""
    for member in members:
        job.workers[member.worker] = Worker(
            worker=member.worker,
            version=version,
            rank=member.rank,
            slot=member.slot,
            local_batch=member.local_batch,
        )
        job.nodes[node_of(member.slot)] = None


def record_order(
    ctx: HandlerContext, job: Job, group: Group, kind: str, reason: Reason, *, by: str
) -> None:
    """Record the order of `group`. Call this before `job` moves to the phase with this group.

    `kind` is start, join, recover or suspend.
    """
    job.version = group.version
    job.promise = _promise(group.version, reason.numbers)
    slots = tuple(member.slot for member in group.members)
    decision = Decision(
        time=ctx.now,
        before=Size() if kind == START else job.size,
        to=Size(slots=slots, batch=group.global_batch),
        reason=reason.text,
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
    return SpeedPromise(version=version, speed_before=now, speed_expected=then)


def names_of(group: Group) -> list[WorkerId]:
    """Return the worker ids of a group in rank order. The group of a suspension is empty."""
    return [member.worker for member in group.members]


def nodes_of(group: Group | None) -> list[NodeId]:
    """Return the node of each member in rank order, with repetitions; [] without a group."""
    return [node_of(member.slot) for member in group.members] if group else []


def trains_on(group: Group) -> str:
    """Return a text with the number of slots and the global batch of a training group."""
    slots = len(group.members)
    return f"trains on {slots} slot{'s' * (slots != 1)}, batch {group.global_batch}"


def runs_on(group: Group) -> str:
    """Return a text with the number of slots of a rigid job."""
    if any(is_place(member.slot) for member in group.members):
        return "runs without slots"
    return f"runs on {len(group.members)} slot{'s' * (len(group.members) != 1)}"


ENDED_ALONE: Final = "the script exited on one slot while another slot waited for it"
OTHER_KINDS: Final = 'kind = "torchrun" (a process on each slot) or kind = "command" (once)'


def start(
    ctx: HandlerContext,
    job: Job,
    placed: Mapping[SlotId, int],
    reason: Reason,
    by: str = POLICY,
) -> None:
    """Order a group for a job without a group. Training resumes from the checkpoint, if any.

    Args:
        placed: slot -> local batch (samples per step), in rank order. Each slot is free, or its
            owner leaves it in a swap while the new worker is prepared. A slot of a rigid job
            with batch 0 stays empty as long as the job has workers on its node.
    """
    version = job.next_version
    checkpoint = job.progress.checkpoint
    rows = [
        (worker_id(job.job, version, Rank(rank)), slot, batch)
        for rank, (slot, batch) in enumerate((s, b) for s, b in placed.items() if b)
    ]
    group = make_group(job, version, rows, checkpoint)
    owners = ctx.state.slot_index.owners()
    add_workers(job, group.members, version)
    empty = [slot for slot, batch in placed.items() if not batch]
    for member in group.members:
        worker = job.workers[member.worker]
        worker.reserved = member.slot in owners
        worker.beside = tuple(slot for slot in empty if node_of(slot) == node_of(member.slot))
    record_order(ctx, job, group, START, reason, by=by)
    job.override_wait_reason, job.attempts.exit_code = "", None
    ctx.state.slot_index.job_starts(job.job)
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
    """Order the group to form once all workers are ready.

    If a worker has exited while another worker is ready and waits for it, or if workers have other
    data, fail the job.
    """
    if status.forming:
        return
    workers = job.group_workers()
    phases = {worker.phase for worker in workers}
    if phases == {WorkerPhase.READY}:
        problems = filter(None, (data_problem(worker, workers[0]) for worker in workers))
        if problem := next(problems, ""):
            fail(ctx, job, problem)
            return
        status.forming = True
        ctx.send(job)
    elif phases >= {WorkerPhase.READY, WorkerPhase.EXITED}:
        fail(ctx, job, ENDED_ALONE)


def on_group_formed(ctx: HandlerContext, job: Job, status: Starting, event: GroupFormed) -> None:
    """Set the job to running once every worker of the starting group is a member.

    `event` is the report of the last member, with the position from which the group resumes.
    """
    group = status.group
    if any(worker.group_version != group.version for worker in job.group_workers()):
        return
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "formed", event)
    account = job.accounting
    account.last_start_s = ctx.now - account.since
    account.rescales += status.resumes
    ctx.totals.rescales += status.resumes
    job.attempts.recoveries = 0
    why = runs_on(group) if job.spec.rigid else trains_on(group)
    if empty := len({slot for one in job.group_workers() for slot in one.beside}):
        why += f", keeps {empty} empty"
    if event.step:
        why += f", resumed after epoch {event.epoch}, step {event.step}"
    detail: Detail = {
        "slots": len(group.members),
        "epoch": event.epoch,
        "batch": group.global_batch,
    }
    clear_strikes(ctx, nodes_of(group))
    running = Running(group=group, script=status.script)
    ctx.advance(job, JobTrigger.GROUP_FORMED, running, why, detail)
    ctx.send(job)
    ctx.plan_needed = True


def on_worker_exited(
    ctx: HandlerContext, job: Job, status: Starting, event: WorkerExited, was: WorkerPhase
) -> None:
    """Handle the exit of a worker of a starting group, which cannot form without this worker.

    A script that exits before its first epoch has trained nothing. On one slot the job succeeds,
    because the user may want this. On several slots the job fails, because its workers would train
    separately. A worker that was a member has trained with the others, even if their nodes have not
    reported this yet.

    `was` is the phase of the worker before its exit.
    """
    cause, why = exit_cause(event, status.script, job.progress.epoch)
    if cause is ExitCause.LOST:
        restart_from_checkpoint(ctx, job, why)
        return
    job.attempts.exit_code = shell_exit_code(event)
    if cause is ExitCause.FAILED:
        worker = job.workers.get(worker_id(event.job, event.version, event.rank))
        if (
            worker is None
            or exceeds_limit(event)
            or not blame_node(ctx, job, node_of(worker.slot), why)
        ):
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
        why = f"nothing was trained: {why} and never reached agent.epochs of elastic.ScalingAgent"
        why += '; kind = "command" is for other programs'
        end(ctx, job, JobTrigger.FINISHED, why)
    elif any(worker.phase is WorkerPhase.READY for worker in job.group_workers()):
        fail(ctx, job, ENDED_ALONE)
    else:
        never = "never reached agent.epochs, which joins the processes"
        why = f"nothing was trained: {why} on one of its {slots} slots and {never}"
        port = f"`ones init {job.spec.script}` shows the lines to change"
        fail(ctx, job, f"{why}; {port}; unchanged it runs as {OTHER_KINDS}")


def on_start_expired(ctx: HandlerContext, event: StartExpired) -> None:
    """Fail a job because its group did not form in time.

    If a script still runs, restart the deadline instead, because the script may be preparing data.
    A script that raised gets no more time, because one of its threads may keep the process alive.
    """
    job = ctx.state.jobs.get(event.job)
    deadline = ctx.state.deadlines.starts.get(event.job)
    if job is None or deadline is None or deadline.version != event.version:
        return
    status = job.status
    raised = status.script.error if isinstance(status, Starting) else ""
    started = any(worker.phase is WorkerPhase.STARTED for worker in job.group_workers())
    if started and not raised:
        ctx.state.deadlines.expect_start(event.job, event.version, ctx.now)
        return
    late = f"the script did not reach its first epoch within {START_LIMIT_S:.0f} s"
    fail(ctx, job, raised or late)
