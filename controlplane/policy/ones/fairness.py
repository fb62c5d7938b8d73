"""Option `max_stretch`: no job takes longer than this multiple of the time of its fair share.

A job's fair share is 1 / n of the cluster, with n the mean number of jobs over its life (Themis,
NSDI '20; Shockwave, NSDI '23). A job that would exceed the limit with only its share from now on is
due the smallest size that is as fast as that share. Less than this size costs more than any other
use of its slots is worth, in greedy filling and in the fitness alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.problem import FairnessFloors, JobRow
from controlplane.policy.ones.size_values import UNKNOWN_S, ValueTable
from controlplane.policy.options import OnesOptions
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds


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
