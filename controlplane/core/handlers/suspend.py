"""A job gives up its slots as it was asked to; its state is in a checkpoint."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.group_orders import nodes_of
from controlplane.core.handlers.job_ends import forget_exited
from controlplane.core.model import rescale as rescales
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Paused, Rescaling
from controlplane.core.model.rescale import RescalePhase, RescaleTrigger
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from schemas.groups import ResumePoint
from schemas.messages.agent import SUSPEND, Suspended


def on_suspended(ctx: HandlerContext, job: Job, worker: Worker, event: Suspended) -> None:
    """The state is in a checkpoint; all workers are about to exit.

    Args:
        job: nothing happens unless it changes, and is to give up its slots.
        event: the version of the change, and the epoch, step and samples that the checkpoint holds.
    """
    status = job.status
    if not isinstance(status, Rescaling) or event.group != status.change.group.version:
        return
    change = status.change
    if change.kind != SUSPEND or change.phase is not RescalePhase.SWITCHING:
        ctx.ignore(job, worker, "was suspended")
        return
    rescales.advance(job.job, change, RescaleTrigger.FORMED)
    progress, attempts = job.progress, job.attempts
    if job.sweep is None:  # its states are its own
        progress.checkpoint = ResumePoint(epoch=event.epoch, version=event.group)
        progress.epoch, progress.step = event.epoch, event.step
        progress.samples_done = event.samples_done
    progress.last_batch = status.group.global_batch
    attempts.losses, attempts.changes, attempts.recoveries = 0, 0, 0
    job.accounting.rescales += 1
    ctx.totals.rescales += 1
    for one in job.workers.values():
        if one.phase is WorkerPhase.MEMBER:
            ctx.advance_worker(job, one, WorkerTrigger.RETIRED)
        elif one.phase not in {WorkerPhase.EXITED, WorkerPhase.LEAVING, WorkerPhase.RETIRING}:
            ctx.advance_worker(job, one, WorkerTrigger.DISMISSED)
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "suspended")
    where = f"at step {event.step}" if job.sweep is None else "its workers end their units"
    why = f"{change.why}, {where}"
    ctx.advance(job, JobTrigger.SUSPENDED, Paused(suspended=True), why, {"epoch": event.epoch})
    ctx.send_to(job, dict.fromkeys([*nodes_of(status.group), *change.notified_nodes]))
    forget_exited(ctx, job)
    ctx.ask = True
