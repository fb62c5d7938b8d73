"""Handlers of finished epochs and finished trainings.

A report is late if the group that trained the epoch was lost because a node or the network was
down, and the node reports the epoch after its return. The epoch is finished, and its checkpoint is
durable. A late epoch is recorded if the job continued from that checkpoint, in new processes or in
survivors of the group. It is ignored if the group trained on after another group had replaced it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import sweep_orders
from controlplane.core.history import EpochFinished, SpeedMeasured
from controlplane.core.model.job import Job, Progress
from controlplane.core.model.job_phases import Paused, Rescaling, Running, Starting
from controlplane.core.model.report_bounds import (
    MAX_COUNT,
    first_valid_noise_scale,
    plausible_times,
)
from controlplane.core.model.worker import Worker
from schemas.ids import NodeId, Seconds, node_of
from schemas.nodes import Group, ResumePoint
from schemas.wire.agent import EpochReported, TrainingFinished
from schemas.wire.client import EpochInfo, NodeCrowd
from schemas.wire.feed import Detail

MAX_HELD_REPORTS: Final = 1000  # per job; only a faulty node sends more
NOISE_SMOOTHING: Final = 0.3  # weight of the newest epoch


def on_epoch_reported(
    ctx: HandlerContext, job: Job, event: EpochReported, *, by_member: bool
) -> None:
    """Handle a finished epoch with a durable checkpoint, unless it is already recorded.

    If the worker is not in the job's group any more (`by_member` is False), the report may be late.
    A late report advances a paused job. A starting job keeps the report until its start epoch is
    known, and a running job keeps it until the next epoch.
    """
    progress, group = job.progress, job.group
    if event.epoch in progress.missing_epochs:
        _record_late_epoch(ctx, job, event)
    elif by_member and group is not None:
        ctx.changed_jobs[job.job] = None
        if event.epoch > progress.epoch:
            _record_next_epoch(ctx, job, group, event)
    elif _may_belong(job, event):
        if len(progress.held_reports) < MAX_HELD_REPORTS:
            progress.held_reports.append(event)
        if isinstance(job.status, Paused):
            _advance_paused(ctx, job)


def _record_next_epoch(ctx: HandlerContext, job: Job, group: Group, event: EpochReported) -> None:
    """Record an epoch of the job's current group, or of the group that replaces it."""
    progress, change = job.progress, job.change
    whole = _is_whole(job, group, event)
    if change is not None and change.group.version == event.group:
        group = change.group
    if whole:
        _measure_speed(ctx, job, event)
    others = _other_jobs(ctx, job, group)
    beside = _node_crowds(group, others)  # omits jobs that started and left within the epoch
    unchanged = whole and beside == progress.beside and _trained_since(others, progress.epoch_at)
    _record_held_epochs(ctx, job, event)
    _update_progress(progress, event, ctx.now)
    progress.beside = beside
    _count_untrained(job, event)
    job.attempts.losses, job.attempts.changes = 0, 0
    info = _epoch_info(event, group, ctx.now, whole=whole, beside=beside if unchanged else None)
    _record_epoch(ctx, job, info)
    sweep_orders.epoch_reported(ctx, job, event)


def _record_epoch(ctx: HandlerContext, job: Job, info: EpochInfo) -> None:
    """Add a finished epoch to the job's history, announce it, and request a plan."""
    ctx.records.append(EpochFinished(job=job.job, epoch=info))
    shown = ("epoch", "train_loss", "samples_per_s", "global_batch", "lr")
    detail: Detail = {**info.metrics, **{name: getattr(info, name) for name in shown}}
    if info.left_early:
        detail |= {"trained_samples": info.trained_samples, "left_early": True}
    ctx.announce("job.epoch", job, detail)
    ctx.plan_needed = True


