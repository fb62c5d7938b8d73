"""A sweep's epochs: as many units as there are partitions, whichever trials they were of.

Policies learn how fast a job is from its epochs, and move it after one. Units of a sweep do not
wait for each other, so its speed is that of a unit times its workers.
"""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.history_records import EpochFinished
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Running
from controlplane.core.model.job_sweep import JobSweep
from schemas.ids import node_of
from schemas.messages.client import EpochInfo
from schemas.messages.feed import Detail


def count_unit(ctx: HandlerContext, job: Job, sweep: JobSweep, samples: int, took_s: float) -> None:
    """A unit was done for the first time; with the last one of an epoch, that is announced.

    Args:
        took_s: the unit, seconds of user code.
    """
    progress, group = job.progress, job.group
    sweep.units_done += 1
    progress.samples_done += samples
    sweep.epoch_samples += samples
    sweep.epoch_s += took_s
    if group is None or group.version != sweep.epoch_group or not isinstance(job.status, Running):
        sweep.epoch_group = None
    if sweep.units_done % sweep.engine.state.partitions:
        return
    whole, workers = sweep.epoch_group is not None, len(sweep.engine.state.workers)
    if sweep.epoch_s > 0.0:
        progress.samples_per_s = sweep.epoch_samples / sweep.epoch_s * workers
    sweep.epoch_samples, sweep.epoch_s = 0, 0.0
    sweep.epoch_group = group.version if group is not None else None
    progress.epoch += 1
    progress.epoch_at = ctx.now
    if group is not None:
        _announce(ctx, job, whole=whole)


def _announce(ctx: HandlerContext, job: Job, *, whole: bool) -> None:
    progress, group = job.progress, job.group
    if group is None:
        return
    slots = [member.slot for member in group.members]
    info = EpochInfo(
        epoch=progress.epoch,
        time=ctx.now,
        step=0,
        global_batch=group.global_batch,
        lr=0.0,
        samples_per_s=progress.samples_per_s,
        train_loss=None,
        metrics=dict(progress.metrics),
        slots=len(slots),
        nodes=len({node_of(slot) for slot in slots}),
        whole=whole,
        samples_done=progress.samples_done,
        epoch_samples=progress.epoch_samples,
    )
    ctx.records.append(EpochFinished(job=job.job, epoch=info))
    detail: Detail = {
        **progress.metrics,
        "epoch": progress.epoch,
        "samples_per_s": progress.samples_per_s,
        "global_batch": group.global_batch,
    }
    ctx.announce("job.epoch", job, detail)
    ctx.ask = True
