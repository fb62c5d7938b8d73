"""What each size of each job is worth: the table that every candidate is scored with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import JobView
from controlplane.policy.ones.estimates import Estimates
from controlplane.policy.ones.options import OnesOptions
from controlplane.prediction.arrays import FloatArray, IntArray
from controlplane.prediction.efficiency import statistical_efficiency

STALL_WEIGHT: Final = 2.5
STALL_FROM_S, STALL_TO_S = 10.0, 900.0
LEAST_SHARE: Final = 0.05  # of its value, that a change leaves of a job at worst
UNKNOWN_S: Final = 60.0  # remaining time when nobody knows anything


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The sizes that a job may have now; all arrays have one entry for each."""

    sizes: IntArray  # slots, growing
    nodes: IntArray  # that they span at best; at the present size, that they do span
    batches: IntArray  # global, the best at that size
    speeds: FloatArray  # samples per second; relative if the model's seconds are none
    goodputs: FloatArray  # speed times statistical efficiency
    gains: FloatArray  # x(n): goodput over the best on one slot
    known: bool  # whether speeds are in samples per second
    one_speed: float  # of the best batch on one slot
    noise_scale: float


def size_table(
    job: JobView,
    estimates: Estimates,
    options: OnesOptions,
    sizes: IntArray,
    nodes: IntArray,
    *,
    keep_batch: bool,
) -> SizeTable:
    """Speed, batch and goodput of `job` at each of `sizes`.

    The batch is the one of most goodput at the present noise scale, within R, the user's bounds
    and twice the batch of now. Without a noise scale the largest batch would always win: the prior
    is a few times the first batch.

    Args:
        job: as the view shows it.
        estimates: its speed model and R.
        options: the prior and the margin for a new batch on the same slots.
        sizes: shape (L,), slots, growing.
        nodes: shape (L,), that each size spans.
        keep_batch: whether its present size must keep its present batch.
    """
    model = estimates.family(job.family).speed(job.batch_size)
    noise = estimates.noise_scale(job)
    now_slots, now_batch = len(job.running_on), sum(job.running_on.values())
    most = min(estimates.limit(job), job.batch_limit)
    last = now_batch or job.last_batch
    if last:
        most = min(most, max(2 * last, job.batch_size))
    every = np.concatenate([np.ones(1, dtype=np.int64), sizes])
    spans = np.concatenate([np.ones(1, dtype=np.int64), nodes])
    totals = _totals(job.batch_size, max(most, job.batch_size), options.batches_per_doubling)
    grid = np.maximum(totals[None, :], every[:, None].astype(np.float64))
    here = np.flatnonzero(every[1:] == now_slots) + 1
    held = now_batch <= most or keep_batch
    if now_batch and held and len(here):  # the present batch, beside the others
        grid = np.column_stack([grid, np.maximum(every, now_batch).astype(np.float64)])
    local = np.ceil(grid / every[:, None])
    steps = model.step_s(spans[:, None], every[:, None], local)
    speeds = grid / np.maximum(steps, 1e-12)
    efficiency = statistical_efficiency(grid, job.batch_size, noise)
    goodputs = np.where(local <= job.local_limit, speeds * efficiency, 0.0)
    if now_batch and held and len(here):
        row, others = int(here[0]), goodputs[:, :-1]
        present = speeds[row, -1] * efficiency[row, -1]  # above the local limit: in passes
        goodputs[row, -1] = present
        if keep_batch or others[row].max() <= present * (1.0 + options.batch_margin):
            others[row] = 0.0
        goodputs[:row, -1] = goodputs[row + 1 :, -1] = 0.0
    rows, best = np.arange(len(every)), goodputs.argmax(axis=1)
    good, fast = goodputs[rows, best], speeds[rows, best]
    return SizeTable(
        sizes=sizes,
        nodes=nodes,
        batches=grid[rows, best].astype(np.int64)[1:],
        speeds=fast[1:],
        goodputs=good[1:],
        gains=good[1:] / max(float(good[0]), 1e-12),
        known=model.known,
        one_speed=float(good[0]),
        noise_scale=noise,
    )


