"""Values of sizes: V = weight (x c)^0.8, and what stalls, moves and waiting leave of it.

`value_table` values every size of every job; candidates are scored with it. `in_play` selects the
jobs and slots of a view that a plan may change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.problem import JobRow
from controlplane.policy.ones.size_table import SizeTable
from controlplane.policy.options import OnesOptions
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

# Without these and `change_margin`, i.e. with free changes, jobs take 16% longer on average
# (docs/evolution.md, "Each term"). The three numbers are the prototype's and were not tuned alone.
STALL_WEIGHT: Final = 2.5
STALL_FROM_S, STALL_TO_S = 10.0, 900.0
MIN_SHARE: Final = 0.05  # lower bound of the share that a change leaves: values stay above 0
UNKNOWN_S: Final = 60.0  # remaining time if no job's is known: all weigh the same
MIN_GAIN: Final = 1e-9  # lower bound of a divisor


def remaining_s(samples: float | None, one_speed: float, *, known: bool) -> float:
    """Return T1, the seconds that `samples` take on one slot; nan if unknown.

    Args:
        one_speed: goodput of the best batch on one slot, samples/s if `known`, otherwise
            relative.
    """
    if samples is None or not known or one_speed <= 0:
        return math.nan
    return samples / one_speed


def kept_share(
    table: SizeTable, one_s: float, stall_s: float, margin: float, now_slots: int
) -> FloatArray:
    """Return c: the share of its value that a job keeps after the change to each size.

    1 - max(2.5 stall / clamp(T(n), 10 s, 900 s), margin); 1 at the present size. Shape (L,), in
    [`MIN_SHARE`, 1].

    Args:
        one_s: T1, remaining seconds on one slot.
        margin: least share that a change costs.
        now_slots: present size; 0: the job waits.
    """
    left_s = one_s / np.maximum(table.gains, MIN_GAIN)
    share = stall_share(left_s, stall_s, margin)
    return np.where(table.sizes == now_slots, 1.0, share)


def stall_share(left_s: FloatArray, stall_s: float, margin: float) -> FloatArray:
    """Return the share of a value that is left after a stall; shape of `left_s`.

    Args:
        left_s: remaining seconds, any shape.
        margin: least share that a change costs.
    """
    lost = STALL_WEIGHT * stall_s / np.clip(left_s, STALL_FROM_S, STALL_TO_S)
    return np.asarray(np.maximum(1.0 - np.maximum(lost, margin), MIN_SHARE))


def left_after(left_s: float, stall_s: float, margin: float) -> float:
    """Return `stall_share` of a single number."""
    lost = STALL_WEIGHT * stall_s / min(max(left_s, STALL_FROM_S), STALL_TO_S)
    return max(1.0 - max(lost, margin), MIN_SHARE)


def values(gains: FloatArray, weight: FloatArray, options: OnesOptions) -> FloatArray:
    """Return V(n) = weight (x(n) c(n))^0.8, the value of each size.

    Paper: minimise the sum over *running* jobs of T c (eq. 3, 8), which rewards leaving jobs out.
    Here: maximise a sum over all jobs in which waiting is worth nothing, with one exponent on
    length (in `weight`) and one on speed-up.

    Args:
        gains: x(n) c(n), shape (J, 1 + L).
        weight: shape (J, 1).
    """
    return np.asarray(weight * np.power(gains, options.speedup_exponent))


def weights(
    remaining: FloatArray,
    gains: FloatArray,
    waited: FloatArray,
    ran: FloatArray,
    options: OnesOptions,
) -> FloatArray:
    """Return (T1 + patience)^-0.55 times response ratio^`ageing`; short jobs weigh more.

    Unknown lengths count as half the median of the known lengths. The patience is `patience_s`, but
    at most a quarter of the mean length, so that seconds differ from minutes where jobs last
    minutes.

    The response ratio 1 + waited / (ran + T + patience), with T at a job's least size, grows
    without bound while the job waits, so that no job starves behind a stream of short ones.

    Args:
        remaining: T1, shape (J,), seconds on one slot; nan if unknown.
        gains: x, shape (J,), of the least size of each job.
        waited: shape (J,), seconds without slots since the submission.
        ran: shape (J,), seconds with slots.
    """
    known = remaining[np.isfinite(remaining)]
    usual = float(np.median(known)) / 2.0 if len(known) else UNKNOWN_S
    length = np.where(np.isfinite(remaining), remaining, usual)
    patience = min(options.patience_s, float(np.mean(length)) / 4.0) if len(length) else 0.0
    short = np.power(np.maximum(length + patience, 1.0), -options.size_exponent)
    service = ran + length / np.maximum(gains, MIN_GAIN) + patience
    response = 1.0 + waited / np.maximum(service, 1.0)
    return np.asarray(short * np.power(response, options.ageing))


@dataclass(frozen=True, slots=True)
class SlotSupply:
    """Slots to distribute."""

    capacity: int  # slots in play: free, soon free, or of movable jobs
    idle: int  # of these, free or soon free
    contended: bool  # a job waits that would fit
    now: Seconds


@dataclass(frozen=True, slots=True)
class InPlay:
    """Jobs and slots of one view, grouped by what may be done with them."""

    jobs: dict[JobId, JobView]  # jobs that may be started or changed, and fit into the cluster
    kept: dict[JobId, dict[SlotId, int]]  # jobs that may not be moved now, with their local batches
    backing_off: dict[JobId, Seconds]  # jobs that may not be retried before a time
    too_large: dict[JobId, int]  # least slots of jobs that exceed the cluster
    free_now: tuple[int, ...]  # places of free slots
    free_soon: tuple[int, ...]  # places of slots whose processes are leaving
    supply: SlotSupply


def in_play(view: ClusterView, now: Seconds) -> InPlay:
    """Group the jobs and slots of `view`; both keep their order."""
    movable: dict[JobId, JobView] = {}
    backing_off: dict[JobId, Seconds] = {}
    kept: dict[JobId, dict[SlotId, int]] = {}
    up = {slot.slot for slot in view.slots if slot.up}
    for name, job in view.jobs.items():
        stuck = not job.movable or job.retry_at > now or not job.running_on.keys() <= up
        if job.running_on and stuck:  # slots of a node that is down cannot be reassigned
            kept[name] = dict(job.running_on)
        elif job.movable and not job.running_on and job.ready_at > now:
            backing_off[name] = job.ready_at
        elif job.movable:
            movable[name] = job
    mine = {slot for job in movable.values() for slot in job.running_on}
    closed = {slot for placed in kept.values() for slot in placed} | mine
    free_now = [n for n, s in enumerate(view.slots) if s.usable and s.slot not in closed]
    free_soon = [n for n, s in enumerate(view.slots) if s.leaving and s.slot not in closed]
    too_large = {
        name: job.least
        for name, job in movable.items()
        if not job.running_on and job.least > len(view.slots)
    }
    jobs = {name: job for name, job in movable.items() if name not in too_large}
    idle = len(free_now) + len(free_soon)
    contended = any(not job.running_on for job in jobs.values())
    return InPlay(
        jobs=jobs,
        kept=kept,
        backing_off=backing_off,
        too_large=too_large,
        free_now=tuple(free_now),
        free_soon=tuple(free_soon),
        supply=SlotSupply(capacity=len(mine) + idle, idle=idle, contended=contended, now=now),
    )


@dataclass(frozen=True, slots=True)
class ValueTable:
    """Values by job and level; level 0 is waiting."""

    sizes: IntArray  # shape (J, 1 + L), slots; 0 beyond what a job may have
    spans: IntArray  # shape (J, 1 + L), nodes that the value assumes
    value: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed
    weight: FloatArray  # shape (J,)


def value_table(job_rows: Sequence[JobRow], supply: SlotSupply, options: OnesOptions) -> ValueTable:
    """Value every size of every job.

    A gated job may grow onto idle slots, and may shrink for a waiting job, but is not stopped.
    Stopping another job costs what its restart will cost, and a margin.
    """
    weight = _weight(job_rows, supply.now, options)
    sizes, spans, gains = _stacked(job_rows)
    value = values(np.maximum(gains, 0.0), weight[:, None], options)
    value[gains < 0] = -np.inf
    gated = np.array([row.gated for row in job_rows], dtype=np.bool_)
    more = sizes - np.array([[len(row.now)] for row in job_rows], dtype=np.int64).reshape(-1, 1)
    if supply.contended or not supply.idle:
        value[gated[:, None] & (more > 0)] = -np.inf
    if not supply.contended:
        value[gated[:, None] & (more < 0)] = -np.inf
    restart_factor = np.array([row.restart_factor for row in job_rows], dtype=np.float64)
    stopped = weight * (np.power(restart_factor, options.speedup_exponent) - 1.0)
    running = np.array([bool(row.now) for row in job_rows], dtype=np.bool_)
    stopped -= np.where(running, options.pause_margin * weight, 0.0)
    value[:, 0] = np.where(gated, -np.inf, stopped)
    return ValueTable(sizes=sizes, spans=spans, value=value, weight=weight)


def _weight(job_rows: Sequence[JobRow], now: Seconds, options: OnesOptions) -> FloatArray:
    return weights(
        np.array([row.remaining_s for row in job_rows], dtype=np.float64),
        np.array([row.table.gains[0] for row in job_rows], dtype=np.float64),
        np.array([_waited_s(row.job, now) for row in job_rows], dtype=np.float64),
        np.array([row.job.ran_s for row in job_rows], dtype=np.float64),
        options,
    ) * np.array([row.job.priority for row in job_rows], dtype=np.float64)


def _waited_s(job: JobView, now: Seconds) -> float:
    return job.waited_s + (0.0 if job.running_on else max(0.0, now - job.moved_at))


def _stacked(job_rows: Sequence[JobRow]) -> tuple[IntArray, IntArray, FloatArray]:
    """Return slots, nodes and x(n) c(n) at each level, shape (J, 1 + L); -1: no such level."""
    levels = 1 + max((len(row.table.sizes) for row in job_rows), default=0)
    sizes = np.zeros((len(job_rows), levels), dtype=np.int64)
    spans = np.zeros((len(job_rows), levels), dtype=np.int64)
    gains = np.full((len(job_rows), levels), -1.0)
    if job_rows:
        many = np.array([len(row.table.sizes) for row in job_rows], dtype=np.int64)
        there = np.zeros(sizes.shape, dtype=np.bool_)
        there[:, 1:] = np.arange(levels - 1) < many[:, None]
        sizes[there] = np.concatenate([row.table.sizes for row in job_rows])
        spans[there] = np.concatenate([row.table.nodes for row in job_rows])
        change = np.concatenate([row.change_factor for row in job_rows])
        gains[there] = np.concatenate([row.table.gains for row in job_rows]) * change
    return sizes, spans, gains
