"""How little a job can take: its least slot seconds, and its least time, on any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.models.job_model import JobModel, Throughput, packed
from controlplane.sim.simulator_errors import TraceError

ONE_BY_ONE: Final = 8  # sizes up to this, then whole nodes
PER_DOUBLING: Final = 3  # batches
BETWEEN: Final = 0.95  # what lies between the sizes and batches that were tried may be better
LEAST_S: Final = 1e-9  # of a job's time
TINIEST: Final = 1e-300  # divisor where nothing goes on

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MinCost:
    """Both are reached by schedules that differ: a bound, not a plan."""

    slot_s: float  # least slots times seconds
    least_s: float  # least seconds


def min_cost(job_model: JobModel, fixed_batch: int, slots: int, widest: int) -> MinCost:
    """The best size and batch for every epoch, less a few percent for those between.

    What a sample is worth depends on batch and epoch, how fast samples go on size and batch: the
    two are asked for apart.

    Args:
        job_model: of a job that may choose its batch.
        fixed_batch: that policies of fixed batch give it, if it is above the largest it may choose;
            else 0.
    """
    spec = job_model.spec
    most = min(max(spec.slots[1], fixed_batch and slots), slots)
    sizes = [*range(1, min(ONE_BY_ONE, most) + 1), *range(ONE_BY_ONE + widest, most + 1, widest)]
    batches = _batches(spec.batch_size, max(spec.batch_limit, fixed_batch), fixed_batch)
    speed = _speeds(job_model, sizes, batches, widest)
    efficiency = _efficiencies(job_model, sizes, batches, speed, widest)
    ends = np.array([0.0, *(job_model.epoch_ends_at(epoch) for epoch in range(job_model.epochs))])
    rate = (speed[:, :, None] * efficiency[None, :, :]).max(axis=1)  # (size, epoch)
    if not (rate.max(axis=0) > 0.0).all():
        return MinCost(0.0, LEAST_S)
    seconds = np.diff(ends) / np.maximum(rate, TINIEST)
    least_slot_s = (seconds * np.array(sizes)[:, None]).min(axis=0).sum()
    least_s = seconds.min(axis=0).sum()
    return MinCost(float(least_slot_s) * BETWEEN, max(float(least_s) * BETWEEN, LEAST_S))


def _speeds(
    job_model: JobModel, sizes: Sequence[int], batches: Sequence[int], widest: int
) -> FloatArray:
    """Samples per second in the first epoch, shape (sizes, batches); 0 where it cannot run."""
    speed = np.zeros((len(sizes), len(batches)))
    for column, batch in enumerate(batches):
        for row, size in enumerate(sizes):
            known = known_throughput(job_model, size, batch, 0, widest) if size <= batch else None
            if known is not None:
                speed[row, column] = known.samples_per_s
    return speed


def _efficiencies(
    job_model: JobModel,
    sizes: Sequence[int],
    batches: Sequence[int],
    speed: FloatArray,
    widest: int,
) -> FloatArray:
    """Progress per sample, shape (batches, epochs), as the smallest size has it that can run."""
    found = np.zeros((len(batches), job_model.epochs))
    for column, batch in enumerate(batches):
        fits = next((size for row, size in enumerate(sizes) if speed[row, column] > 0.0), None)
        for epoch in range(job_model.epochs if fits is not None else 0):
            known = known_throughput(job_model, fits or 1, batch, epoch, widest)
            found[column, epoch] = known.progress_per_s / known.samples_per_s if known else 0.0
    return found


def _batches(first: int, most: int, fixed: int) -> list[int]:
    steps = int(np.ceil(np.log2(max(most / first, 1.0)) * PER_DOUBLING))
    between = {min(most, round(first * 2.0 ** (step / PER_DOUBLING))) for step in range(steps + 1)}
    return sorted(between | {most} | ({fixed} if fixed else set()))


def known_throughput(
    job_model: JobModel, size: int, batch: int, epoch: int, widest: int
) -> Throughput | None:
    """Of a group on as few nodes as possible; None: it cannot run.

    Args:
        batch: global, samples per step.
    """
    try:
        throughput = job_model.throughput(packed(size, widest), batch, epoch)
    except TraceError:
        return None  # nothing like it was measured
    return throughput if throughput.samples_per_s > 0.0 else None
