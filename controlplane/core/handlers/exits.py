"""Handlers of processes that exited, could not be started, or never started."""

from __future__ import annotations

import signal

from controlplane.core.handler_context import HandlerContext, place
from controlplane.core.handlers import epochs, start
from controlplane.core.handlers.lifecycle import (
    end,
    fail,
    forget_exited,
    restart_from_checkpoint,
    suspended,
)
from controlplane.core.handlers.recovery import STOPPING, abandon, recover, rejoin_when_quiesced
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import (
    JobTrigger,
    Rescaling,
    Running,
    ScriptReports,
    Starting,
    WithGroup,
)
from controlplane.core.model.node import Node
from controlplane.core.model.rescale import Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import (
    ExitCause,
    Worker,
    WorkerPhase,
    WorkerTrigger,
    exit_cause,
    shell_exit_code,
)
from schemas.ids import SlotId, node_of
from schemas.wire.agent import RECOVER, SUSPEND, JobCleared, WorkerExited, WorkerRefused
from schemas.wire.feed import Detail


def grant_reserved_slot(ctx: HandlerContext, slot: SlotId) -> None:
    """Give a slot without an owner to the worker that was prepared for the slot, if any."""
    index = ctx.state.slot_index
    reservation = index.reservations().get(slot)
    if reservation is not None and slot not in index.owners():
        job, worker = reservation
        worker.reserved = False
        index.touch(job.job)


def on_worker_exited(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerExited) -> None:
    """Handle the exit of a process, and free its slot.

    The event has an exit code or a signal. It has neither if the node only saw that the process is
    gone.
    """
    phase_before = worker.phase
    if phase_before is WorkerPhase.EXITED:
        return
    ctx.advance_worker(job, worker, WorkerTrigger.EXITED)
    grant_reserved_slot(ctx, worker.slot)
    detail: Detail = {**place(worker), "code": event.code, "signal": event.signal}
    ctx.announce("worker.exited", job, detail)
    status = job.status
    left = phase_before in {WorkerPhase.RETIRING, WorkerPhase.LEAVING}
    if not left and event.code != 0 and not _is_recovering(job):
        _count_crash(job, worker)
    if job.sweep is not None and phase_before is not WorkerPhase.LEAVING:
        cause, reason = exit_cause(event, ScriptReports(), 0)
        job.sweep.exits[worker.worker] = (reason, cause is not ExitCause.LOST)
    if job.spec.rigid:
        if phase_before is not WorkerPhase.LEAVING:
            _on_rigid_exit(ctx, job, worker, event)
    elif isinstance(status, Starting) and not left:
        start.on_worker_exited(ctx, job, status, event, phase_before)
    elif isinstance(status, Rescaling) and status.change.phase is RescalePhase.QUIESCING:
        _continue_quiescing(ctx, job, status, worker, event, left=left)
    elif isinstance(status, Running | Rescaling) and not left:
        _handle_unexpected_exit(ctx, job, status, worker, event)
    forget_exited(ctx, job)
    ctx.plan_needed = True


def _is_recovering(job: Job) -> bool:
    return job.change is not None and job.change.kind == RECOVER


def _count_crash(job: Job, worker: Worker) -> None:
    crashes = job.attempts.crashes_by_node
    crashes[node_of(worker.slot)] = crashes.get(node_of(worker.slot), 0) + 1


def on_worker_refused(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerRefused) -> None:
    """Handle a process that its node could not start.

    If the worker is in the job's group, the job fails, or restarts if the node is at fault. If the
    worker is a newcomer, the change is abandoned.
    """
    reason = f"{event.error}; {event.hint}" if event.hint else event.error
    phase_before = worker.phase
    ctx.advance_worker(job, worker, WorkerTrigger.EXITED)
    grant_reserved_slot(ctx, worker.slot)
    if job.group is not None and phase_before not in {WorkerPhase.LEAVING, WorkerPhase.EXITED}:
        change = job.change
        if job.group.member(worker.worker) is not None:
            if event.node_fault:
                _count_crash(job, worker)
                restart_from_checkpoint(ctx, job, f"node {node_of(worker.slot)}: {reason}")
            else:
                fail(ctx, job, reason)
        elif change is not None and change.group.member(worker.worker) is not None:
            reason = f"a newcomer could not start: {reason}"
            abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, reason)
    forget_exited(ctx, job)
    ctx.plan_needed = True


