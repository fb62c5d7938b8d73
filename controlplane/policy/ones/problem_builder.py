"""Problem of a view: jobs and slots in play, the value of each size, and what is due to jobs.

Candidates are scored by V = weight (x c)^0.8, with speed-up x and the share c that a change leaves.
With option `max_stretch`, each job is to end within this multiple of its time on its fair share.
The fair share is 1 / n of the cluster, with n the mean number of jobs over the job's life (Themis,
NSDI '20; Shockwave, NSDI '23). If a job would exceed the limit with just its share from now on, its
due size is the smallest that is as fast as its share. A smaller size is penalised by more than any
other use of its slots is worth, both in greedy filling and in the fitness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_rows import MIN_GAIN, JobRow, JobRowBuilder, SlotSupply
from controlplane.policy.ones.problem import (
    CLOSED,
    FREE,
    FairnessFloors,
    Problem,
)
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import ClusterIndex, ClusterIndexCache
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

UNKNOWN_S: Final = 60.0  # remaining time of all jobs if none is known


def known_lengths(remaining_s: FloatArray) -> FloatArray:
    """Return the jobs' seconds on one slot, shape (J,); nan becomes half the median length."""
    known = np.isfinite(remaining_s)
    usual = float(np.median(remaining_s[known])) / 2.0 if known.any() else UNKNOWN_S
    return np.where(known, remaining_s, usual)


def remaining_of(job_rows: Sequence[JobRow]) -> FloatArray:
    """Return the remaining seconds on one slot of each row, by `known_lengths`."""
    return known_lengths(np.array([row.remaining_s for row in job_rows], dtype=np.float64))


# --- jobs and slots in play


@dataclass(frozen=True, slots=True)
class InPlay:
    """The jobs and slots of one view, grouped by what may be done with them now."""

    jobs: dict[JobId, JobView]  # jobs that may be started or changed, and fit into the cluster
    kept: dict[JobId, dict[SlotId, int]]  # local batches of jobs that may not be moved now
    backing_off: dict[JobId, Seconds]  # when waiting jobs may be retried
    too_large: dict[JobId, int]  # least slots of jobs that do not fit into the cluster
    free_now: tuple[int, ...]  # places of free slots
    free_soon: tuple[int, ...]  # places of slots with leaving processes
    supply: SlotSupply


def in_play(view: ClusterView, now: Seconds) -> InPlay:
    """Return the jobs and slots of `view` in groups; each group keeps the view's order."""
    movable: dict[JobId, JobView] = {}
    backing_off: dict[JobId, Seconds] = {}
    kept: dict[JobId, dict[SlotId, int]] = {}
    up = {slot.slot for slot in view.slots if slot.up}
    for name, job in view.jobs.items():
        stuck = not job.movable or job.retry_at > now or not job.running_on.keys() <= up
        if job.running_on and stuck:  # slots of a down node cannot be reassigned
            kept[name] = dict(job.running_on)
        elif job.movable and not job.running_on and job.ready_at > now:
            backing_off[name] = job.ready_at
        elif job.movable:
            movable[name] = job
    mine = {slot for job in movable.values() for slot in job.running_on}
    closed = {slot for placed in kept.values() for slot in placed} | mine
    free = [(at, slot) for at, slot in enumerate(view.slots) if slot.slot not in closed]
    free_now = tuple(at for at, slot in free if slot.usable)
    free_soon = tuple(at for at, slot in free if slot.leaving)
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
        free_now=free_now,
        free_soon=free_soon,
        supply=SlotSupply(capacity=len(mine) + idle, idle=idle, contended=contended, now=now),
    )


# --- values of sizes


PATIENCE_S: Final = 300.0  # added to every remaining time; a judgement
CROWDED_SIZE_EXPONENT: Final = 0.3  # of remaining times, at two or more jobs per slot


def weights(
    remaining: FloatArray,
    gains: FloatArray,
    waited: FloatArray,
    ran: FloatArray,
    options: OnesOptions,
    *,
    load: float,
) -> FloatArray:
    """Return (T1 + patience)^-0.55; where jobs queue, long waits count too.

    An unknown length is taken to be half the median of the known lengths. The patience is
    `PATIENCE_S`, but at most a quarter of the mean length, so that seconds differ from minutes
    where jobs last minutes.

    As the load rises from 1 to 2, the exponent changes to -0.3, and a factor response ratio^1
    appears (both in the share `ageing`). The response ratio is 1 + waited / (ran + T + patience),
    with T at a job's least size. It grows without bound while the job waits, so that no job starves
    behind a stream of short ones.

    Args:
        remaining: T1, shape (J,), seconds on one slot; nan if unknown.
        gains: x at the least size of each job, shape (J,).
        waited: shape (J,), seconds without slots since the submission.
        ran: shape (J,), seconds with slots.
        load: slots that all jobs need at least, divided by the slots in play.
    """
    length = known_lengths(remaining)
    patience = min(PATIENCE_S, float(np.mean(length)) / 4.0) if len(length) else 0.0
    crowded = options.ageing * min(max(load - 1.0, 0.0), 1.0)
    exponent = options.size_exponent + crowded * (CROWDED_SIZE_EXPONENT - options.size_exponent)
    short = np.power(np.maximum(length + patience, 1.0), -exponent)
    service = ran + length / np.maximum(gains, MIN_GAIN) + patience
    response = 1.0 + waited / np.maximum(service, 1.0)
    return np.asarray(short * np.power(response, crowded))