def _totals(first: int, most: int, per_doubling: int) -> FloatArray:
    """Global batches that are tried: the first one, its doublings, what lies between, the most."""
    steps = int(np.floor(per_doubling * np.log2(most / first) + 1e-9))
    doublings = first * np.power(2.0, np.arange(steps + 1) / per_doubling)
    return np.unique(np.append(doublings.round(), float(most)))


def remaining_s(samples: float | None, one_speed: float, *, known: bool) -> float:
    """T1: seconds that `samples` still take on one slot; nan if nobody can say."""
    if samples is None or not known or one_speed <= 0:
        return math.nan
    return samples / one_speed


def kept_share(
    table: SizeTable, one_s: float, stall_s: float, margin: float, now_slots: int
) -> FloatArray:
    """C: what is left of a job's value after the change to each size; 1 without a change.

    1 - 2.5 stall / clamp(T(n), 10 s, 900 s), less a margin, so that nothing is moved for nothing.
    """
    left_s = one_s / np.maximum(table.gains, 1e-9)
    share = stall_share(left_s, stall_s, margin)
    return np.where(table.sizes == now_slots, 1.0, share)


def stall_share(left_s: FloatArray, stall_s: float, margin: float) -> FloatArray:
    """What is left of a value after a stall, with so many seconds to go; shape of `left_s`."""
    lost = STALL_WEIGHT * stall_s / np.clip(left_s, STALL_FROM_S, STALL_TO_S)
    return np.asarray(np.maximum(1.0 - np.maximum(lost, margin), LEAST_SHARE))


def left_after(left_s: float, stall_s: float, margin: float) -> float:
    """`stall_share` of one number."""
    lost = STALL_WEIGHT * stall_s / min(max(left_s, STALL_FROM_S), STALL_TO_S)
    return max(1.0 - max(lost, margin), LEAST_SHARE)


def values(gains: FloatArray, weight: FloatArray, options: OnesOptions) -> FloatArray:
    """V(n) = weight (x(n) c(n))^0.8, for gains x c: what each size is worth.

    Paper: minimise the sum over *running* jobs of T c (eq. 3, 8), which rewards leaving jobs out.
    Here: maximise a sum over all jobs, in which waiting is worth nothing. Two exponents, one on
    length (in `weight`), one on speed-up.
    """
    return np.asarray(weight * np.power(gains, options.speedup_exponent))


def weights(
    remaining: FloatArray,
    gains: FloatArray,
    waited: FloatArray,
    ran: FloatArray,
    options: OnesOptions,
) -> FloatArray:
    """(T1 + patience)^-0.55 for each job, times its response ratio^2; short ones weigh more.

    Unknown lengths count as half the median of the known ones. The patience is 300 s where jobs
    last hours, and never more than a quarter of their mean, so that seconds are told from minutes
    where jobs last minutes.

    The response ratio 1 + waited / (ran + T + patience), with T at the least size that a job may
    have, grows without bound while it waits, so that none starves behind a stream of short ones.

    Args:
        remaining: T1, shape (J,), seconds on one slot; nan where nobody can say.
        gains: x, shape (J,), of the least size of each job.
        waited: shape (J,), seconds without slots since the submission.
        ran: shape (J,), seconds with slots.
        options: exponent, patience, ageing.
    """
    known = remaining[np.isfinite(remaining)]
    usual = float(np.median(known)) / 2.0 if len(known) else UNKNOWN_S
    length = np.where(np.isfinite(remaining), remaining, usual)
    patience = min(options.patience_s, float(np.mean(length)) / 4.0) if len(length) else 0.0
    short = np.power(np.maximum(length + patience, 1.0), -options.size_exponent)
    service = ran + length / np.maximum(gains, 1e-9) + patience
    response = 1.0 + waited / np.maximum(service, 1.0)
    return np.asarray(short * np.power(response, options.ageing))