def on_job_cleared(ctx: HandlerContext, job: Job, node: Node, event: JobCleared) -> None:
    """Mark workers as exited if they were cancelled before they started. They report no exit.

    The node has no process of the job that is older than `event.version`, except members of the
    job's group. A worker with a process id has started, so its exit will be reported separately.
    """
    members = {member.worker for member in job.members()}
    for worker in job.workers.values():
        cleared = node_of(worker.slot) == node.node and worker.version < event.version
        if cleared and worker.pid is None and worker.worker not in members:
            ctx.advance_worker(job, worker, WorkerTrigger.EXITED)
            grant_reserved_slot(ctx, worker.slot)
    forget_exited(ctx, job)
    ctx.plan_needed = True


def _continue_quiescing(
    ctx: HandlerContext,
    job: Job,
    status: Rescaling,
    worker: Worker,
    event: WorkerExited,
    *,
    left: bool,
) -> None:
    """Handle the exit of a worker while the survivors quiesce.

    Other members may report the broken group before the node reports the exit. If the script failed
    and no other member was lost before, this exit has broken the group, and the job fails.
    """
    cause, reason = _cause(job, status, event)
    others = [one.phase for one in job.group_workers() if one is not worker]
    broke = cause is ExitCause.FAILED and not left and STOPPING.isdisjoint(others)
    if _state_is_lost(job, status):
        _handle_last_exit(ctx, job, status, event)
    elif broke:
        job.attempts.exit_code = shell_exit_code(event)
        fail(ctx, job, reason)
    else:
        rejoin_when_quiesced(ctx, job, status.change)


def _handle_unexpected_exit(
    ctx: HandlerContext,
    job: Job,
    status: Running | Rescaling,
    worker: Worker,
    event: WorkerExited,
) -> None:
    """Handle the exit of a worker that was not ordered to stop."""
    change = status.change
    cause, reason = _cause(job, status, event)
    incumbent = status.group.member(worker.worker) is not None
    stays = change is not None and change.group.member(worker.worker) is not None
    if _state_is_lost(job, status):
        _handle_last_exit(ctx, job, status, event)
    elif not incumbent and (change is None or change.kind != RECOVER):
        # A finished script may exit before its node reports that it has joined.
        if stays and not (cause is ExitCause.DONE and _is_switching(change)):
            error = reason if cause is not ExitCause.DONE else "it exited"
            abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, f"a newcomer was lost: {error}")
    elif cause is ExitCause.FAILED:
        job.attempts.exit_code = shell_exit_code(event)
        fail(ctx, job, reason)
    elif change is not None and change.phase is RescalePhase.REJOINING:
        recover(ctx, job, reason)  # for any cause: the other members wait for this worker
    elif cause is ExitCause.LOST and (stays or not _is_switching(change)):
        recover(ctx, job, reason)
    elif cause is ExitCause.DONE:
        job.attempts.exit_code = event.code


def _handle_last_exit(
    ctx: HandlerContext, job: Job, status: Running | Rescaling, event: WorkerExited
) -> None:
    """End, fail or restart a job after an exit that leaves no worker with the training state."""
    change = status.change
    cause, reason = _cause(job, status, event)
    job.attempts.exit_code = shell_exit_code(event)
    expected = _is_switching(change) or (change is not None and change.kind == RECOVER)
    if cause is ExitCause.DONE and (status.script.finished or not expected):
        epochs.record_last_epochs(ctx, job)
        end(ctx, job, JobTrigger.FINISHED, reason)
    elif cause is ExitCause.FAILED:
        fail(ctx, job, reason)
    else:
        restart_from_checkpoint(ctx, job, reason)


