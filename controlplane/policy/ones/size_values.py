"""Values of sizes: V = weight (x c)^0.8, and what stalls, moves and waiting leave of it.

`value_table` values every size of every job; candidates are scored with it. `in_play` selects the
jobs and slots of a view that a plan may change.

Option `max_stretch`: no job takes longer than this multiple of the time of its fair share.

A job's fair share is 1 / n of the cluster, with n the mean number of jobs over its life (Themis,
NSDI '20; Shockwave, NSDI '23). A job that would exceed the limit with only its share from now on is
due the smallest size that is as fast as that share. Less than this size costs more than any other
use of its slots is worth, in greedy filling and in the fitness alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.problem import FairnessFloors, JobRow
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
LEAST_GAIN: Final = 1e-9  # lower bound of a divisor


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
    left_s = one_s / np.maximum(table.gains, LEAST_GAIN)
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
    service = ran + length / np.maximum(gains, LEAST_GAIN) + patience
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


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """State of the counts when a job was first seen."""

    at: Seconds  # when the job was first seen
    area: float  # job seconds up to that time
    active_jobs: int  # active jobs at that time


class LoadAverage:
    """Mean number of active jobs over the life of each job."""

    def __init__(self) -> None:
        self._area = 0.0  # job seconds
        self._jobs = 0
        self._now = Seconds(0.0)
        self._seen: dict[JobId, _FirstSeen] = {}

    def update(self, jobs: Mapping[JobId, JobView], now: Seconds) -> None:
        """Record the active jobs; a second call with the same arguments changes nothing."""
        self._area += self._jobs * max(0.0, now - self._now)
        self._jobs, self._now = len(jobs), max(now, self._now)
        self._seen = {
            name: self._seen.get(name) or _FirstSeen(now, self._area, len(jobs)) for name in jobs
        }

    def mean(self, job: JobView) -> float:
        """Return the mean number of jobs since the submission of `job`, including it; at least 1.

        Before a job was first seen (e.g. after a restart of the search) the number of that moment
        counts.
        """
        seen = self._seen[job.job]
        before = max(0.0, seen.at - job.submitted_at)
        life = before + self._now - seen.at
        if life <= 0.0:
            return float(max(1, self._jobs))
        return max(1.0, (before * seen.active_jobs + self._area - seen.area) / life)


DUE_RATIO: Final = 0.9  # share of the limit; predictions err and slots free late; a judgement
PENALTY_RATIO: Final = 2.0  # times the highest value of a slot; a judgement
ROUNDING: Final = 1e-6  # relative tolerance of speeds
MIN_S: Final = 1e-6  # lower bound of a fair-share time, and of a speed


class FairShares:
    """Sizes that are due to jobs; none without `max_stretch`."""

    def __init__(self, options: OnesOptions) -> None:
        self._options = options
        self._load = LoadAverage()

    def floors(
        self, job_rows: Sequence[JobRow], table: ValueTable, view: ClusterView, now: Seconds
    ) -> FairnessFloors | None:
        """Return what each job is due in this view; None without a limit."""
        limit = self._options.max_stretch
        if not limit:
            return None
        self._load.update(view.jobs, now)
        if not job_rows:
            return None
        left_s, all_s = _lengths(job_rows)
        speed = self._fair_speeds(job_rows, len(view.slots))
        start_s = np.array([self._start_s(row) for row in job_rows])
        fair_s = np.maximum(start_s + all_s / speed, MIN_S)
        begins_s = np.array([0.0 if row.now else start for row, start in zip(
            job_rows, start_s.tolist(), strict=True)])  # fmt: skip
        so_far = np.array([max(0.0, now - row.job.submitted_at) for row in job_rows]) + begins_s
        expected = (so_far + left_s / speed) / fair_s
        most = np.array([float(row.table.gains.max()) for row in job_rows])
        at_best = (so_far + left_s / np.maximum(most, speed)) / fair_s
        level = np.where(expected >= DUE_RATIO * limit, _levels(job_rows, table, speed), 0)
        return FairnessFloors(
            limit=limit,
            expected=expected,
            at_best=at_best,
            level=level,
            penalty=_penalties(table, level, np.maximum(1.0, expected / limit)),
        )

    def _fair_speeds(self, job_rows: Sequence[JobRow], slots: int) -> FloatArray:
        """Return the speed on a fair share over that on one slot, shape (J,).

        A fair share is the wanted size for a part of the time.
        """
        found = np.empty(len(job_rows))
        for at, row in enumerate(job_rows):
            sizes = row.table.sizes
            usual = max(0, int(np.searchsorted(sizes, row.job.wanted, side="right")) - 1)
            share = slots / (self._load.mean(row.job) * float(sizes[usual]))
            found[at] = float(row.table.gains[usual]) * min(1.0, share)
        return np.maximum(found, MIN_S)

    def _start_s(self, row: JobRow) -> float:
        known = row.job.start_s
        return self._options.start_stall_s if known is None else known


def _lengths(job_rows: Sequence[JobRow]) -> tuple[FloatArray, FloatArray]:
    """Return remaining and total seconds on one slot, shape (J,) each.

    Unknown lengths count as half the median of the others, as in the weights.
    """
    left_s = np.array([row.remaining_s for row in job_rows], dtype=np.float64)
    known = left_s[np.isfinite(left_s)]
    usual = float(np.median(known)) / 2.0 if len(known) else UNKNOWN_S
    left_s = np.where(np.isfinite(left_s), left_s, usual)
    done_s = [
        row.job.samples_done / row.table.one_speed
        if row.table.known and row.table.one_speed > 0.0
        else 0.0
        for row in job_rows
    ]
    return left_s, left_s + np.array(done_s)


def _levels(job_rows: Sequence[JobRow], table: ValueTable, speed: FloatArray) -> IntArray:
    """Return the lowest allowed level that is as fast as `speed`, else the highest; shape (J,)."""
    gains = np.full(table.sizes.shape, -np.inf)
    for at, row in enumerate(job_rows):
        gains[at, 1 : 1 + len(row.table.gains)] = row.table.gains
    gains[~np.isfinite(table.value)] = -np.inf
    fast = gains >= (speed * (1.0 - ROUNDING))[:, None]
    levels = np.arange(table.sizes.shape[1])
    highest = np.where(np.isfinite(gains), levels, 0).max(axis=1)
    return np.asarray(np.where(fast.any(axis=1), fast.argmax(axis=1), highest), dtype=np.int64)


def _penalties(table: ValueTable, level: IntArray, urgency: FloatArray) -> FloatArray:
    """Return the penalty of each level below the one that is due, shape (J, 1 + L).

    The penalty exceeds, for each slot, what any slot is worth to any job. It grows without bound
    the further a job is behind, so that no job stays behind.
    """
    sizes, value = table.sizes, table.value
    base = np.where(np.isfinite(value[:, 0]), value[:, 0], 0.0)[:, None]
    allowed = np.isfinite(value) & (sizes > 0)
    slopes = np.divide(value - base, sizes, out=np.zeros(value.shape), where=allowed)
    claim = sizes[np.arange(len(level)), level] * PENALTY_RATIO * float(slopes.max()) * urgency
    below = np.arange(sizes.shape[1]) < level[:, None]
    return np.where(below, claim[:, None], 0.0)