def _epoch_info(
    event: EpochReported,
    group: Group | None,
    now: Seconds,
    *,
    whole: bool = False,
    beside: tuple[NodeCrowd, ...] | None = None,
) -> EpochInfo:
    """Return the history entry of a reported epoch. `group` is None if the group is unknown."""
    slots = [member.slot for member in group.members] if group is not None else []
    facts = msgspec.structs.replace(
        event.facts, noise_scale=_noise_scale(event), step_times=plausible_times(event.facts)
    )
    return EpochInfo(
        **{name: getattr(facts, name) for name in facts.__struct_fields__},
        time=now,
        slots=len(slots),
        nodes=len({node_of(slot) for slot in slots}),
        whole=whole,
        beside=beside,
    )


def on_training_finished(
    _ctx: HandlerContext, job: Job, _: Worker, event: TrainingFinished
) -> None:
    """Record that the stop rule is met. The script may still evaluate or save before it exits."""
    if isinstance(job.status, Starting | Running | Rescaling):
        job.status.script.finished = event.reason


def _expect_reports(progress: Progress, epoch: int) -> None:
    """Mark the epochs after the last recorded one, up to `epoch`, as finished but not reported."""
    first = max(progress.epoch, epoch - MAX_HELD_REPORTS) + 1
    progress.missing_epochs = [*progress.missing_epochs, *range(first, epoch + 1)][
        -MAX_HELD_REPORTS:
    ]