def _cause(job: Job, status: Running | Rescaling, event: WorkerExited) -> tuple[ExitCause, str]:
    """Return the cause of an exit and the reason as text.

    In a sweep, an exit is a loss unless the script has reported an error.
    """
    cause, reason = exit_cause(event, status.script, job.progress.epoch)
    if job.sweep is not None and not status.script.error:
        return ExitCause.LOST, reason
    return cause, reason


def _state_is_lost(job: Job, status: Running | Rescaling) -> bool:
    """True if no remaining worker can have the training state.

    A newcomer has the state only after it has joined. In a recovery, members of the new group may
    have the state, too.
    """
    holders = status.group.members
    if status.change is not None and status.change.kind == RECOVER:
        holders = (*holders, *status.change.group.members)
    names = {member.worker for member in holders}
    return not any(
        worker.phase is WorkerPhase.MEMBER
        or (
            worker.worker in names and worker.phase not in {WorkerPhase.EXITED, WorkerPhase.LEAVING}
        )
        for worker in job.workers.values()
    )


def _is_switching(change: Rescale | None) -> bool:
    """True while the group switches. Members that the change removes may exit meanwhile."""
    return change is not None and change.phase is RescalePhase.SWITCHING


def _on_rigid_exit(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerExited) -> None:
    """Handle the exit of a program that does not use the library.

    All workers of such a job start together, run until they exit, and are stopped with TERM. One
    lost worker ends the whole group. An exit that follows TERM belongs to whoever sent TERM,
    whatever its code. Any other exit is the program's result.
    """
    status = job.status
    if not isinstance(status, WithGroup):
        return
    leaves = isinstance(status, Rescaling) and status.change.kind == SUSPEND
    if leaves and event.asked:
        _pause_when_empty(ctx, job)
        return
    cause, reason = _program_end(status, worker, event)
    if cause is ExitCause.FAILED:
        job.attempts.exit_code = shell_exit_code(event)
        fail(ctx, job, reason)
    elif cause is ExitCause.LOST:
        restart_from_checkpoint(ctx, job, reason)
    elif _is_complete(job, worker):
        job.attempts.exit_code = 0
        end(ctx, job, JobTrigger.FINISHED, "exit code 0")
    elif leaves:
        _pause_when_empty(ctx, job)


def _program_end(status: WithGroup, worker: Worker, event: WorkerExited) -> tuple[ExitCause, str]:
    """Return the cause of an exit and its text.

    A signal is the program's own failure, except TERM: its host shut down, or lost the controller.
    """
    cause, reason = exit_cause(event, status.script, 0)
    who = f"rank {worker.rank}" if len(status.group.members) > 1 else "the program"
    if cause is ExitCause.FAILED and event.code is not None and not status.script.error:
        more = reason.partition("; ")[2]
        reason = f"{who} ended with exit code {event.code}{f'; {more}' if more else ''}"
    elif event.signal not in {None, signal.SIGTERM}:
        cause, reason = ExitCause.FAILED, reason.replace("a worker", who)
    return cause, reason


def _is_complete(job: Job, worker: Worker) -> bool:
    """True if an exit with code 0 ends the job: that of its only program, or of the last rank."""
    if job.spec.single:
        return worker.rank == 0
    return all(one.phase is WorkerPhase.EXITED for one in job.group_workers())


def _pause_when_empty(ctx: HandlerContext, job: Job) -> None:
    status = job.status
    if not isinstance(status, Rescaling):
        return
    if all(one.phase is WorkerPhase.EXITED for one in job.group_workers()):
        took_s = ctx.now - status.change.started_at
        suspended(ctx, job, status, f"{status.change.reason}, ended {took_s:.1f} s after the order")
