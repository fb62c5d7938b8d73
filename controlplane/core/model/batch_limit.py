"""How far a policy may raise a job's batch, where its user leaves that to the cluster."""

from __future__ import annotations

import math
from typing import Final

from controlplane.core.model.job import Job

# docs/batch-limit.md says how these were chosen, and what trainings came to with them.
LEAST_STEPS: Final = 10  # of an epoch: fewer, and a step is a large part of what is learnt
LEAST_EFFICIENCY: Final = 0.9  # of a sample, against one in the first batch
TRUSTED_EPOCHS: Final = 2  # that measured the noise scale: the first says little
OUT_OF_MEMORY: Final = ("out of memory", "outofmemory", "can't allocate memory", "memoryerror")
PER_DOUBLING: Final = 2  # steps of the limit, so that it does not move with every epoch


def batch_limit(job: Job) -> int:
    """The largest global batch that a policy may choose for `job` now, samples per step.

    What its user stated. Where nothing is: as much as fits its slots in one pass, but at least
    `LEAST_STEPS` steps of an epoch, and no further than where the gradient noise scale says that a
    sample is still worth `LEAST_EFFICIENCY` of one in the first batch. It is never below that one.

    Args:
        job: in any phase; what its epochs reported counts.
    """
    spec, progress = job.spec, job.progress
    if not spec.batch_limit_is_left_open:
        return spec.batch_limit
    by_memory = local_limit(job) * spec.slots[1]
    by_data = progress.epoch_samples // LEAST_STEPS
    phi = progress.noise_scale if progress.noise_epochs >= TRUSTED_EPOCHS else None
    by_noise = noise_limit(spec.batch_size, phi)
    return max(spec.batch_size, min(spec.batch_limit, by_memory, by_data, by_noise))


def noise_limit(first: int, noise_scale: float | None) -> int:
    """The batch m at which (phi + m0) / (phi + m) has fallen to `LEAST_EFFICIENCY`, coarsely.

    Args:
        first: m0, the job's first batch, samples per step.
        noise_scale: phi, samples; None: it was not measured, and the first batch is kept.

    Returns:
        Samples per step: the first batch times a whole power of the square root of 2, rounded down.
    """
    if noise_scale is None:
        return first
    most = (noise_scale + first) / LEAST_EFFICIENCY - noise_scale
    steps = math.floor(PER_DOUBLING * math.log2(max(most / first, 1.0)))
    return int(first * 2.0 ** (steps / PER_DOUBLING))


def local_limit(job: Job) -> int:
    """The largest batch of one slot that a policy may choose for `job` now, samples per step.

    Args:
        job: in any phase. What ran out of memory lowers what its user stated.
    """
    stated, fits = job.spec.local_limit, job.progress.fits
    return stated if fits is None else min(stated, fits)


def lower_local_limit(job: Job, error: str) -> bool:
    """Lower what fits a slot, if `job` failed because a share above its first batch did not fit.

    Args:
        job: whose script failed; `fits` of its progress is changed in place.
        error: in the script's words.

    Returns:
        Whether it was lowered, so that the job may be tried again with less.
    """
    group = job.group
    if group is None or not any(said in error.lower() for said in OUT_OF_MEMORY):
        return False
    largest = max(member.local_batch for member in group.members)
    in_passes = job.spec.pass_limit < job.spec.batch_size
    if in_passes or largest <= job.spec.batch_size:  # its user says that so much fits
        return False
    job.progress.fits = max(job.spec.batch_size, largest // 2)
    return True