@dataclass(frozen=True, slots=True)
class ValueTable:
    """The values by job and level; at level 0 a job waits."""

    sizes: IntArray  # shape (J, 1 + L), slots; 0 beyond what a job may have
    spans: IntArray  # shape (J, 1 + L), nodes that the value assumes
    value: FloatArray  # shape (J, 1 + L), V; -inf where a level is not allowed


def value_table(job_rows: Sequence[JobRow], supply: SlotSupply, options: OnesOptions) -> ValueTable:
    """Return the value of every size of every job: V(n) = weight (x(n) c(n))^0.8.

    The paper minimises the sum over *running* jobs of T c (eq. 3, 8), which rewards leaving jobs
    out. Here a sum over all jobs is maximised, in which a waiting job has value 0. Length (in
    `weight`) and speed-up have one exponent each.

    A gated job may grow onto idle slots, and may shrink for a waiting job, but is not stopped.
    Stopping a job that is not gated costs what its restart will cost, plus a margin.
    """
    weight = _weight(job_rows, supply, options)
    sizes, spans, gains = _stacked(job_rows)
    value = weight[:, None] * np.power(np.maximum(gains, 0.0), options.speedup_exponent)
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
    return ValueTable(sizes, spans, value)


def _weight(job_rows: Sequence[JobRow], supply: SlotSupply, options: OnesOptions) -> FloatArray:
    now, load = supply.now, sum(row.job.least for row in job_rows) / max(1, supply.capacity)
    remaining, gains, waited, ran, priority = np.array([
        (
            row.remaining_s,
            row.table.gains[0],
            row.job.waited_s + (0.0 if row.job.running_on else max(0.0, now - row.job.moved_at)),
            row.job.ran_s,
            row.job.priority,
        )
        for row in job_rows
    ], dtype=np.float64).reshape(-1, 5).T  # fmt: skip
    return weights(remaining, gains, waited, ran, options, load=load) * priority


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


# --- fair shares


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """Load at the time when a job was first seen."""

    at: Seconds  # when the job was first seen
    area: float  # integral of active jobs over time up to then, job seconds
    active_jobs: int  # number of active jobs at that time


class LoadAverage:
    """The mean number of active jobs over the life of each job."""

    def __init__(self) -> None:
        self._area = 0.0  # integral of active jobs over time, job seconds
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

        Before the job was first seen, the number of jobs at that moment counts.
        """
        seen = self._seen[job.job]
        before = max(0.0, seen.at - job.submitted_at)
        life = before + self._now - seen.at
        if life <= 0.0:
            return float(max(1, self._jobs))
        return max(1.0, (before * seen.active_jobs + self._area - seen.area) / life)


DUE_RATIO: Final = 0.9  # share of the limit; below 1 because predictions err; a judgement
PENALTY_RATIO: Final = 2.0  # multiple of the highest value of a slot; a judgement
TOLERANCE: Final = 1e-6  # relative tolerance of speeds
MIN_S: Final = 1e-6  # lower bound of fair-share times and of speeds


def fairness_floors(
    job_rows: Sequence[JobRow],
    table: ValueTable,
    load: LoadAverage,
    options: OnesOptions,
    *,
    slots: int,
    now: Seconds,
) -> FairnessFloors:
    """Return each job's stretch and due size in a cluster with `slots` slots."""
    limit = options.max_stretch
    left_s = remaining_of(job_rows)
    done_s = [
        row.job.samples_done / row.table.one_speed
        if row.table.known and row.table.one_speed > 0.0
        else 0.0
        for row in job_rows
    ]
    speed = np.array([_fair_speed(row, slots, load.mean(row.job)) for row in job_rows])
    known_s = (row.job.start_s for row in job_rows)
    start_s = np.array([options.start_stall_s if known is None else known for known in known_s])
    fair_s = np.maximum(start_s + (left_s + np.array(done_s)) / speed, MIN_S)
    so_far = np.array([max(0.0, now - row.job.submitted_at) for row in job_rows])
    so_far += np.where([bool(row.now) for row in job_rows], 0.0, start_s)
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


