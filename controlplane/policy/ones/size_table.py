"""Batch, speed and speed-up of a job at each of its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import JobView
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.options import OnesOptions
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.slowdowns import stretch_alone
from controlplane.prediction.throughput import SpeedModel, statistical_efficiency

NO_TIME_S: Final = 1e-12  # lower bound of a divisor
ROUNDING: Final = 1e-9  # of a logarithm; a limit that is a power of two is on the grid


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Sizes that a job may have now; arrays have shape (L,)."""

    sizes: IntArray  # slots, ascending
    nodes: IntArray  # least nodes that a size spans; the actual number at the present size
    batches: IntArray  # global, the best within all limits
    speeds: FloatArray  # samples/s at these batches; relative unless `known`
    goodputs: FloatArray  # speeds times statistical efficiency
    gains: FloatArray  # x(n): goodput of the best batch without R, over that on one slot
    known: bool  # speeds are in samples/s
    one_speed: float  # goodput of the best batch on one slot
    noise_scale: float
    corrections: FloatArray  # factor of speeds beyond the measured sizes; nan: measured
    stretch: FloatArray  # factor of step times because its own workers share cores


def size_table(
    job: JobView,
    estimates: Estimates,
    options: OnesOptions,
    sizes: IntArray,
    nodes: IntArray,
    *,
    keep_batch: bool,
    cores: float = math.inf,
) -> SizeTable:
    """Return speed, batch and goodput of `job` at each of `sizes`.

    The chosen batch has the most goodput at the present noise scale, within R, the user's bounds
    and twice the present batch. The *value* of a size is that of the best batch within the user's
    bounds alone: R doubles every few steps, and a job that has not ramped up yet would otherwise
    look slow, long and poorly scaling. Without a noise scale the largest batch would always win;
    therefore the prior is a few times the first batch.

    Args:
        sizes: shape (L,), slots, ascending.
        nodes: shape (L,), nodes that each size spans.
        keep_batch: the present size must keep its present batch.
        cores: cores that the slots of a node share; infinite: one for each slot.
    """
    model = estimates.family(job.family).speed_model(job.batch_size)
    noise = estimates.noise_scale(job)
    every = np.concatenate([np.ones(1, dtype=np.int64), sizes])
    spans = np.concatenate([np.ones(1, dtype=np.int64), nodes])
    shared = stretch_alone(every, spans, cores)
    corrections = estimates.gain_corrections(job.family, spans, every)
    longer = shared / np.where(np.isnan(corrections), 1.0, corrections)
    rater = _Rater(job, model, noise, every, spans, longer)
    most = _largest_batch(job, estimates.limit(job))
    per_doubling = options.batches_per_doubling
    grid, held = _batches(job, every, most, per_doubling, keep_batch=keep_batch)
    margin = None if held is None else 0.0 if keep_batch else 1.0 + options.batch_margin
    speeds, useful, goodputs = rater.rate(grid)
    if held is not None and margin is not None:
        _prefer_present(goodputs, held, useful[held, -1], margin)
    rows, best = np.arange(len(every)), goodputs.argmax(axis=1)
    good = goodputs[rows, best]
    free = _grid(job, every, job.batch_limit, per_doubling)
    worth = np.maximum(good, rater.rate(free)[2].max(axis=1))
    return SizeTable(
        sizes=sizes,
        nodes=nodes,
        batches=grid[rows, best].astype(np.int64)[1:],
        speeds=speeds[rows, best][1:],
        goodputs=good[1:],
        gains=worth[1:] / max(float(worth[0]), NO_TIME_S),
        known=model.known,
        one_speed=float(worth[0]),
        noise_scale=noise,
        corrections=corrections[1:],
        stretch=shared[1:],
    )


@dataclass(frozen=True, slots=True)
class _Rater:
    """Speeds and goodputs of one job at some sizes, for any batch."""

    job: JobView
    model: SpeedModel
    noise: float  # phi, samples
    slots: IntArray  # shape (1 + L,)
    nodes: IntArray  # shape (1 + L,)
    longer: FloatArray  # shape (1 + L,), factor of the model's step times

    def rate(self, grid: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return speed, goodput, and goodput with 0 above the local limit, like `grid`.

        `grid` has global batches, shape (1 + L, B).
        """
        local = np.ceil(grid / self.slots[:, None])
        step_s = self.model.step_s(self.nodes[:, None], self.slots[:, None], local)
        speeds = grid / np.maximum(step_s * self.longer[:, None], NO_TIME_S)
        useful = speeds * statistical_efficiency(grid, self.job.batch_size, self.noise)
        return speeds, useful, np.where(local <= self.job.local_limit, useful, 0.0)


def _batches(
    job: JobView, every: IntArray, most: int, per_doubling: int, *, keep_batch: bool
) -> tuple[FloatArray, int | None]:
    """Return the global batches to try, shape (1 + L, B), and the row of the present size.

    The present batch is the last column. The row is None if the job has no slots, or may not keep
    its batch.
    """
    grid = _grid(job, every, most, per_doubling)
    present = sum(job.running_on.values())
    here = np.flatnonzero(every[1:] == len(job.running_on)) + 1
    if not present or not len(here) or (present > most and not keep_batch):
        return grid, None
    grid = np.column_stack([grid, np.maximum(every, present).astype(np.float64)])
    return grid, int(here[0])


def _grid(job: JobView, every: IntArray, most: int, per_doubling: int) -> FloatArray:
    """Return global batches up to `most` at each size, with at least one sample for each slot."""
    totals = _totals(job.batch_size, max(most, job.batch_size), per_doubling)
    return np.maximum(totals[None, :], every[:, None].astype(np.float64))


def _largest_batch(job: JobView, limit: int) -> int:
    """Return the least of R, the user's bound, and twice the present or last batch."""
    most = min(limit, job.batch_limit)
    last = sum(job.running_on.values()) or job.last_batch
    return min(most, max(2 * last, job.batch_size)) if last else most


def _prefer_present(goodputs: FloatArray, row: int, present: float, margin: float) -> None:
    """In the row of the present size, drop all batches unless one beats the present batch.

    Args:
        goodputs: shape (1 + L, B), the present batch in the last column; changed in place.
        margin: factor by which another batch must win; 0: none may.
    """
    others = goodputs[:, :-1]
    goodputs[row, -1] = present
    if not margin or others[row].max() <= present * margin:
        others[row] = 0.0
    goodputs[:row, -1] = goodputs[row + 1 :, -1] = 0.0


def _totals(first: int, most: int, per_doubling: int) -> FloatArray:
    """Return the global batches to try: the first, steps of each doubling, and the largest."""
    steps = int(np.floor(per_doubling * np.log2(most / first) + ROUNDING))
    doublings = first * np.power(2.0, np.arange(steps + 1) / per_doubling)
    return np.unique(np.append(doublings.round(), float(most)))
