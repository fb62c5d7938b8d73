"""The rows of jobs: batch, speed and speed-up at each size, and the costs of changes."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import JobView
from controlplane.policy.ones.job_estimates import Estimates, EstimateVersion
from controlplane.policy.ones.job_history import BatchHold
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import NO_CLUSTER, ClusterIndex
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.slowdowns import stretch_alone
from controlplane.prediction.throughput import SpeedModel, statistical_efficiency
from schemas.ids import JobId, Seconds

BATCHES_PER_DOUBLING: Final = 6  # batches tried per doubling, from the first batch to the limit
BATCH_MARGIN: Final = 0.03  # least gain in goodput of a new batch on the same slots, as a share
GROWTH: Final = 2  # most growth in one change, over the largest size that the family has run
NO_TIME_S: Final = 1e-12  # lower bound of a divisor
ROUNDING: Final = 1e-9  # tolerance of logarithms, so that the limit itself is on the grid


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The sizes that a job may have now, with speeds and batches; arrays have shape (L,)."""

    sizes: IntArray  # slots, ascending
    nodes: IntArray  # fewest nodes for each size; the actual number at the present size
    batches: IntArray  # best global batch within all limits
    speeds: FloatArray  # samples/s at these batches; relative unless `known`
    goodputs: FloatArray  # speeds times statistical efficiency
    gains: FloatArray  # x(n): goodput of the best batch, ignoring R, over that on one slot
    known: bool  # True if speeds are in samples/s
    one_speed: float  # goodput of the best batch on one slot
    noise_scale: float
    stretch: FloatArray  # factor of step times because the job's own workers share cores


