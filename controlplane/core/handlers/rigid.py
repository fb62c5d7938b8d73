"""Handler of exits of rigid jobs, whose programs do not use the library.

All workers of such a job start together, run until they exit, and are stopped with TERM. One lost
worker ends the whole group. An exit that follows TERM belongs to whoever sent TERM, whatever its
code. Any other exit is the program's result.
"""

from __future__ import annotations

import signal

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import end, fail, restart_from_checkpoint, suspended
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Rescaling, WithGroup
from controlplane.core.model.worker import (
    ExitCause,
    Worker,
    WorkerPhase,
    exit_cause,
    shell_exit_code,
)
from schemas.wire.agent import SUSPEND, WorkerExited


def on_worker_exited(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerExited) -> None:
    """Handle the exit of a worker that the core had not dismissed."""
    status = job.status
    if not isinstance(status, WithGroup):
        return
    leaves = isinstance(status, Rescaling) and status.change.kind == SUSPEND
    if leaves and event.asked:
        _pause_when_empty(ctx, job)
        return
    cause, reason = _result(status, worker, event)
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


def _result(status: WithGroup, worker: Worker, event: WorkerExited) -> tuple[ExitCause, str]:
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
