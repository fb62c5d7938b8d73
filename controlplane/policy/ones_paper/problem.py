"""The search problem of one view: columns of slots, rows of jobs, batch and speed of each size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones_paper.job_estimates import PaperEstimates
from controlplane.policy.options import OnesPaperOptions
from controlplane.policy.placement.slot_partition import Partition, partition_of
from controlplane.policy.search.cluster_index import ClusterIndexCache
from controlplane.prediction import BoolArray, FloatArray, IntArray
from controlplane.prediction.throughput import SpeedModel, statistical_efficiency
from schemas.ids import JobId, Seconds, SlotId

Genes = npt.NDArray[np.int16]  # row of the job on each slot, or IDLE
IDLE: Final = -1


@dataclass(frozen=True)
class PaperProblem:
    """Constants of the search for one view: J jobs, G slots, sizes up to C."""

    jobs: tuple[JobView, ...]  # jobs that may be changed or started, in order of arrival
    slots: tuple[SlotId, ...]  # slots in play, node by node
    nodes: IntArray  # shape (G,), number of each slot's node
    present: Genes  # shape (G,), present job on each slot
    size: IntArray  # shape (J,), present slots
    least: IntArray  # shape (J,), slots
    most: IntArray  # shape (J,), slots within R: floor(R c / B); below `least`: no size fits
    batches: IntArray  # shape (J, C + 1), global batch by slots
    rates: FloatArray  # X, shape (J, C + 1, 2), samples/s; on the fewest nodes, then on more
    done: FloatArray  # Y_processed, shape (J,), samples
    exact: FloatArray  # Y if known, shape (J,), samples; nan: use eq. 7
    alpha: FloatArray  # parameter of the distribution of progress, shape (J,)
    beta: FloatArray
    served_s: FloatArray  # T_processed, shape (J,)
    start_s: FloatArray  # duration of a start, shape (J,)
    new: BoolArray  # shape (J,), True for jobs that never had a slot
    limits: IntArray  # R, shape (J,)
    gated: tuple[JobId, ...]  # running jobs without an epoch since their last change
    opens_at: tuple[Seconds, ...]  # when gated jobs may be changed if no epoch ends earlier
    held: bool  # True if all jobs are held until all have finished an epoch

    @property
    def rows(self) -> IntArray:
        """Row numbers, 0 to J - 1."""
        return np.arange(len(self.jobs))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a job, and the options for its speed and batch."""

    limit: int  # min(R, user's limit), samples per step
    local_limit: int
    local: int  # first batch of one slot
    first: int  # first global batch
    most: int  # most slots
    widest: int  # slots of the largest node
    noise_scale: float  # phi, samples
    speed: Literal["mean", "model", "goodput"]
    batch: Literal["kept", "goodput"]
    slot_rate: float  # measured mean speed of one slot, samples/s; 0: not measured


@dataclass(frozen=True, slots=True)
class PaperSizeTable:
    """Batches and rates of a job by number of slots, 0 to C."""

    batches: IntArray  # global batches, shape (C + 1,), samples per step; 0 at 0 slots
    rates: FloatArray  # X, shape (C + 1, 2), samples/s; on the fewest nodes, then on more


