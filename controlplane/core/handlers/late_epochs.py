"""Epochs whose reports come when the group that trained them is lost.

The network, or an agent, was away: the epochs are finished, their checkpoints durable, and the
node reports them when it is back. Those that the job goes on from are part of it. Those of a group
that was given up, which trained on beside its successor, are not.
"""

from __future__ import annotations

from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.training_epochs import epoch_info, take_over, tell
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Paused, Starting
from controlplane.core.model.noise_scale import first_noise_scale
from schemas.groups import ResumePoint
from schemas.messages.agent import EpochReported

KEPT_LATE: Final = 1000  # reports that wait; more only come of a node that makes them up


def on_late_epoch(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """A worker that the job has no more reports an epoch.

    Args:
        ctx: of this input.
        job: that it trained. One without a group is where the epoch ended; one that starts will say
            what it goes on from; else the epoch counts if the job went on from it.
        event: what the epoch came to.
    """
    progress = job.progress
    if event.epoch in progress.unheard:
        _fill(ctx, job, event)
    elif isinstance(job.status, Paused | Starting) and _follows(job, event):
        if len(progress.late) < KEPT_LATE:
            progress.late.append(event)
        if isinstance(job.status, Paused):
            _go_on(ctx, job)


def on_resumed(ctx: HandlerContext, job: Job, epoch: int) -> None:
    """A worker says what the job goes on from.

    Args:
        ctx: of this input.
        job: that starts.
        epoch: the last finished one, as its checkpoint says: the one that the job knew, or a later
            one of that group or of one that went on from it.
    """
    progress, point = job.progress, job.progress.checkpoint
    if point is not None and epoch > point.epoch:
        progress.unheard += range(max(progress.epoch, epoch - KEPT_LATE) + 1, epoch + 1)
        progress.epoch = epoch
        progress.checkpoint = ResumePoint(epoch=epoch, version=point.version)
    late, progress.late = progress.late, []
    for event in late:
        if event.epoch in progress.unheard:
            _fill(ctx, job, event)


def _follows(job: Job, event: EpochReported) -> bool:
    """Whether it may be of the group whose checkpoint the job goes on from, or of a later one."""
    point = job.progress.checkpoint
    known = event.epoch <= job.progress.epoch
    return not known and (point is None or event.group >= point.version)


def _go_on(ctx: HandlerContext, job: Job) -> None:
    """Nobody trains, so the job is where its last group came to."""
    progress = job.progress
    for event in sorted(progress.late, key=lambda report: report.epoch):
        if event.epoch == progress.epoch + 1:
            progress.unheard.append(event.epoch)
            progress.epoch = event.epoch
            progress.late.remove(event)
            _fill(ctx, job, event)
            job.attempts.losses = 0


def _fill(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    progress = job.progress
    progress.unheard.remove(event.epoch)
    noise_scale = first_noise_scale(event.metrics.get("noise_scale"), event.noise_scale)
    if event.epoch == progress.epoch:
        take_over(progress, event, noise_scale, ctx.now)
    info = epoch_info(event, (), ctx.now, whole=False, noise_scale=noise_scale)
    tell(ctx, job, event, info)
    ctx.changed_jobs[job.job] = None
    ctx.ask = True