def _record_late_epoch(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """Record the late report of an epoch from which the job has continued."""
    progress = job.progress
    progress.missing_epochs.remove(event.epoch)
    if event.epoch == progress.epoch:
        _update_progress(progress, event, ctx.now)
    _record_epoch(ctx, job, _epoch_info(event, None, ctx.now))
    ctx.changed_jobs[job.job] = None


def _record_held_epochs(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """Record the held reports of epochs before `event`, and discard all other held reports.

    The group that reports `event` has continued from these earlier epochs.
    """
    progress = job.progress
    _expect_reports(progress, event.epoch - 1)
    late, progress.held_reports = progress.held_reports, []
    for before in sorted(late, key=lambda report: report.epoch):
        if before.epoch in progress.missing_epochs:
            _record_late_epoch(ctx, job, before)


def record_last_epochs(ctx: HandlerContext, job: Job) -> None:
    """Record the held reports that directly follow the last recorded epoch of a finished training.

    A survivor of the reporting group finished the training after these epochs, without an epoch of
    its own.
    """
    progress = job.progress
    for event in sorted(progress.held_reports, key=lambda report: report.epoch):
        if event.epoch == progress.epoch + 1:
            progress.missing_epochs.append(event.epoch)
            progress.epoch = event.epoch
            _record_late_epoch(ctx, job, event)
    progress.held_reports = []


def _is_whole(job: Job, group: Group, event: EpochReported) -> bool:
    """True if one group trained the whole epoch with one global batch."""
    if event.group != group.version or event.epoch != job.progress.epoch + 1:
        return False
    return all(
        worker.group_version == group.version and worker.group_first_step <= job.progress.epoch_step
        for worker in job.group_workers()
    )


def _other_jobs(ctx: HandlerContext, job: Job, group: Group) -> dict[NodeId, list[Job]]:
    on = ctx.state.slot_index.jobs_on
    nodes = dict.fromkeys(node_of(member.slot) for member in group.members)
    return {node: [other for other in on(node) if other is not job] for node in nodes}


def _node_crowds(group: Group, others: Mapping[NodeId, Sequence[Job]]) -> tuple[NodeCrowd, ...]:
    """Return, for each node, the number of the group's workers and the families of other jobs.

    The entries are sorted.
    """
    own = Counter(node_of(member.slot) for member in group.members)
    crowds = [
        (own[node], tuple(sorted(job.family for job in neighbours)))
        for node, neighbours in others.items()
    ]
    return tuple(sorted(crowds))


def _trained_since(others: Mapping[NodeId, Sequence[Job]], since: Seconds) -> bool:
    """True if all of these jobs have trained in unchanged groups since `since`."""
    jobs = [job for neighbours in others.values() for job in neighbours]
    return all(isinstance(job.status, Running) and job.accounting.since <= since for job in jobs)


def _measure_speed(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """Record a group's speed in its first whole epoch, with the speed that the policy expected."""
    promise = job.promise
    if promise is None or promise.version != event.group:
        return
    job.promise = None
    speed = event.facts.samples_per_s
    ctx.records.append(SpeedMeasured(job=job.job, promise=promise, samples_per_s=speed))
    ctx.totals.speed_measured(promise, speed)
    detail: Detail = {
        "version": promise.version,
        "predicted": promise.speed_expected / promise.speed_before,
        "realised": speed / promise.speed_before,
    }
    ctx.announce("job.gain", job, detail)


def _noise_scale(event: EpochReported) -> float | None:
    """Return the script's own metric `noise_scale` if it is valid, else the measured scale."""
    facts = event.facts
    return first_valid_noise_scale(facts.metrics.get("noise_scale"), facts.noise_scale)


def _update_progress(progress: Progress, event: EpochReported, now: Seconds) -> None:
    facts = event.facts
    for name in ("epoch", "step", "samples_done", "epoch_samples", "samples_per_s"):
        setattr(progress, name, getattr(facts, name))
    progress.train_loss, progress.metrics, progress.lr = facts.train_loss, facts.metrics, facts.lr
    progress.loss_is_not_finite = facts.loss_is_not_finite
    progress.epoch_at, progress.epoch_step = now, facts.step
    progress.stated_epochs = event.stated_epochs
    noise_scale = _noise_scale(event)
    if noise_scale is not None:  # smoothed, because a group's first measurements are rough
        before = progress.noise_scale or noise_scale
        progress.noise_scale = before * (noise_scale / before) ** NOISE_SMOOTHING
        progress.noise_epochs += 1
    progress.checkpoint = ResumePoint(epoch=event.epoch, version=event.group)


def _count_untrained(job: Job, event: EpochReported) -> None:
    """Record the samples that the epoch skipped.

    A job that stops after a number of samples is left alone, because its last epoch is cut short.
    """
    stop, progress = job.spec.stop, job.progress
    trained, all_samples = event.facts.trained_samples, event.facts.epoch_samples
    if trained is None or (stop is not None and stop.samples is not None):
        return
    progress.epoch_untrained = min(MAX_COUNT, max(0, all_samples - trained))
    progress.untrained_samples = min(
        MAX_COUNT, progress.untrained_samples + progress.epoch_untrained
    )


def on_resumed(ctx: HandlerContext, job: Job, epoch: int) -> None:
    """Update the job's progress to the epoch from which a starting worker resumes.

    Args:
        epoch: last finished epoch according to the worker's checkpoint. This may be later than the
            last recorded epoch, if the same group or its successor finished epochs without
            reporting them.
    """
    progress, point = job.progress, job.progress.checkpoint
    if point is not None and epoch > point.epoch:
        _expect_reports(progress, epoch)
        progress.epoch = epoch
        progress.checkpoint = ResumePoint(epoch=epoch, version=point.version)
    late, progress.held_reports = progress.held_reports, []
    for event in late:
        if event.epoch in progress.missing_epochs:
            _record_late_epoch(ctx, job, event)


def _may_belong(job: Job, event: EpochReported) -> bool:
    """True if the job might continue from this epoch, or has continued from it in a recovery."""
    progress, status = job.progress, job.status
    if event.epoch <= progress.epoch:
        return False
    if isinstance(status, Running | Rescaling):  # survivors of the reporting group
        return any(worker.version <= event.group for worker in job.group_workers())
    point = progress.checkpoint
    return isinstance(status, Paused | Starting) and (point is None or event.group >= point.version)


def _advance_paused(ctx: HandlerContext, job: Job) -> None:
    """Record the held reports that directly follow the last recorded epoch of a paused job."""
    progress = job.progress
    for event in sorted(progress.held_reports, key=lambda report: report.epoch):
        if event.epoch == progress.epoch + 1:
            progress.missing_epochs.append(event.epoch)
            progress.epoch = event.epoch
            progress.held_reports.remove(event)
            _record_late_epoch(ctx, job, event)
            job.attempts.losses = 0