def size_table(model: SpeedModel, bounds: Bounds) -> PaperSizeTable:
    """Return the batch and the speed at each size."""
    slots = np.arange(1, bounds.most + 1)
    if not len(slots):
        return PaperSizeTable(np.zeros(1, dtype=np.int64), np.zeros((1, 2)))
    nodes = -(-slots // bounds.widest)
    choices = _choices(slots, bounds)
    fits = (choices >= slots[:, None]) & (choices <= slots[:, None] * bounds.local_limit)
    shown = np.broadcast_to(nodes[:, None], choices.shape)
    value = np.where(fits, _rates(model, bounds, shown, slots[:, None], choices), -1.0)
    best = value.shape[1] - 1 - value[:, ::-1].argmax(axis=1)  # the larger of equal batches
    rows = np.arange(len(slots))
    batches = choices[rows, best]
    far = np.where(slots > 1, np.maximum(nodes + 1, 2), 1)
    spread = np.minimum(value[rows, best], _rates(model, bounds, far, slots, batches))
    rates = np.column_stack([value[rows, best], spread])
    rates[~fits[rows, best]] = 0.0
    batches = np.where(fits[rows, best], batches, 0)
    return PaperSizeTable(np.append(0, batches), np.vstack([np.zeros((1, 2)), rates]))


def _choices(slots: IntArray, bounds: Bounds) -> IntArray:
    """Return the batches to try at each size, shape (C, B), ascending."""
    fullest = np.minimum(bounds.limit, slots * bounds.local_limit)[:, None]
    if bounds.batch == "kept":  # the first local batch on every slot, within R
        return np.minimum(fullest, (slots * bounds.local)[:, None])
    doublings = max(0, (bounds.limit // bounds.first).bit_length() - 1)
    grid = bounds.first * np.exp2(np.arange(doublings + 1)).astype(np.int64)
    return np.concatenate([np.minimum(grid[None, :], fullest), fullest], axis=1)


def _rates(
    model: SpeedModel, bounds: Bounds, nodes: IntArray, slots: IntArray, batches: IntArray
) -> FloatArray:
    if bounds.speed == "mean":
        return np.asarray(np.broadcast_to(slots, batches.shape) * (bounds.slot_rate or 1.0))
    local = np.ceil(batches / slots)
    steps = model.step_s(nodes, np.broadcast_to(slots, local.shape), local)
    if bounds.speed == "model":
        return np.asarray(batches / steps)
    sizes = batches.astype(np.float64)
    return np.asarray(
        batches / steps * statistical_efficiency(sizes, bounds.first, bounds.noise_scale)
    )


MAX_JUMP: Final = 2.0  # largest ratio of a new batch to the last one (figure 14)
NOISE_SCALE_PRIOR: Final = 4.0  # multiple of the first batch; used if a job reports no noise scale
BATCH_MARGIN: Final = 0.1  # relative gain in speed that a new batch on the same slots must bring
UNKNOWN_S: Final = 60.0  # assumed length of a job if no job's speed is known
MAX_TABLES: Final = 10_000  # bounds memory; a full cache is cleared


class ProblemBuilder:
    """Builder of problems, which updates `estimates` with each view and caches size tables."""

    def __init__(self, estimates: PaperEstimates, options: OnesPaperOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._tables: dict[tuple[object, ...], PaperSizeTable] = {}

    def build(self, view: ClusterView, now: Seconds) -> PaperProblem:
        """Return the problem of `view` at `now`."""
        partition, estimates = partition_of(view, now), self._estimates
        estimates.update(view.jobs.values(), now, contended=bool(partition.waiting))
        running, gated, opens_at = self._gates(partition)
        held = self._options.gate == "all" and bool(gated)
        if self._options.gate != "job":
            running, gated = partition.running, []
        chosen = {job.job for job in (*running, *partition.waiting)}
        jobs = tuple(job for name, job in view.jobs.items() if name in chosen)
        columns = _columns(partition, jobs)
        cluster = self._clusters.of(view)
        rows = [self._row(job, len(columns), cluster.widest, now) for job in jobs]
        fields: dict[str, Any] = _stacked(rows)
        return PaperProblem(
            jobs=jobs,
            slots=tuple(columns),
            nodes=cluster.node_of[[cluster.place_of[slot] for slot in columns]],
            present=np.array(list(columns.values()), dtype=np.int16),
            size=np.array([len(job.running_on) for job in jobs], dtype=np.int64),
            least=np.array([job.least for job in jobs], dtype=np.int64),
            gated=tuple(job.job for job in gated),
            opens_at=tuple(opens_at),
            held=held,
            **self._lengths(jobs, fields),
        )

    def _gates(self, partition: Partition) -> tuple[list[JobView], list[JobView], list[Seconds]]:
        """Return the running jobs that may change, the gated jobs, and when their gates open."""
        if self._options.gate == "off":
            return partition.running, [], []
        gates = [(job, self._estimates.gate(job)) for job in partition.running]
        free = [job for job, at in gates if at <= partition.now]
        gated = [job for job, at in gates if at > partition.now]
        return free, gated, [at for _, at in gates if partition.now < at < np.inf]

    def _row(self, job: JobView, capacity: int, widest: int, now: Seconds) -> dict[str, Any]:
        """Return the fields of the problem for one job."""
        estimates, options = self._estimates, self._options
        history, family = estimates.histories[job.job], estimates.families[job.family]
        model = family.model(job.batch_size)
        bounds = self._bounds(job, capacity, widest)
        table = self._table(job, bounds, model, family.edition)
        known = model.known if options.speed != "mean" else bool(family.slot_rate)
        done = float(max(job.samples_done, history.samples))
        length = estimates.epoch_samples(job)
        row = history.features(done)[None, :]
        alpha, beta = estimates.progress.shapes(row, np.array([done / length]))
        exact = np.nan
        if job.stop_samples is not None:
            exact = max(1.0, job.stop_samples - done)
        passed = max(0.0, now - job.moved_at) if job.running_on else 0.0
        done_before = job.samples_done or job.ran_s or job.last_batch
        return {
            "table": table,
            "known": known,
            "most": bounds.most,
            "limits": history.limit,
            "done": done,
            "exact": exact,
            "alpha": float(alpha[0]),
            "beta": float(beta[0]),
            "served_s": job.ran_s + passed,
            "start_s": options.start_stall_s if job.start_s is None else job.start_s,
            "new": not (job.running_on or job.epoch or done_before),
        }

    def _bounds(self, job: JobView, capacity: int, widest: int) -> Bounds:
        """Return the bounds of a job: R, and as many slots as R fills with first local batches."""
        estimates, options = self._estimates, self._options
        limit = min(estimates.histories[job.job].limit, job.batch_limit)
        if job.last_batch:  # limited change: paper section 3.3.2 and figure 13
            limit = min(limit, int(MAX_JUMP * job.last_batch))
        limit = max(limit, min(job.least, job.batch_limit))
        local = max(1, min(job.batch_size // job.least, job.local_limit))
        most = min(limit // local, job.most, capacity)
        if not estimates.warm(job):  # Start
            most = min(most, job.least)
        # Paper: floor(R c / B) slots, which can be none. Here: the least slots, because R is halved
        # "to prevent starvation", and only an epoch raises it again.
        if capacity >= job.least:
            most = max(most, job.least)
        family = estimates.families[job.family]
        noise = job.noise_scale
        if noise is None or not np.isfinite(noise):
            noise = NOISE_SCALE_PRIOR * job.batch_size
        return Bounds(
            limit=limit,
            local_limit=job.local_limit,
            local=local,
            first=job.batch_size,
            most=min(most, limit),
            widest=widest,
            noise_scale=max(0.0, noise),
            speed=options.speed,
            batch=options.batch,
            slot_rate=family.slot_rate if options.speed == "mean" else 0.0,
        )

    def _table(
        self, job: JobView, bounds: Bounds, model: SpeedModel, edition: int
    ) -> PaperSizeTable:
        key = (job.family, edition, bounds)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = size_table(model, bounds)
        if self._options.batch == "kept" or not job.running_on:
            return table
        return self._with_batch_of_now(job, bounds, model, table)

    def _with_batch_of_now(
        self, job: JobView, bounds: Bounds, model: SpeedModel, table: PaperSizeTable
    ) -> PaperSizeTable:
        """Return the table with the present batch, unless another batch is better by the margin."""
        size, batch = len(job.running_on), sum(job.running_on.values())
        if size > bounds.most or batch > bounds.limit or batch == table.batches[size]:
            return table
        slots = np.array([size])
        nodes = -(-slots // bounds.widest)
        rate = float(_rates(model, bounds, nodes, slots, np.array([batch]))[0])
        if table.rates[size, 0] > (1.0 + BATCH_MARGIN) * rate:
            return table
        batches, rates = table.batches.copy(), table.rates.copy()
        rates[size] *= rate / rates[size, 0]
        batches[size] = batch
        return PaperSizeTable(batches, rates)

    def _lengths(self, jobs: tuple[JobView, ...], fields: dict[str, Any]) -> dict[str, Any]:
        """Return `fields` with rates by which jobs of unknown speed last half the median time."""
        known, rates = fields.pop("known"), fields["rates"]
        if known.all() or not jobs:
            return fields
        share = fields["alpha"] / (fields["alpha"] + fields["beta"])
        left = np.where(
            np.isfinite(fields["exact"]), fields["exact"], fields["done"] * (1.0 / share - 1.0)
        )
        least = np.minimum([job.least for job in jobs], rates.shape[1] - 1)
        one = rates[np.arange(len(jobs)), least, 0] / np.maximum(least, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            lasts = left / one
        sane = known & np.isfinite(lasts)
        usual = 0.5 * float(np.median(lasts[sane])) if sane.any() else UNKNOWN_S
        scale = np.where(known | ~np.isfinite(lasts), 1.0, lasts / max(usual, 1.0))
        scale = np.where(scale > 0, scale, 1.0)
        fields["rates"] = rates * scale[:, None, None]
        return fields


def _columns(partition: Partition, jobs: tuple[JobView, ...]) -> dict[SlotId, int]:
    """Return the slots in play, in the order of the view, with the row of the job on each."""
    holder = {slot: row for row, job in enumerate(jobs) for slot in job.running_on}
    free = {slot for here in partition.free.values() for slot in here}
    return {
        slot.slot: holder.get(slot.slot, IDLE)
        for slot in partition.view.slots
        if slot.slot in holder or slot.slot in free
    }


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of all rows as arrays with a row for each job."""
    widest = max((len(row["table"].batches) for row in rows), default=1)
    batches = np.zeros((len(rows), widest), dtype=np.int64)
    rates = np.zeros((len(rows), widest, 2))
    for place, row in enumerate(rows):
        many = len(row["table"].batches)
        batches[place, :many] = row["table"].batches
        rates[place, :many] = row["table"].rates
    names = dict.fromkeys(("done", "exact", "alpha", "beta", "served_s", "start_s"), "f8")
    names |= {"new": "?", "known": "?", "most": "i8", "limits": "i8"}
    found: dict[str, Any] = {
        name: np.array([row[name] for row in rows], dtype) for name, dtype in names.items()
    }
    fits = (batches > 0) & (np.arange(widest) <= found["most"][:, None])
    found["most"] = np.where(fits, np.arange(widest), 0).max(axis=1, initial=0)
    return found | {"batches": batches, "rates": rates}
