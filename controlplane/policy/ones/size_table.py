"""What a job would do with each size: which batch, how fast, how much faster than on one slot."""

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
from controlplane.prediction.speed_model import statistical_efficiency
from controlplane.prediction.throughput import SpeedModel

NO_TIME_S: Final = 1e-12  # divisor where a step takes no time
ROUNDING: Final = 1e-9  # of a logarithm: a limit that is a power of two is on the grid


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The sizes that a job may have now; all arrays have one entry for each."""

    sizes: IntArray  # slots, growing
    nodes: IntArray  # that they span at best; at the present size, that they do span
    batches: IntArray  # global, that would be given now: the best within all limits
    speeds: FloatArray  # of these; samples per second, relative if the model's seconds are none
    goodputs: FloatArray  # speeds times statistical efficiency
    gains: FloatArray  # x(n): goodput of the best batch to be had in time, over that on one slot
    known: bool  # whether speeds are in samples per second
    one_speed: float  # goodput of the best batch on one slot
    noise_scale: float
    corrections: FloatArray  # of promises beyond what was measured, a factor in speeds; else nan
    stretch: FloatArray  # times that steps take longer because its own workers share cores


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
    """Speed, batch and goodput of `job` at each of `sizes`.

    The batch that is given is the one of most goodput at the present noise scale, within R, the
    user's bounds and twice the batch of now. What a size is *worth* is that of the best batch
    within the user's bounds alone: R is doubled every few steps, and a job that has not ramped up
    yet would look slow, long and poorly scaling. Without a noise scale the largest batch would
    always win: the prior is a few times the first batch.

    Args:
        options: the prior, the margin for a new batch on the same slots, what limits values.
        sizes: shape (L,), slots, growing.
        nodes: shape (L,), that each size spans.
        keep_batch: whether its present size must keep its present batch.
        cores: that the slots of a node share; infinite: each has enough.
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
    good = worth = goodputs[rows, best]
    if not options.limit_values:
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
    """Speeds and goodputs of one job on some sizes, whatever the batch."""

    job: JobView
    model: SpeedModel
    noise: float  # phi, samples
    slots: IntArray  # shape (1 + L,)
    nodes: IntArray  # shape (1 + L,)
    longer: FloatArray  # shape (1 + L,), times that a step takes longer than the model says

    def rate(self, grid: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Speed, goodput, and goodput where the local limit allows it, else 0; shape of `grid`.

        Args:
            grid: global batches, shape (1 + L, B).
        """
        local = np.ceil(grid / self.slots[:, None])
        step_s = self.model.step_s(self.nodes[:, None], self.slots[:, None], local)
        speeds = grid / np.maximum(step_s * self.longer[:, None], NO_TIME_S)
        useful = speeds * statistical_efficiency(grid, self.job.batch_size, self.noise)
        return speeds, useful, np.where(local <= self.job.local_limit, useful, 0.0)


def _batches(
    job: JobView, every: IntArray, most: int, per_doubling: int, *, keep_batch: bool
) -> tuple[FloatArray, int | None]:
    """Global batches that are tried at each size, shape (1 + L, B), and the row of the present one.

    None: it has no slots, or may not keep its batch. Else the present batch is the last column.
    """
    grid = _grid(job, every, most, per_doubling)
    present = sum(job.running_on.values())
    here = np.flatnonzero(every[1:] == len(job.running_on)) + 1
    if not present or not len(here) or (present > most and not keep_batch):
        return grid, None
    grid = np.column_stack([grid, np.maximum(every, present).astype(np.float64)])
    return grid, int(here[0])


def _grid(job: JobView, every: IntArray, most: int, per_doubling: int) -> FloatArray:
    """Global batches up to `most` at each size, at least a sample for each slot."""
    totals = _totals(job.batch_size, max(most, job.batch_size), per_doubling)
    return np.maximum(totals[None, :], every[:, None].astype(np.float64))


def _largest_batch(job: JobView, limit: int) -> int:
    """R, the user's bound, and twice the batch of now, or of last: no more at once."""
    most = min(limit, job.batch_limit)
    last = sum(job.running_on.values()) or job.last_batch
    return min(most, max(2 * last, job.batch_size)) if last else most


def _prefer_present(goodputs: FloatArray, row: int, present: float, margin: float) -> None:
    """In the row of the present size another batch than the last column's has to be worth it.

    Args:
        goodputs: shape (1 + L, B), of which the last column is the present batch; changed.
        margin: times that, which another batch must bring; 0: none may.
    """
    others = goodputs[:, :-1]
    goodputs[row, -1] = present
    if not margin or others[row].max() <= present * margin:
        others[row] = 0.0
    goodputs[:row, -1] = goodputs[row + 1 :, -1] = 0.0


def _totals(first: int, most: int, per_doubling: int) -> FloatArray:
    """Global batches that are tried: the first one, its doublings, what lies between, the most."""
    steps = int(np.floor(per_doubling * np.log2(most / first) + ROUNDING))
    doublings = first * np.power(2.0, np.arange(steps + 1) / per_doubling)
    return np.unique(np.append(doublings.round(), float(most)))
