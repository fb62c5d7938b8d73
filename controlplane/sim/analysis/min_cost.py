"""How little a job can take: its least slot seconds, and its least time, on any schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.sim.engine.simulator_oracle import compact
from controlplane.sim.models.job_model import Pace, Work
from controlplane.sim.simulator_errors import TraceError

ONE_BY_ONE: Final = 8  # sizes up to this, then whole nodes
PER_DOUBLING: Final = 3  # batches
BETWEEN: Final = 0.95  # what lies between the sizes and batches that were tried may be better


@dataclass(frozen=True, slots=True)
class Ease:
    """Both are reached by schedules that differ: a bound, not a plan."""

    slot_s: float  # least slots times seconds
    least_s: float  # least seconds


def easiest(work: Work, fixed_batch: int, slots: int, widest: int) -> Ease:
    """The best size and batch for every epoch, less a few percent for those between.

    What a sample is worth depends on batch and epoch, how fast samples go on size and batch: the
    two are asked for apart.

    Args:
        work: of a job that may choose its batch.
        fixed_batch: that policies of fixed batch give it, if it is above the largest it may choose;
            else 0.
        slots: of the cluster.
        widest: slots of its largest node.
    """
    spec = work.spec
    most = min(max(spec.slots[1], fixed_batch and slots), slots)
    sizes = [*range(1, min(ONE_BY_ONE, most) + 1), *range(ONE_BY_ONE + widest, most + 1, widest)]
    batches = _batches(spec.batch_size, max(spec.batch_limit, fixed_batch), fixed_batch)
    speed = np.zeros((len(sizes), len(batches)))
    worth = np.zeros((len(batches), work.epochs))
    for column, batch in enumerate(batches):
        for row, size in enumerate(sizes):
            pace = _pace(work, size, batch, 0, widest) if size <= batch else None
            if pace is not None:
                speed[row, column] = pace.samples_per_s
        fits = next((size for row, size in enumerate(sizes) if speed[row, column] > 0.0), None)
        for epoch in range(work.epochs if fits is not None else 0):
            pace = _pace(work, fits or 1, batch, epoch, widest)
            worth[column, epoch] = pace.progress_per_s / pace.samples_per_s if pace else 0.0
    ends = np.array([0.0, *(work.epoch_ends_at(epoch) for epoch in range(work.epochs))])
    rate = (speed[:, :, None] * worth[None, :, :]).max(axis=1)  # (size, epoch)
    if not (rate.max(axis=0) > 0.0).all():
        return Ease(0.0, 1e-9)
    seconds = np.diff(ends) / np.maximum(rate, 1e-300)
    least_slot_s = (seconds * np.array(sizes)[:, None]).min(axis=0).sum()
    least_s = seconds.min(axis=0).sum()
    return Ease(float(least_slot_s) * BETWEEN, max(float(least_s) * BETWEEN, 1e-9))


def _batches(first: int, most: int, fixed: int) -> list[int]:
    steps = int(np.ceil(np.log2(max(most / first, 1.0)) * PER_DOUBLING))
    between = {min(most, round(first * 2.0 ** (step / PER_DOUBLING))) for step in range(steps + 1)}
    return sorted(between | {most} | ({fixed} if fixed else set()))


def _pace(work: Work, size: int, batch: int, epoch: int, widest: int) -> Pace | None:
    try:
        pace = work.pace(compact(size, widest), batch, epoch)
    except TraceError:
        return None  # nothing like it was measured
    return pace if pace.samples_per_s > 0.0 else None
