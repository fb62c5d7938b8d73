"""A job finished an epoch, or its training.

Epochs whose reports come when the group that trained them is lost.

The network, or an agent, was away: the epochs are finished, their checkpoints durable, and the
node reports them when it is back. Those that the job goes on from are part of it, be it in new
processes or in those that are left of the group. Those of a group that was given up, which trained
on beside its successor, are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import sweep_orders
from controlplane.core.history import EpochFinished, SpeedMeasured
from controlplane.core.model.job import Job, Progress
from controlplane.core.model.job_phases import Paused, Rescaling, Running, Starting
from controlplane.core.model.report_bounds import believable_passes, first_noise_scale
from controlplane.core.model.worker import Worker
from schemas.ids import NodeId, Seconds, SlotId, node_of
from schemas.nodes import Group, ResumePoint
from schemas.wire.agent import EpochReported, TrainingFinished
from schemas.wire.client import EpochInfo, NodeCrowd
from schemas.wire.feed import Detail

MOST_SAMPLES: Final = 2**53  # that anybody counts; a sum of reports has to fit into a journal
KEPT_LATE: Final = 1000  # reports that wait; more only come of a node that makes them up
NOISE_SMOOTHING: Final = 0.3  # weight of the newest epoch's


def on_epoch_reported(ctx: HandlerContext, job: Job, _: Worker, event: EpochReported) -> None:
    """An epoch is finished and its checkpoint is durable.

    Args:
        job: it is changed in place.
        event: what the epoch came to; one that is known already changes nothing.
    """
    status, progress = job.status, job.progress
    group, change = status.group, status.change
    if group is None or event.epoch <= progress.epoch:
        return
    whole = _is_whole(job, group, event)
    if change is not None and change.group.version == event.group:
        group = change.group
    if whole:
        _measure_speed(ctx, job, event)
    others = _neighbours(ctx, job, group)
    beside = _crowds(group, others)  # one that came and went within the epoch is not noticed
    together = whole and beside == progress.beside and _stayed(others, progress.epoch_at)
    _hear_what_waited(ctx, job, event)
    # What the script says itself, as the metric of that name, else what was measured.
    noise_scale = first_noise_scale(event.metrics.get("noise_scale"), event.noise_scale)
    take_over(progress, event, noise_scale, ctx.now)
    progress.beside = beside
    _count_left_out(job, event)
    job.attempts.losses, job.attempts.changes = 0, 0
    slots = [member.slot for member in group.members]
    info = epoch_info(event, slots, ctx.now, whole=whole, noise_scale=noise_scale)
    info = replace(info, beside=beside if together else None)
    tell(ctx, job, event, info)
    sweep_orders.epoch_reported(ctx, job, event)
    ctx.ask = True


def tell(ctx: HandlerContext, job: Job, event: EpochReported, info: EpochInfo) -> None:
    """Put a finished epoch into the job's history, and announce it.

    Args:
        info: the same, as the history keeps it.
    """
    ctx.records.append(EpochFinished(job=job.job, epoch=info))
    detail: Detail = {
        **event.metrics,
        "epoch": event.epoch,
        "train_loss": event.train_loss,
        "samples_per_s": event.samples_per_s,
        "global_batch": event.global_batch,
        "lr": event.lr,
    }
    if event.left_early:
        detail |= {"trained_samples": event.trained_samples, "left_early": True}
    ctx.announce("job.epoch", job, detail)


def epoch_info(
    event: EpochReported,
    slots: Sequence[SlotId],
    now: Seconds,
    *,
    whole: bool,
    noise_scale: float | None,
) -> EpochInfo:
    """What a job's history keeps of an epoch.

    Args:
        slots: that it trained on; empty: not known.
        whole: one group did all of it, with one batch.
        noise_scale: what it says of that, samples.
    """
    times = believable_passes(event)
    return EpochInfo(
        epoch=event.epoch,
        time=now,
        step=event.step,
        global_batch=event.global_batch,
        lr=event.lr,
        samples_per_s=event.samples_per_s,
        train_loss=event.train_loss,
        metrics=event.metrics,
        slots=len(slots),
        nodes=len({node_of(slot) for slot in slots}),
        whole=whole,
        noise_scale=noise_scale,
        samples_done=event.samples_done,
        epoch_samples=event.epoch_samples,
        trained_samples=event.trained_samples,
        left_early=event.left_early,
        pass_s=times.pass_s,
        sync_s=times.sync_s,
        local_batch=times.local_batch,
        passes=times.passes,
    )


def on_training_finished(
    _ctx: HandlerContext, job: Job, _: Worker, event: TrainingFinished
) -> None:
    """The stop rule is met; the script may still evaluate or save before it exits.

    Args:
        job: remembers why, to say it when its processes have ended.
        event: why the training is over, in words.
    """
    if isinstance(job.status, Starting | Running | Rescaling):
        job.status.script.finished = event.why


def go_on_from(progress: Progress, epoch: int) -> None:
    """Epochs that are finished, and not heard of: whoever trained them may tell them yet.

    Args:
        progress: it is changed in place.
    """
    first = max(progress.epoch, epoch - KEPT_LATE) + 1
    progress.unheard = [*progress.unheard, *range(first, epoch + 1)][-KEPT_LATE:]


def hear_late(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """An epoch that the job went on from is told at last.

    Args:
        job: whose epoch is among those that are `unheard`.
    """
    progress = job.progress
    progress.unheard.remove(event.epoch)
    noise_scale = first_noise_scale(event.metrics.get("noise_scale"), event.noise_scale)
    if event.epoch == progress.epoch:
        take_over(progress, event, noise_scale, ctx.now)
    info = epoch_info(event, (), ctx.now, whole=False, noise_scale=noise_scale)
    tell(ctx, job, event, info)
    ctx.changed_jobs[job.job] = None
    ctx.ask = True


def _hear_what_waited(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """The group that reports an epoch went on from those before it, whoever tells them."""
    progress = job.progress
    go_on_from(progress, event.epoch - 1)
    late, progress.late = progress.late, []
    for before in sorted(late, key=lambda report: report.epoch):
        if before.epoch in progress.unheard:
            hear_late(ctx, job, before)


def _is_whole(job: Job, group: Group, event: EpochReported) -> bool:
    """Whether one group, with one batch, did all of an epoch."""
    if event.group != group.version or event.epoch != job.progress.epoch + 1:
        return False
    return all(
        worker.formed == group.version and worker.formed_step <= job.progress.epoch_step
        for worker in job.group_workers()
    )


def _neighbours(ctx: HandlerContext, job: Job, group: Group) -> dict[NodeId, list[Job]]:
    """Other jobs on each node of a group."""
    on = ctx.state.slot_index.jobs_on
    nodes = dict.fromkeys(node_of(member.slot) for member in group.members)
    return {node: [other for other in on(node) if other is not job] for node in nodes}


def _crowds(group: Group, others: Mapping[NodeId, Sequence[Job]]) -> tuple[NodeCrowd, ...]:
    """Each node of a group: its workers there, and families of the other jobs; sorted."""
    own = Counter(node_of(member.slot) for member in group.members)
    crowds = [
        (own[node], tuple(sorted(job.family for job in here))) for node, here in others.items()
    ]
    return tuple(sorted(crowds))


def _stayed(others: Mapping[NodeId, Sequence[Job]], since: Seconds) -> bool:
    """Whether all of them trained in their groups since then."""
    jobs = [job for here in others.values() for job in here]
    return all(isinstance(job.status, Running) and job.accounting.since <= since for job in jobs)


def _measure_speed(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """Hold the speed of the first whole epoch of a group against the expected one."""
    promise = job.promise
    if promise is None or promise.version != event.group:
        return
    job.promise = None
    speed = event.samples_per_s
    ctx.records.append(SpeedMeasured(job=job.job, promise=promise, samples_per_s=speed))
    ctx.totals.speed_measured(promise, speed)
    detail: Detail = {
        "version": promise.version,
        "predicted": promise.then / promise.now,
        "realised": event.samples_per_s / promise.now,
    }
    ctx.announce("job.gain", job, detail)


def take_over(
    progress: Progress, event: EpochReported, noise_scale: float | None, now: Seconds
) -> None:
    """The job is where this epoch ended.

    Args:
        progress: it is changed in place.
        noise_scale: what it says of that, samples.
    """
    progress.epoch_at, progress.epoch_step = now, event.step
    progress.epoch, progress.step = event.epoch, event.step
    progress.samples_done, progress.epoch_samples = event.samples_done, event.epoch_samples
    progress.epochs_stated = event.epochs
    progress.samples_per_s = event.samples_per_s
    progress.train_loss, progress.metrics, progress.lr = event.train_loss, event.metrics, event.lr
    if noise_scale is not None:  # smoothed: the first measurements of a group are rough
        before = progress.noise_scale or noise_scale
        progress.noise_scale = before * (noise_scale / before) ** NOISE_SMOOTHING
        progress.noise_epochs += 1
    progress.checkpoint = ResumePoint(epoch=event.epoch, version=event.group)


def _count_left_out(job: Job, event: EpochReported) -> None:
    """What the epoch did not train of its samples, unless that is because the job ends there."""
    stop, progress = job.spec.stop, job.progress
    trained, all_samples = event.trained_samples, event.epoch_samples
    if trained is None or (stop is not None and stop.samples is not None):
        return
    progress.epoch_left_out = min(MOST_SAMPLES, max(0, all_samples - trained))
    progress.left_out = min(MOST_SAMPLES, progress.left_out + progress.epoch_left_out)


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
