"""Builder of search problems from views; caches what has not changed since the last view.

`JobRowBuilder` makes the row of one job: the sizes that it may have, and the cost of changes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.job_estimates import Estimates, EstimateVersion
from controlplane.policy.ones.problem import CLOSED, FREE, InterferenceModel, JobRow, Problem
from controlplane.policy.ones.size_table import SizeTable, size_table
from controlplane.policy.ones.size_values import (
    FairShares,
    InPlay,
    SlotSupply,
    in_play,
    kept_share,
    left_after,
    remaining_s,
    value_table,
)
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.cluster_index import NO_CLUSTER, ClusterIndex, ClusterIndexCache
from controlplane.prediction import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

MAX_TABLES: Final = 20_000  # bound on memory; the cache is then cleared
ANY_SIZE: Final = 4  # slots; up to this size a job need not fill its nodes (README, "Numbers")
_Key = tuple[object, ...]


class _CachedRow(NamedTuple):
    """Cached row: `version` is cheap to compare, `key` contains the inputs."""

    version: EstimateVersion | None
    capacity: int
    key: _Key
    row: JobRow


class JobRowBuilder:
    """Builder of rows of jobs; caches the rows of unchanged jobs."""

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._cluster = NO_CLUSTER
        self._rows: dict[JobId, _CachedRow] = {}
        self._tables: dict[_Key, SizeTable] = {}

    def update(self, cluster: ClusterIndex, active: Container[JobId], many: int) -> None:
        """Set the cluster, and drop the rows of jobs that are not active if there are many."""
        if cluster is not self._cluster:
            self._cluster = cluster
            self._rows.clear()
        if len(self._rows) > 2 * many + 100:
            self._rows = {name: row for name, row in self._rows.items() if name in active}

    def row(self, job: JobView, supply: SlotSupply) -> JobRow:
        """Return the row of a job."""
        estimates = self._estimates
        known = self._rows.get(job.job)
        if (
            known is not None
            and known.row.job is job
            and known.version is not None
            and known.capacity == supply.capacity
            and estimates.is_current(job, known.version, supply.now)
        ):
            return known.row
        family = estimates.family(job.family)
        family.speed_model(job.batch_size)  # may fit the model again and change its edition
        version = estimates.version(job, supply.now)
        if (
            known is not None
            and known.row.job is job
            and version is not None
            and known.version == version
            and known.capacity == supply.capacity
        ):
            return known.row
        losing = estimates.growth_loss(job) if job.running_on else None
        moves_to = estimates.moves_to(job) if job.running_on else None
        settles = losing is None and moves_to is None
        gated = bool(job.running_on) and settles and estimates.gated(job, supply.now)
        limit, warm = estimates.limit(job), estimates.warm(job)
        samples = estimates.remaining(job)
        size = len(job.running_on)
        most = min(job.most, supply.capacity)
        tried = estimates.max_slots_after_return(job, supply.now)
        if tried is not None:
            most = min(most, max(size, tried))
        noise = estimates.noise_scale(job)
        others = _coarse(estimates.remaining_service(job, supply.now))
        key = (
            family.edition, noise, limit, warm, gated, losing and losing[1], moves_to, samples,
            most, family.largest, others,
        )  # fmt: skip
        if known is not None and known.key == key and known.row.job is job:
            self._rows[job.job] = known._replace(version=version, capacity=supply.capacity)
            return known.row
        sizes = self._sizes(job, most, limit, warm=warm)
        row = self._make_row(
            job,
            sizes,
            noise,
            limit=limit,
            samples=samples,
            others=others,
            gated=gated,
            losing=losing,
            moves_to=moves_to,
        )
        self._rows[job.job] = _CachedRow(version, supply.capacity, key, row)
        return row

    def _make_row(
        self,
        job: JobView,
        sizes: IntArray,
        noise: float,
        *,
        limit: int,
        samples: float | None,
        others: float | None,
        gated: bool,
        losing: tuple[float, int] | None,
        moves_to: frozenset[SlotId] | None,
    ) -> JobRow:
        family = self._estimates.family(job.family)
        size, place_of = len(job.running_on), self._cluster.place_of
        now_on = tuple(place_of[slot] for slot in job.running_on if slot in place_of)
        nodes = np.maximum(1, -(-sizes // self._cluster.widest))
        nodes[sizes == size] = max(1, len({int(self._cluster.node_of[place]) for place in now_on}))
        keep_batch = gated and not self._options.rebatch
        table = self._table(job, (family.edition, limit, keep_batch), noise, sizes, nodes)
        due = losing[1] if losing else len(moves_to) if moves_to else None
        one_s = remaining_s(samples, table.one_speed, known=table.known)
        if others is not None:
            one_s = others if math.isnan(one_s) else max(one_s, others)
        return JobRow(
            job=job,
            now=now_on,
            level=int(np.searchsorted(sizes, size)) + 1 if size else 0,
            table=table,
            limit=limit,
            remaining_s=one_s,
            change_factor=self._change_factor(job, table, one_s, size, due),
            move_factor=self._move_factor(table, one_s, size, due),
            restart_factor=self._restart_factor(job, one_s),
            model=family.speed_model(job.batch_size),
            gated=gated,
            growth_loss=losing[0] if losing else None,
            moves_to=tuple(place_of[slot] for slot in sorted(moves_to or ())),
        )

    def _table(
        self,
        job: JobView,
        known: tuple[int, int, bool],
        noise: float,
        sizes: IntArray,
        nodes: IntArray,
    ) -> SizeTable:
        """Return the size table, which similar jobs of a family share."""
        key = (
            job.family, known, job.batch_size, job.batch_limit, job.local_limit, noise,
            job.last_batch, len(job.running_on), sum(job.running_on.values()),
            self._cluster.most_cores, sizes.tobytes(), nodes.tobytes(),
        )  # fmt: skip
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) > MAX_TABLES:
                self._tables.clear()
            found = self._tables[key] = size_table(
                job,
                self._estimates,
                self._options,
                sizes,
                nodes,
                keep_batch=known[2],
                cores=self._cluster.most_cores,
            )
        return found

    def _change_factor(
        self,
        job: JobView,
        known: SizeTable,
        one_s: float,
        size: int,
        due: int | None,
    ) -> FloatArray:
        """Return the share of its value that a job keeps after a change to each size.

        A first start is free, since every job needs one. Size `due`, which takes a growth back or
        completes a move, costs its stall alone.
        """
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(known.sizes))
        stall = self._options.rescale_stall_s
        if not size:
            stall = self._start_stall(job)
        length = one_s if math.isfinite(one_s) else 0.0
        kept = kept_share(known, length, stall, self._options.change_margin, size)
        if due is None:
            return kept
        cheaper = kept_share(known, length, stall, 0.0, size)
        return np.where(known.sizes == due, cheaper, kept)

    def _move_factor(self, known: SizeTable, one_s: float, size: int, due: int | None) -> float:
        """Return the share of its value that a job keeps after a move at the same size.

        If the present place loses (`due` is the present size), the move costs its stall alone.
        """
        if not size:
            return 1.0
        gain = float(known.gains[np.searchsorted(known.sizes, size)])
        left_s = (one_s if math.isfinite(one_s) else 0.0) / max(gain, 1e-9)
        margin = 0.0 if due == size else self._options.change_margin
        return left_after(left_s, self._options.rescale_stall_s, margin)

    def _restart_factor(self, job: JobView, one_s: float) -> float:
        if not job.running_on:
            return 1.0
        left_s = one_s if math.isfinite(one_s) else 0.0
        return left_after(left_s, self._start_stall(job), self._options.change_margin)

    def _start_stall(self, job: JobView) -> float:
        return job.start_s if job.start_s is not None else self._options.start_stall_s

    def _sizes(self, job: JobView, most: int, limit: int, *, warm: bool) -> IntArray:
        """Return allowed sizes: up to 4 or a node's width, whole nodes, the present size."""
        size = len(job.running_on)
        least = min(job.least, size) if size else job.least
        most = min(most, max(min(limit, job.batch_limit), job.least))
        first = self._options.first_slots
        if warm:
            largest = max(size, self._estimates.family(job.family).largest, job.least)
            most = min(most, max(first, int(self._options.growth * largest)))
        else:  # Start: one slot until the warm-up steps are done
            most = min(most, max(size, least, first))
        widest = self._cluster.widest
        choices = set(range(least, min(max(widest, ANY_SIZE), most) + 1))
        choices.update(n for n in range(widest, most + 1, widest) if n >= least)
        return np.array(sorted(choices | {size or job.least}), dtype=np.int64)


