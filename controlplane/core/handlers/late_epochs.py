"""Epochs whose reports come when the group that trained them is lost.

The network, or an agent, was away: the epochs are finished, their checkpoints durable, and the
node reports them when it is back. Those that the job goes on from are part of it, be it in new
processes or in those that are left of the group. Those of a group that was given up, which trained
on beside its successor, are not.
"""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.training_epochs import KEPT_LATE, go_on_from, hear_late
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Paused, Rescaling, Running, Starting
from schemas.groups import ResumePoint
from schemas.messages.agent import EpochReported


def on_late_epoch(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """A worker that the job has no more reports an epoch.

    Args:
        job: that it trained. One without a group is where the epoch ended; one that starts will say
            what it goes on from, the next epoch of one that runs shows it; else the epoch counts
            if the job went on from it.
    """
    progress = job.progress
    if event.epoch in progress.unheard:
        hear_late(ctx, job, event)
    elif _follows(job, event):
        if len(progress.late) < KEPT_LATE:
            progress.late.append(event)
        if isinstance(job.status, Paused):
            _go_on(ctx, job)


def on_resumed(ctx: HandlerContext, job: Job, epoch: int) -> None:
    """A worker says what the job goes on from.

    Args:
        epoch: the last finished one, as its checkpoint says: the one that the job knew, or a later
            one of that group or of one that went on from it.
    """
    progress, point = job.progress, job.progress.checkpoint
    if point is not None and epoch > point.epoch:
        go_on_from(progress, epoch)
        progress.epoch = epoch
        progress.checkpoint = ResumePoint(epoch=epoch, version=point.version)
    late, progress.late = progress.late, []
    for event in late:
        if event.epoch in progress.unheard:
            hear_late(ctx, job, event)


def _follows(job: Job, event: EpochReported) -> bool:
    """Whether it may be of what the job goes on from, or went on from when it recovered."""
    progress, status = job.progress, job.status
    if event.epoch <= progress.epoch:
        return False
    if isinstance(status, Running | Rescaling):  # of a group that others of its members recovered
        return any(worker.version <= event.group for worker in job.group_workers())
    point = progress.checkpoint
    return isinstance(status, Paused | Starting) and (point is None or event.group >= point.version)


def _go_on(ctx: HandlerContext, job: Job) -> None:
    """Nobody trains, so the job is where its last group came to."""
    progress = job.progress
    for event in sorted(progress.late, key=lambda report: report.epoch):
        if event.epoch == progress.epoch + 1:
            progress.unheard.append(event.epoch)
            progress.epoch = event.epoch
            progress.late.remove(event)
            hear_late(ctx, job, event)
            job.attempts.losses = 0
