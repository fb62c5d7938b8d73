"""Where training is between two epochs, for those who look on."""

from __future__ import annotations

import time

from elastic.metrics.resource_usage import cpu_seconds
from elastic.state.training_state import TrainingState
from schemas.ids import Version
from schemas.messages.agent import StepsReported
from schemas.messages.worker import Assignment


def steps_report(training: TrainingState, assignment: Assignment, group: Version) -> StepsReported:
    """What rank 0 reports of the steps that were done lately.

    Args:
        training: read from another thread than the one that trains: its figures may be of two
            steps that follow each other.
        group: version of the group that trains.
    """
    position, batch = training.position, training.global_batch
    usage = training.usage.usage(cpu_seconds(), time.monotonic())
    means, shares = (
        training.recent_steps.means,
        training.schedule.at(position.step + 1).local_batches,
    )
    if means is not None and (means.version, means.shares) != (group, shares):
        means = None  # of the group or the batch before
    times = means.times if means is not None else None
    return StepsReported(
        job=assignment.job,
        version=assignment.version,
        rank=assignment.rank,
        group=group,
        epoch=position.epoch,
        step=position.step,
        samples_done=position.samples_done,
        samples_per_s=0.0 if means is None else means.samples_per_s,
        train_loss=training.losses.mean(),
        global_batch=batch,
        lr=training.learning_rate(),
        noise_scale=training.noise.scale(),
        cpu_cores=None if usage is None else usage.cpu_cores,
        sent_bytes_per_s=None if usage is None else usage.sent_bytes_per_s,
        group_steps=0 if means is None else training.recent_steps.steps,
        pass_s=None if times is None else times.pass_s,
        sync_s=None if times is None else times.sync_s,
        local_batch=0 if times is None else times.local_batch,
        passes=0 if times is None else times.passes,
    )