def size_table(
    job: JobView,
    estimates: Estimates,
    sizes: IntArray,
    nodes: IntArray,
    *,
    hold: BatchHold,
    cores: float = math.inf,
) -> SizeTable:
    """Return the table of speed, batch and goodput of `job` for `sizes`, shape (L,), on `nodes`.

    The chosen batch has the most goodput at the present noise scale. It is within R, the user's
    bounds and twice the present or last batch. The *value* of a size assumes the best batch within
    the user's bounds alone: R doubles every few steps, so a job that has not ramped up yet would
    otherwise look slow, long and poorly scaling. Without a noise scale the largest batch would
    always win, so the prior noise scale is a few times the first batch.

    Args:
        hold: allowed changes of the present batch at the present size.
        cores: number of cores that the slots of a node share; infinite: each slot has its own.
    """
    model = estimates.families[job.family].speed_model(job.batch_size)
    noise = estimates.noise_scale(job)
    every = np.concatenate([np.ones(1, dtype=np.int64), sizes])
    spans = np.concatenate([np.ones(1, dtype=np.int64), nodes])
    shared = stretch_alone(every, spans, cores)

    def rate(grid: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return speed, goodput, and goodput with 0 above the local limit, (1 + L, B) each."""
        local = np.ceil(grid / every[:, None])
        step_s = model.step_s(spans[:, None], every[:, None], local)
        speeds = grid / np.maximum(step_s * shared[:, None], NO_TIME_S)
        useful = speeds * statistical_efficiency(grid, job.batch_size, noise)
        return speeds, useful, np.where(local <= job.local_limit, useful, 0.0)

    present = sum(job.running_on.values())
    most = min(estimates.limit(job), job.batch_limit)
    if last := present or job.last_batch:
        most = min(most, max(2 * last, job.batch_size))
    grid = _grid(job, every, most, BATCHES_PER_DOUBLING)
    held = np.flatnonzero(every[1:] == len(job.running_on)) + 1  # row of the present size
    keeps = bool(present and len(held) and present <= most)
    if keeps:  # the present batch is the last column
        grid = np.column_stack([grid, np.maximum(every, present).astype(np.float64)])
    speeds, useful, goodputs = rate(grid)
    if keeps:
        row = held[0]
        if hold is BatchHold.GROW_ONLY:
            goodputs[row, grid[row] < present] = 0.0
        elif hold is BatchHold.SHRINK_ONLY:
            goodputs[row, grid[row] > present] = 0.0
        _prefer_present(goodputs, int(row), useful[row, -1])
    rows, best = np.arange(len(every)), goodputs.argmax(axis=1)
    good = goodputs[rows, best]
    free = _grid(job, every, job.batch_limit, BATCHES_PER_DOUBLING)
    worth = np.maximum(good, rate(free)[2].max(axis=1))
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
        stretch=shared[1:],
    )


def _grid(job: JobView, every: IntArray, most: int, per_doubling: int) -> FloatArray:
    """Return the global batches to try at each size, ascending from the first, shape (1 + L, B).

    No batch is smaller than the number of slots, because each slot needs a sample.
    """
    first, most = job.batch_size, max(most, job.batch_size)
    steps = int(np.floor(per_doubling * np.log2(most / first) + ROUNDING))
    doublings = first * np.power(2.0, np.arange(steps + 1) / per_doubling)
    totals = np.unique(np.append(doublings.round(), float(most)))
    return np.asarray(np.maximum(totals[None, :], every[:, None].astype(np.float64)))


def _prefer_present(goodputs: FloatArray, row: int, present: float) -> None:
    """Keep only the present batch in `row` unless another batch is better by `BATCH_MARGIN`.

    `goodputs`, shape (1 + L, B), has the present batch in the last column.
    """
    others = goodputs[:, :-1]
    goodputs[row, -1] = present
    if others[row].max() <= present * (1.0 + BATCH_MARGIN):
        others[row] = 0.0
    goodputs[:row, -1] = goodputs[row + 1 :, -1] = 0.0


# Without the numbers below and `change_margin`, i.e. with free changes, jobs take 15% longer on
# average (docs/evolution.md, `term_stall`). The three numbers are the prototype's, not tuned alone.
STALL_WEIGHT: Final = 2.5
STALL_FROM_S, STALL_TO_S = 10.0, 900.0
MIN_SHARE: Final = 0.05  # lower bound of the share that a change leaves; keeps values above 0
MIN_GAIN: Final = 1e-9  # lower bound of a divisor


def stall_share(left_s: FloatArray | float, stall_s: float, margin: float) -> FloatArray:
    """Return the share of a value that is left after a stall; the shape is that of `left_s`.

    The share is 1 - max(2.5 stall / clamp(left, 10 s, 900 s), margin), but at least `MIN_SHARE`.
    """
    lost = STALL_WEIGHT * stall_s / np.clip(left_s, STALL_FROM_S, STALL_TO_S)
    return np.asarray(np.maximum(1.0 - np.maximum(lost, margin), MIN_SHARE))


@dataclass(frozen=True, slots=True)
class SlotSupply:
    """The slots that the search can distribute."""

    capacity: int  # slots in play: free slots, slots free soon, and those of movable jobs
    idle: int  # free slots and slots free soon
    contended: bool  # some waiting job would fit
    now: Seconds


@dataclass(frozen=True, slots=True)
class JobRow:
    """Row of one job that may be started or changed."""

    job: JobView
    now: tuple[int, ...]  # the job's slots, as places in `ClusterIndex.slots`
    level: int  # level of the present size; 0: the job waits, k: table.sizes[k - 1]
    table: SizeTable
    limit: int  # R
    remaining_s: float  # T1, the time on one slot; nan: unknown
    change_factor: FloatArray  # c(n) for each size
    move_factor: float  # c after a move to other slots at the present size
    restart_factor: float  # share of the value left after a stop and restart; 1 if the job waits
    model: SpeedModel
    gated: bool
    growth_loss: float | None = None  # progress now / progress before, if the last growth lost
    moves_to: tuple[int, ...] = ()  # places that a half-migrated job will keep

    @property
    def present(self) -> tuple[float, float]:
        """Predicted speed and goodput with the present slots and batch."""
        slots, batch = len(self.now), sum(self.job.running_on.values())
        at = int(np.searchsorted(self.table.sizes, slots))
        nodes = np.array([self.table.nodes[at]])
        local = np.array([np.ceil(batch / slots)])
        step_s = float(
            self.model.step_s(nodes, np.array([slots]), local)[0] * self.table.stretch[at]
        )
        value = statistical_efficiency(
            np.array([float(batch)]), self.job.batch_size, self.table.noise_scale
        )
        return batch / step_s, batch / step_s * float(value[0])


MAX_TABLES: Final = 20_000  # bounds memory; a full cache is cleared
ANY_SIZE: Final = 4  # slots; above this and a node's width: whole nodes (README, "Numbers")
_Key = tuple[object, ...]


class _CachedRow(NamedTuple):
    """Row with the inputs that it depends on; `version` is cheap to compare, `key` complete."""

    version: EstimateVersion | None
    capacity: int
    key: _Key
    row: JobRow


class JobRowBuilder:
    """Builder of the rows of jobs, which caches the rows of unchanged jobs."""

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._cluster = NO_CLUSTER
        self._rows: dict[JobId, _CachedRow] = {}
        self._tables: dict[_Key, SizeTable] = {}

    def update(self, cluster: ClusterIndex, active: Container[JobId], many: int) -> None:
        """Set the cluster; if too many rows are cached, keep those of the `many` active jobs."""
        if cluster is not self._cluster:
            self._cluster = cluster
            self._rows.clear()
        if len(self._rows) > 2 * many + 100:
            self._rows = {name: row for name, row in self._rows.items() if name in active}

    def row(self, job: JobView, supply: SlotSupply) -> JobRow:
        """Return the row of a job."""
        estimates = self._estimates
        known = self._rows.get(job.job)
        if known is not None and known.row.job is not job:
            known = None
        before = known.version if known and known.capacity == supply.capacity else None
        if known and before and estimates.is_current(job, before, supply.now):
            return known.row
        family = estimates.families[job.family]
        model = family.speed_model(job.batch_size)  # may fit again, changing the edition
        version = estimates.version(job, supply.now)
        if known and before and before == version:
            return known.row
        losing = estimates.growth_loss(job) if job.running_on else None
        moves_to = estimates.moves_to(job) if job.running_on else None
        settles = losing is None and moves_to is None
        gated = bool(job.running_on) and settles and supply.now < estimates.gate(job)
        limit, warm = estimates.limit(job), estimates.warm(job)
        samples = estimates.lengths.remaining(job)
        size = len(job.running_on)
        most = min(job.most, supply.capacity)
        tried = estimates.max_slots_after_return(job, supply.now)
        if tried is not None:
            most = min(most, max(size, tried))
        noise = estimates.noise_scale(job)
        others = _coarse(estimates.remaining_service(job, supply.now))
        hold = estimates.batch_hold(job, supply.now)
        key = (
            family.edition, hold, noise, limit, warm, gated, losing and losing[1], moves_to,
            samples, most, family.largest, others,
        )  # fmt: skip
        if known is not None and known.key == key:
            self._rows[job.job] = known._replace(version=version, capacity=supply.capacity)
            return known.row
        sizes, place_of = self._sizes(job, most, limit, warm=warm), self._cluster.place_of
        now_on = tuple(place_of[slot] for slot in job.running_on if slot in place_of)
        nodes = np.maximum(1, -(-sizes // self._cluster.widest))
        nodes[sizes == size] = max(1, len({int(self._cluster.node_of[place]) for place in now_on}))
        table = self._table(job, (family.edition, limit, hold), noise, sizes, nodes)
        one_s = math.nan
        if samples is not None and table.known and table.one_speed > 0:
            one_s = samples / table.one_speed
        if others is not None:
            one_s = others if math.isnan(one_s) else max(one_s, others)
        due = losing[1] if losing else len(moves_to) if moves_to else None
        change, move, restart = self._factors(job, table, one_s, due)
        row = JobRow(
            job=job,
            now=now_on,
            level=int(np.searchsorted(sizes, size)) + 1 if size else 0,
            table=table,
            limit=limit,
            remaining_s=one_s,
            change_factor=change,
            move_factor=move,
            restart_factor=restart,
            model=model,
            gated=gated,
            growth_loss=losing[0] if losing else None,
            moves_to=tuple(place_of[slot] for slot in sorted(moves_to or ())),
        )
        self._rows[job.job] = _CachedRow(version, supply.capacity, key, row)
        return row

    def _table(
        self,
        job: JobView,
        known: tuple[int, int, BatchHold],
        noise: float,
        sizes: IntArray,
        nodes: IntArray,
    ) -> SizeTable:
        """Return the size table of a job; similar jobs of a family share one table."""
        cores = self._cluster.most_cores
        key = (
            job.family, known, job.batch_size, job.batch_limit, job.local_limit, noise,
            job.last_batch, len(job.running_on), sum(job.running_on.values()),
            cores, sizes.tobytes(), nodes.tobytes(),
        )  # fmt: skip
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) > MAX_TABLES:
                self._tables.clear()
            found = self._tables[key] = size_table(
                job, self._estimates, sizes, nodes, hold=known[2], cores=cores
            )
        return found

    def _factors(
        self, job: JobView, table: SizeTable, one_s: float, due: int | None
    ) -> tuple[FloatArray, float, float]:
        """Return the shares of a job's value that changes to each size, a move and a restart leave.

        A first start is free, since every job needs one. A change to size `due` costs only its
        stall: it undoes a growth, completes a move, or leaves a place that lost progress.
        """
        options, size = self._options, len(job.running_on)
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(table.sizes)), 1.0, 1.0
        length = one_s if math.isfinite(one_s) else 0.0
        start_s = job.start_s if job.start_s is not None else options.start_stall_s
        stall_s = options.rescale_stall_s if size else start_s
        left_s = length / np.maximum(table.gains, MIN_GAIN)
        change = stall_share(left_s, stall_s, options.change_margin)
        change = np.where(table.sizes == size, 1.0, change)
        if due is not None and due != size:
            change = np.where(table.sizes == due, stall_share(left_s, stall_s, 0.0), change)
        if not size:
            return change, 1.0, 1.0
        gain = float(table.gains[np.searchsorted(table.sizes, size)])
        margin = 0.0 if due == size else options.change_margin
        move = float(stall_share(length / max(gain, MIN_GAIN), stall_s, margin))
        return change, move, float(stall_share(length, start_s, options.change_margin))

    def _sizes(self, job: JobView, most: int, limit: int, *, warm: bool) -> IntArray:
        """Return the allowed sizes: up to 4 or a node's width, whole nodes, the present size."""
        size = len(job.running_on)
        least = min(job.least, size) if size else job.least
        most = min(most, max(min(limit, job.batch_limit), job.least))
        if warm:
            largest = max(size, self._estimates.families[job.family].largest, job.least)
            most = min(most, GROWTH * largest)
        else:  # before the warm-up steps are done: one slot
            most = min(most, max(size, least))
        widest = self._cluster.widest
        choices = set(range(least, min(max(widest, ANY_SIZE), most) + 1))
        choices.update(n for n in range(widest, most + 1, widest) if n >= least)
        return np.array(sorted(choices | {size or job.least}), dtype=np.int64)


def _coarse(service: float | None) -> float | None:
    """Round slot seconds to a quarter of a doubling, because they change every second."""
    if service is None or service <= 0.0:
        return None
    return float(2.0 ** (round(4.0 * math.log2(service)) / 4.0))