def _coarse(service: float | None) -> float | None:
    """Round to a quarter of a doubling, because the value changes every second."""
    if service is None or service <= 0.0:
        return None
    return float(2.0 ** (round(4.0 * math.log2(service)) / 4.0))


class ProblemBuilder:
    """Builder of problems; updates `estimates` with each view."""

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._rows = JobRowBuilder(estimates, options)
        self._fair_shares = FairShares(options)

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """Return the problem of `view` at `now`."""
        cluster, found = self._clusters.of(view), in_play(view, now)
        self._estimates.update(view, contended=found.supply.contended, now=now)
        self._rows.update(cluster, view.jobs, len(view.jobs))
        job_rows = [self._rows.row(job, found.supply) for job in found.jobs.values()]
        table = value_table(job_rows, found.supply, self._options)
        families = [row.job.family for row in job_rows]
        return Problem(
            version=view.version,
            job_rows=tuple(job_rows),
            kept=found.kept,
            cluster=cluster,
            owner=_owners(len(view.slots), job_rows, found),
            early=np.isin(np.arange(len(view.slots)), found.free_now),
            sizes=table.sizes,
            spans=table.spans,
            value=table.value,
            present=np.array([row.level for row in job_rows], dtype=np.int64),
            weight=table.weight,
            move_factor=np.array([row.move_factor for row in job_rows], dtype=np.float64),
            free_to_move=np.array(
                [bool(row.now) and not row.gated for row in job_rows], dtype=np.bool_
            ),
            backing_off=found.backing_off,
            gates=tuple(self._estimates.gate(row.job) for row in job_rows if row.gated),
            too_large=found.too_large,
            capacity=found.supply.capacity,
            speedup_exponent=self._options.speedup_exponent,
            evacuates=self._options.migration,
            swaps=self._options.swaps,
            slow=self._estimates.type_slowdowns(cluster.types, families),
            interference=self._interference(job_rows, found.kept, view),
            floors=self._fair_shares.floors(job_rows, table, view, now),
        )

    def rows(self, view: ClusterView, jobs: Iterable[JobId], now: Seconds) -> list[JobRow]:
        """Return rows of the running jobs among `jobs` that may be changed, without a problem."""
        found = in_play(view, now)
        self._estimates.update(view, contended=found.supply.contended, now=now)
        self._rows.update(self._clusters.of(view), view.jobs, len(view.jobs))
        chosen = [found.jobs[name] for name in jobs if name in found.jobs]
        return [self._rows.row(job, found.supply) for job in chosen if job.running_on]

    def _interference(
        self, job_rows: Sequence[JobRow], kept: Mapping[JobId, Iterable[SlotId]], view: ClusterView
    ) -> InterferenceModel | None:
        """Return the learned slow-downs by neighbours, with the jobs that may not be moved."""
        cluster = self._clusters.of(view)
        names = dict.fromkeys([job_row.job.family for job_row in job_rows])
        names |= dict.fromkeys(view.jobs[job].family for job in kept)
        numbers = {name: number for number, name in enumerate(names)}
        log_slowdowns = self._estimates.log_slowdowns(list(numbers))
        if log_slowdowns is None:
            return None
        fixed = np.zeros((len(cluster.slots_on), 2 * len(numbers)))
        for job, placed in kept.items():
            places = [cluster.place_of[slot] for slot in placed if slot in cluster.place_of]
            nodes = set(cluster.node_of[places].tolist())
            for node in nodes:
                fixed[node, 2 * numbers[view.jobs[job].family] + (len(nodes) > 1)] += 1.0
        family = np.array([numbers[job_row.job.family] for job_row in job_rows], dtype=np.int64)
        return InterferenceModel(log_slowdowns, family, fixed)


def _owners(slots: int, job_rows: Sequence[JobRow], found: InPlay) -> IntArray:
    """Return the row of the job on each slot, shape (S,); `FREE` or `CLOSED` if there is none."""
    owner = np.full(slots, CLOSED, dtype=np.int64)
    owner[list(found.free_now)] = owner[list(found.free_soon)] = FREE
    for row, job_row in enumerate(job_rows):
        owner[list(job_row.now)] = row
    return owner