def _fair_speed(row: JobRow, slots: int, jobs: float) -> float:
    """Return the speed of a job on its fair share, divided by its speed on one slot."""
    sizes = row.table.sizes
    usual = max(0, int(np.searchsorted(sizes, row.job.wanted, side="right")) - 1)
    share = slots / (jobs * float(sizes[usual]))
    return max(MIN_S, float(row.table.gains[usual]) * min(1.0, share))


def _levels(job_rows: Sequence[JobRow], table: ValueTable, speed: FloatArray) -> IntArray:
    """Return the lowest allowed level as fast as `speed`, else the highest allowed; shape (J,)."""
    gains = np.full(table.sizes.shape, -np.inf)
    for at, row in enumerate(job_rows):
        gains[at, 1 : 1 + len(row.table.gains)] = row.table.gains
    gains[~np.isfinite(table.value)] = -np.inf
    fast = gains >= (speed * (1.0 - TOLERANCE))[:, None]
    levels = np.arange(table.sizes.shape[1])
    highest = np.where(np.isfinite(gains), levels, 0).max(axis=1)
    return np.asarray(np.where(fast.any(axis=1), fast.argmax(axis=1), highest), dtype=np.int64)


def _penalties(table: ValueTable, level: IntArray, urgency: FloatArray) -> FloatArray:
    """Return the penalty of each level below the due level, shape (J, 1 + L).

    It exceeds what any slot is worth to any job, and grows without bound as the job falls behind.
    """
    sizes, value = table.sizes, table.value
    base = np.where(np.isfinite(value[:, 0]), value[:, 0], 0.0)[:, None]
    allowed = np.isfinite(value) & (sizes > 0)
    slopes = np.divide(value - base, sizes, out=np.zeros(value.shape), where=allowed)
    claim = sizes[np.arange(len(level)), level] * PENALTY_RATIO * float(slopes.max()) * urgency
    below = np.arange(sizes.shape[1]) < level[:, None]
    return np.where(below, claim[:, None], 0.0)


# --- the problem


class ProblemBuilder:
    """Builder of problems, which updates `estimates` with each view and caches unchanged parts."""

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._rows = JobRowBuilder(estimates, options)
        self._load = LoadAverage()

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """Return the problem of `view` at `now`."""
        cluster, found = self._update(view, now)
        options = self._options
        job_rows = [self._rows.row(job, found.supply) for job in found.jobs.values()]
        table = value_table(job_rows, found.supply, options)
        families = [row.job.family for row in job_rows]
        floors = None
        if options.max_stretch:
            self._load.update(view.jobs, now)
            if job_rows:
                floors = fairness_floors(
                    job_rows, table, self._load, options, slots=len(view.slots), now=now
                )
        return Problem(
            job_rows=tuple(job_rows),
            kept=found.kept,
            cluster=cluster,
            owner=_owners(len(view.slots), job_rows, found),
            early=np.isin(np.arange(len(view.slots)), found.free_now),
            sizes=table.sizes,
            spans=table.spans,
            value=table.value,
            present=np.array([row.level for row in job_rows], dtype=np.int64),
            move_factor=np.array([row.move_factor for row in job_rows], dtype=np.float64),
            free_to_move=np.array(
                [bool(row.now) and not row.gated for row in job_rows], dtype=np.bool_
            ),
            backing_off=found.backing_off,
            gates=tuple(self._estimates.gate(row.job) for row in job_rows if row.gated),
            too_large=found.too_large,
            capacity=found.supply.capacity,
            speedup_exponent=options.speedup_exponent,
            slow=self._estimates.type_slowdowns(cluster.types, families),
            floors=floors,
        )

    def rows(self, view: ClusterView, jobs: Iterable[JobId], now: Seconds) -> list[JobRow]:
        """Return the rows of the running, changeable jobs among `jobs`; build no problem."""
        _, found = self._update(view, now)
        chosen = [found.jobs[name] for name in jobs if name in found.jobs]
        return [self._rows.row(job, found.supply) for job in chosen if job.running_on]

    def _update(self, view: ClusterView, now: Seconds) -> tuple[ClusterIndex, InPlay]:
        cluster, found = self._clusters.of(view), in_play(view, now)
        self._estimates.update(view, contended=found.supply.contended, now=now)
        self._rows.update(cluster, view.jobs, len(view.jobs))
        return cluster, found


def _owners(slots: int, job_rows: Sequence[JobRow], found: InPlay) -> IntArray:
    """Return the row of the job on each slot, shape (S,); `FREE` or `CLOSED` if there is none."""
    owner = np.full(slots, CLOSED, dtype=np.int64)
    owner[list(found.free_now)] = owner[list(found.free_soon)] = FREE
    for row, job_row in enumerate(job_rows):
        owner[list(job_row.now)] = row
    return owner
