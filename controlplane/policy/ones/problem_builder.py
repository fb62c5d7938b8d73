"""Turns views into problems; what did not change since the last one is not worked out again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones.estimates import Estimates
from controlplane.policy.ones.interference import InterferenceModel
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import CLOSED, FREE, JobRow, Problem
from controlplane.policy.ones.size_table import (
    SizeTable,
    kept_share,
    left_after,
    remaining_s,
    size_table,
    values,
    weights,
)
from controlplane.policy.search.cluster_index import NO_CLUSTER, ClusterIndexCache
from controlplane.prediction.arrays import FloatArray, IntArray
from schemas.ids import JobId, Seconds, SlotId

KEPT_TABLES: Final = 20_000
ANY_SIZE: Final = 4  # slots, up to which a job need not fill its nodes
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is to share out, for everybody alike."""

    capacity: int
    idle: int
    contended: bool
    now: Seconds


class ProblemBuilder:
    """Builds problems; what did not change since the last one is not worked out again."""

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._cluster = NO_CLUSTER
        self._job_rows: dict[JobId, tuple[_Key, JobRow]] = {}
        self._tables: dict[tuple[object, ...], SizeTable] = {}
        self._now = Seconds(0.0)

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """The problem that `view` poses at `now`."""
        self._number(view)
        movable: dict[JobId, JobView] = {}
        backing_off: dict[JobId, Seconds] = {}
        kept: dict[JobId, dict[SlotId, int]] = {}
        up = {slot.slot for slot in view.slots if slot.up}
        for name, job in view.jobs.items():
            stuck = not job.movable or job.retry_at > now or not job.running_on.keys() <= up
            if job.running_on and stuck:  # slots of a node that is away can be handed to nobody
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
        contended = any(not j.running_on and n not in too_large for n, j in movable.items())
        self._estimates.update(view, contended=contended, now=now)
        idle = len(free_now) + len(free_soon)
        self._now = now
        room = _Room(capacity=len(mine) + idle, idle=idle, contended=contended, now=now)
        job_rows = [
            self._job_row(job, room) for name, job in movable.items() if name not in too_large
        ]
        if len(self._job_rows) > 2 * len(view.jobs) + 100:
            self._job_rows = {n: c for n, c in self._job_rows.items() if n in view.jobs}
        return self._tabulated(
            job_rows,
            room,
            version=view.version,
            kept=kept,
            cluster=self._cluster,
            owner=self._owners(job_rows, free_now, free_soon),
            early=np.isin(np.arange(len(view.slots)), free_now),
            capacity=room.capacity,
            backing_off=backing_off,
            gates=tuple(self._estimates.gate(job_row.job) for job_row in job_rows if job_row.gated),
            too_large=too_large,
            slow=self._estimates.slowness(
                self._cluster.types, [job_row.job.family for job_row in job_rows]
            ),
            interference=self._interference(job_rows, kept, view),
            evacuates=self._options.migration,
        )

    def _interference(
        self,
        job_rows: Sequence[JobRow],
        kept: Mapping[JobId, Mapping[SlotId, int]],
        view: ClusterView,
    ) -> InterferenceModel | None:
        """What is known of who slows down whom."""
        names = dict.fromkeys([job_row.job.family for job_row in job_rows])
        names |= dict.fromkeys(view.jobs[job].family for job in kept)
        numbers = {name: number for number, name in enumerate(names)}
        log_slowdowns = self._estimates.log_slowdowns(list(numbers))
        if log_slowdowns is None:
            return None
        fixed = np.zeros((len(self._cluster.slots_on), 2 * len(numbers)))
        for job, placed in kept.items():
            places = [
                self._cluster.place_of[slot] for slot in placed if slot in self._cluster.place_of
            ]
            nodes = set(self._cluster.node_of[places].tolist())
            for node in nodes:
                fixed[node, 2 * numbers[view.jobs[job].family] + (len(nodes) > 1)] += 1.0
        family = np.array([numbers[job_row.job.family] for job_row in job_rows], dtype=np.int64)
        return InterferenceModel(log_slowdowns, family, fixed)

    def _number(self, view: ClusterView) -> None:
        """Give every slot a number, the same as long as the cluster has the same slots."""
        cluster = self._clusters.of(view)
        if cluster is not self._cluster:
            self._cluster = cluster
            self._job_rows.clear()

    def _job_row(self, job: JobView, room: _Room) -> JobRow:
        """The job as the search sees it."""
        estimates, options = self._estimates, self._options
        gated = bool(job.running_on) and estimates.gated(job, room.now)
        limit, warm = estimates.limit(job), estimates.warm(job)
        family = estimates.family(job.family)
        model = family.speed(job.batch_size)
        samples = estimates.remaining(job)
        size = len(job.running_on)
        most = min(job.most, room.capacity)
        tried = estimates.may_have(job, room.now)
        if tried is not None:
            most = min(most, max(size, tried))
        noise = estimates.noise_scale(job)
        others = _coarse(estimates.remaining_service(job, room.now))
        key = (
            family.edition, noise, limit, warm, gated, samples, most, family.largest, others,
        )  # fmt: skip
        known = self._job_rows.get(job.job)
        if known is not None and known[0] == key and known[1].job is job:
            return known[1]
        now_on = tuple(
            self._cluster.place_of[slot]
            for slot in job.running_on
            if slot in self._cluster.place_of
        )
        least = min(job.least, size) if size else job.least
        most = min(most, max(min(limit, job.batch_limit), job.least))
        if warm:
            largest = max(size, family.largest, job.least)
            most = min(most, int(options.growth * largest))
        else:  # Start: one slot until a few steps were taken
            most = min(most, max(size, least))
        sizes = self._sizes(job, least, most)
        nodes = np.maximum(1, -(-sizes // self._cluster.widest))
        nodes[sizes == size] = max(1, len({int(self._cluster.node_of[place]) for place in now_on}))
        table = self._table(job, (family.edition, limit, gated), noise, sizes, nodes)
        one_s = remaining_s(samples, table.one_speed, known=table.known)
        if others is not None:
            one_s = others if math.isnan(one_s) else max(one_s, others)
        job_row = JobRow(
            job=job,
            now=now_on,
            level=int(np.searchsorted(sizes, size)) + 1 if size else 0,
            table=table,
            limit=limit,
            remaining_s=one_s,
            change_factor=self._change_factor(job, table, one_s, size),
            moved=self._moved(table, one_s, size),
            restart_factor=self._restart_factor(job, one_s),
            model=model,
            gated=gated,
        )
        self._job_rows[job.job] = (key, job_row)
        return job_row

    def _table(
        self,
        job: JobView,
        known: tuple[int, int, bool],
        noise: float,
        sizes: IntArray,
        nodes: IntArray,
    ) -> SizeTable:
        """The same for all jobs of a family that stand alike."""
        key = (
            job.family, known, job.batch_size, job.batch_limit, job.local_limit, noise,
            job.last_batch, len(job.running_on), sum(job.running_on.values()),
            sizes.tobytes(), nodes.tobytes(),
        )  # fmt: skip
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) > KEPT_TABLES:
                self._tables.clear()
            found = self._tables[key] = size_table(
                job, self._estimates, self._options, sizes, nodes, keep_batch=known[2]
            )
        return found

    def _owners(
        self, job_rows: Sequence[JobRow], free_now: Sequence[int], free_soon: Sequence[int]
    ) -> IntArray:
        owner = np.full(len(self._cluster.slots), CLOSED, dtype=np.int64)
        owner[list(free_now)] = owner[list(free_soon)] = FREE
        for row, job_row in enumerate(job_rows):
            owner[list(job_row.now)] = row
        return owner

    def _change_factor(self, job: JobView, known: SizeTable, one_s: float, size: int) -> FloatArray:
        """A first start is no change: every job needs one."""
        if not size and not job.epoch and not job.samples_done:
            return np.ones(len(known.sizes))
        stall = self._options.rescale_stall_s
        if not size:
            stall = self._start_stall(job)
        length = one_s if math.isfinite(one_s) else 0.0
        return kept_share(known, length, stall, self._options.change_margin, size)

    def _moved(self, known: SizeTable, one_s: float, size: int) -> float:
        """What is left of a job's value after it went to other slots, all else being the same."""
        if not size:
            return 1.0
        gain = float(known.gains[np.searchsorted(known.sizes, size)])
        left_s = (one_s if math.isfinite(one_s) else 0.0) / max(gain, 1e-9)
        return left_after(left_s, self._options.rescale_stall_s, self._options.change_margin)

    def _restart_factor(self, job: JobView, one_s: float) -> float:
        if not job.running_on:
            return 1.0
        left_s = one_s if math.isfinite(one_s) else 0.0
        return left_after(left_s, self._start_stall(job), self._options.change_margin)

    def _start_stall(self, job: JobView) -> float:
        return job.start_s if job.start_s is not None else self._options.start_stall_s

    def _waited(self, job: JobView) -> float:
        return job.waited_s + (0.0 if job.running_on else max(0.0, self._now - job.moved_at))

    def _sizes(self, job: JobView, least: int, most: int) -> IntArray:
        """What a job may have now: up to 4 or a node's width, then whole nodes, and what it has."""
        widest = self._cluster.widest
        choices = set(range(least, min(max(widest, ANY_SIZE), most) + 1))
        choices.update(n for n in range(widest, most + 1, widest) if n >= least)
        return np.array(sorted(choices | {len(job.running_on) or job.least}), dtype=np.int64)

    def _tabulated(self, job_rows: list[JobRow], room: _Room, **rest: Any) -> Problem:
        options = self._options
        weight = weights(
            np.array([job_row.remaining_s for job_row in job_rows], dtype=np.float64),
            np.array([job_row.table.gains[0] for job_row in job_rows], dtype=np.float64),
            np.array([self._waited(job_row.job) for job_row in job_rows], dtype=np.float64),
            np.array([job_row.job.ran_s for job_row in job_rows], dtype=np.float64),
            options,
        ) * np.array([job_row.job.priority for job_row in job_rows], dtype=np.float64)
        levels = 1 + max((len(job_row.table.sizes) for job_row in job_rows), default=0)
        sizes = np.zeros((len(job_rows), levels), dtype=np.int64)
        spans = np.zeros((len(job_rows), levels), dtype=np.int64)
        gains = np.full((len(job_rows), levels), -1.0)
        for row, job_row in enumerate(job_rows):
            many = 1 + len(job_row.table.sizes)
            sizes[row, 1:many] = job_row.table.sizes
            spans[row, 1:many] = job_row.table.nodes
            gains[row, 1:many] = job_row.table.gains * job_row.change_factor
        value = values(np.maximum(gains, 0.0), weight[:, None], options)
        value[gains < 0] = -np.inf
        gated = np.array([job_row.gated for job_row in job_rows], dtype=np.bool_)
        # A gated job may grow onto idle slots, and makes room for one that waits.
        more = sizes - np.array(
            [[len(job_row.now)] for job_row in job_rows], dtype=np.int64
        ).reshape(-1, 1)
        if room.contended or not room.idle:
            value[gated[:, None] & (more > 0)] = -np.inf
        if not room.contended:
            value[gated[:, None] & (more < 0)] = -np.inf
        # To stop costs what it will take to start again; gated ones make room, but are not stopped.
        restart_factor = np.array(
            [job_row.restart_factor for job_row in job_rows], dtype=np.float64
        )
        stopped = weight * (np.power(restart_factor, options.speedup_exponent) - 1.0)
        running = np.array([bool(job_row.now) for job_row in job_rows], dtype=np.bool_)
        stopped -= np.where(running, options.pause_margin * weight, 0.0)
        value[:, 0] = np.where(gated, -np.inf, stopped)
        return Problem(
            job_rows=tuple(job_rows),
            sizes=sizes,
            spans=spans,
            value=value,
            moved=np.array([job_row.moved for job_row in job_rows], dtype=np.float64),
            free_to_move=np.array(
                [bool(job_row.now) and not job_row.gated for job_row in job_rows], dtype=np.bool_
            ),
            present=np.array([job_row.level for job_row in job_rows], dtype=np.int64),
            weight=weight,
            speedup_exponent=options.speedup_exponent,
            **rest,
        )


def _coarse(service: float | None) -> float | None:
    """To a quarter of a doubling: it changes with every second, which should not matter."""
    if service is None or service <= 0.0:
        return None
    return float(2.0 ** (round(4.0 * math.log2(service)) / 4.0))
