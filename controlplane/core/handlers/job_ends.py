"""A job loses its group: it starts again from its checkpoint, is tried again, or ends."""

from __future__ import annotations

from typing import Final

from controlplane.core.deadlines import pause_before
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import departures
from controlplane.core.inputs import OrderTooLarge
from controlplane.core.model.batch_limit import lower_local_limit
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import (
    NEXT,
    Ended,
    JobTrigger,
    Paused,
    Phase,
    Starting,
    WithGroup,
)
from controlplane.core.model.worker import WorkerPhase, WorkerTrigger
from schemas.ids import NodeId, Seconds, Version, node_of
from schemas.messages.feed import Detail

MAX_LOSSES: Final = 8  # groups lost in a row without a finished epoch between
_ENDS: Final = {
    JobTrigger.FINISHED: Phase.SUCCEEDED,
    JobTrigger.GAVE_UP: Phase.FAILED,
    JobTrigger.CANCELLED: Phase.CANCELLED,
    JobTrigger.REJECTED: Phase.REJECTED,
}


def restart_from_checkpoint(ctx: HandlerContext, job: Job, why: str) -> None:
    """Nobody has the state any more: start again from the last checkpoint.

    Args:
        job: that lost its group. It fails for good at `MAX_LOSSES` losses without an epoch between,
            and at the first if its user wants that and its script has begun.
        why: in words, for users; what follows is added to it.
    """
    job.attempts.losses += 1
    if job.spec.fails_when_lost and any(w.pid is not None for w in job.group_workers()):
        end(ctx, job, JobTrigger.GAVE_UP, f"{why}; on_loss = fail")
        return
    if job.attempts.losses >= MAX_LOSSES:
        why = f"{why}, for the {MAX_LOSSES}th time without an epoch"
        end(ctx, job, JobTrigger.GAVE_UP, why)
        return
    epoch = job.progress.epoch
    again = f"resumes after epoch {epoch}" if job.progress.checkpoint else "starts again"
    if job.sweep is not None:
        again = "finished units are kept"
    withdraw(ctx, job, "lost", JobTrigger.GROUP_LOST, f"{why}; {again}")


def fail(ctx: HandlerContext, job: Job, why: str) -> None:
    """The script failed: try again while retries are left.

    A share that did not fit its slot is no failure of the script: it is tried again with less.

    Args:
        job: whose script failed. It ends if no retry is left; else it is tried again after a pause.
        why: in words, for users; what follows is added to it.
    """
    if lower_local_limit(job, why):
        why = f"{why}; tried again with at most {job.progress.fits} samples on a slot"
        withdraw(ctx, job, "failed", JobTrigger.SCRIPT_FAILED, why)
        return
    attempts = job.attempts
    attempts.failures += 1
    if isinstance(job.status, WithGroup) and job.status.script.refused:
        again = "; not tried again: it would be refused again" if job.spec.retries else ""
        end(ctx, job, JobTrigger.GAVE_UP, why + again)
        return
    if job.failing_is_final:
        tried = f" (try {attempts.failures} of {attempts.failures})" if job.spec.retries else ""
        end(ctx, job, JobTrigger.GAVE_UP, why + tried)
        return
    pause_s = pause_before(attempts.failures)
    attempts.start_at = Seconds(ctx.now + pause_s)
    left = job.spec.retries - attempts.failures + 1
    why = f"{why}; tried again in {pause_s:.0f} s, {left} left"
    withdraw(ctx, job, "failed", JobTrigger.SCRIPT_FAILED, why)


def withdraw(ctx: HandlerContext, job: Job, outcome: str, trigger: JobTrigger, why: str) -> None:
    """Take the job's group away, and notify its nodes; it waits for another.

    Args:
        outcome: of the group, for its history.
    """
    resumes = isinstance(job.status, Starting) and job.status.resumes
    nodes = _dismiss(ctx, job, outcome)
    ctx.move(job, trigger, Paused(suspended=resumes), why)
    ctx.send_to(job, nodes)
    ctx.announce_phase(job)
    ctx.ask = True


def end(
    ctx: HandlerContext, job: Job, trigger: JobTrigger, why: str, more: Detail | None = None
) -> None:
    """The job is over: nothing of it may run anywhere.

    Args:
        job: that has not ended.
        trigger: finished, gave up, cancelled or rejected.
        more: numbers for programs, beside its exit code and epoch.
    """
    ended: Detail = {"exit_code": job.attempts.exit_code, "epoch": job.progress.epoch}
    detail: Detail = {**ended, **(more or {})}
    nodes = dict.fromkeys([*_dismiss(ctx, job, trigger.value), *job.nodes])
    ctx.advance(job, trigger, Ended(phase=_ENDS[trigger]), why, detail)
    ctx.totals.job_ended(job, ctx.now)
    del ctx.state.active[job.job]
    ctx.state.overrides.pop(job.job, None)
    job.override, job.override_waits = None, ""
    ctx.send_to(job, nodes)
    _let_go_of_sweep(ctx, job)
    forget_exited(ctx, job)
    ctx.ask = True


def _let_go_of_sweep(ctx: HandlerContext, job: Job) -> None:
    """Nodes may forget a sweep that has ended when the last job that was its trial has ended."""
    trial = job.spec.stated_trial
    former = ctx.state.jobs.get(trial.sweep) if trial is not None else None
    if former is not None and former.ended and former.sweep is not None:
        ctx.send_to(former, dict.fromkeys([*former.nodes, *former.sweep.told]))


def on_order_too_large(ctx: HandlerContext, event: OrderTooLarge) -> None:
    """A node cannot be told what to run of a job: the job fails, and nobody else notices.

    Args:
        event: the job, and how large it was. Nothing happens to a job that holds no slots by now.
    """
    job = ctx.state.jobs.get(event.job)
    if job is None or (job.phase, JobTrigger.GAVE_UP) not in NEXT:
        return
    why = f"its orders to {event.node} take {event.size} bytes, a message at most {event.most}"
    remedy = "put large args, env and choices into files of the working directory"
    end(ctx, job, JobTrigger.GAVE_UP, f"{why}: {remedy}")


def _dismiss(ctx: HandlerContext, job: Job, outcome: str) -> list[NodeId]:
    """Order every worker to stop; returns the nodes to notify."""
    ctx.conclude(job, outcome)
    job.version = Version(job.version + 1)
    if job.group is not None:
        job.progress.last_batch = job.group.global_batch
    ctx.state.deadlines.clear(job.job)
    for worker in job.workers.values():
        if worker.phase not in {WorkerPhase.LEAVING, WorkerPhase.EXITED}:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    return list(dict.fromkeys(node_of(worker.slot) for worker in job.workers.values()))


def forget_exited(ctx: HandlerContext, job: Job) -> None:
    """Forget processes that have exited, but for those that a group still counts on.

    Args:
        job: it is changed in place; without a process left, it is off the list of those that have
            any.
    """
    counted = {member.worker for member in job.members()}
    job.workers = {
        name: worker
        for name, worker in job.workers.items()
        if worker.phase is not WorkerPhase.EXITED or name in counted
    }
    if not job.workers:
        ctx.state.jobs_with_processes.pop(job.job, None)
        departures.may_leave(ctx, job)
