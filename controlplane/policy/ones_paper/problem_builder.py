"""Turns views into problems: what is in play, what each size does, and who is gated."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.ones_paper.job_estimates import Estimates
from controlplane.policy.ones_paper.options import OnesPaperOptions
from controlplane.policy.ones_paper.problem import IDLE, Problem
from controlplane.policy.ones_paper.size_table import Bounds, SizeTable, rate_of, size_table
from controlplane.policy.planning.slot_partition import Partition, partition_of
from controlplane.policy.search.cluster_index import ClusterIndexCache
from controlplane.prediction.throughput import SpeedModel
from schemas.ids import Seconds, SlotId

UNKNOWN_S: Final = 60.0  # that a job of unknown speed is taken to last, if all are unknown
KEPT_TABLES: Final = 10_000  # of alike jobs, before all are forgotten


class ProblemBuilder:
    """Builds problems; the table of a job that stands as before is not worked out again."""

    def __init__(self, estimates: Estimates, options: OnesPaperOptions) -> None:
        """Begin with no table kept.

        Args:
            estimates: what is learnt of jobs, now and later; `build` brings them up to date.
            options: gates, and what else problems are made by.
        """
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._tables: dict[tuple[object, ...], SizeTable] = {}

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """The problem that `view` poses at `now`.

        Args:
            now: seconds on the controller's clock.
        """
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
        return Problem(
            version=view.version,
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
        """Running jobs that may be changed, and those that may not yet; when that is over."""
        if self._options.gate == "off":
            return partition.running, [], []
        free, gated, opens_at = [], [], []
        for job in partition.running:
            at = self._estimates.gate(job)
            if at <= partition.now:
                free.append(job)
                continue
            gated.append(job)
            if np.isfinite(at):
                opens_at.append(at)
        return free, gated, opens_at

    def _row(self, job: JobView, capacity: int, widest: int, now: Seconds) -> dict[str, Any]:
        """One job's part of the problem."""
        estimates, options = self._estimates, self._options
        history, family = estimates.history(job.job), estimates.family(job.family)
        model = family.speeds.model(job.batch_size)
        bounds = self._bounds(job, capacity, widest)
        table = self._table(job, bounds, model, family.speeds.edition)
        known = model.known if options.speed != "mean" else bool(family.speeds.slot_rate)
        done = float(max(job.samples_done, history.samples))
        length = estimates.epoch_samples(job)
        row = history.features(done)[None, :]
        alpha, beta = estimates.progress.shapes(row, np.array([done / length]))
        exact = np.nan
        if options.stated and job.stop_samples is not None:
            exact = max(1.0, job.stop_samples - done)
        elif options.unstarted == "model":
            if not done and family.totals:
                exact = sum(family.totals) / len(family.totals)
            done = max(done, length)
        passed = max(0.0, now - job.moved_at) if job.running_on else 0.0
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
            "new": not job.running_on and not job.epoch and not _was_served(job),
        }

    def _bounds(self, job: JobView, capacity: int, widest: int) -> Bounds:
        """R, and the slots that it allows: as many as hold it with the first local batch."""
        estimates, options = self._estimates, self._options
        limit = min(estimates.history(job.job).limit, job.batch_limit)
        if job.last_batch:  # not more at once: paper section 3.3.2 and figure 13
            limit = min(limit, int(options.jump * job.last_batch))
        limit = max(limit, min(job.least, job.batch_limit))
        local = max(1, min(job.batch_size // job.least, job.local_limit))
        most = min(limit // local, job.most, capacity)
        if not estimates.warm(job):  # Start
            most = min(most, job.least)
        if options.keep_least and capacity >= job.least:
            most = max(most, job.least)
        family = estimates.family(job.family)
        noise = job.noise_scale
        if noise is None or not np.isfinite(noise):
            noise = options.noise_scale_prior * job.batch_size
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
            slot_rate=family.speeds.slot_rate if options.speed == "mean" else 0.0,
        )

    def _table(self, job: JobView, bounds: Bounds, model: SpeedModel, edition: int) -> SizeTable:
        key = (job.family, edition, bounds)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > KEPT_TABLES:
                self._tables.clear()
            table = self._tables[key] = size_table(model, bounds)
        if self._options.batch == "kept" or not job.running_on:
            return table
        return self._with_batch_of_now(job, bounds, model, table)

    def _with_batch_of_now(
        self, job: JobView, bounds: Bounds, model: SpeedModel, table: SizeTable
    ) -> SizeTable:
        """On as many slots as now another batch has to be worth it."""
        size, batch = len(job.running_on), sum(job.running_on.values())
        if size > bounds.most or batch > bounds.limit or batch == table.batches[size]:
            return table
        rate = rate_of(model, bounds, size, batch)
        if table.rates[size, 0] > (1.0 + self._options.batch_margin) * rate:
            return table
        batches, rates = table.batches.copy(), table.rates.copy()
        rates[size] *= rate / rates[size, 0]
        batches[size] = batch
        return SizeTable(batches, rates)

    def _lengths(self, jobs: tuple[JobView, ...], fields: dict[str, Any]) -> dict[str, Any]:
        """Give jobs of unknown speed such seconds that they last half as long as others do."""
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


def _was_served(job: JobView) -> bool:
    """Whether a job was served before."""
    return bool(job.samples_done or job.ran_s or job.last_batch)


def _columns(partition: Partition, jobs: tuple[JobView, ...]) -> dict[SlotId, int]:
    """Slots in play, in the order of the view, and the row of who has them."""
    holder = {slot: row for row, job in enumerate(jobs) for slot in job.running_on}
    free = {slot for here in partition.free.values() for slot in here}
    return {
        slot.slot: holder.get(slot.slot, IDLE)
        for slot in partition.view.slots
        if slot.slot in holder or slot.slot in free
    }


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows' fields as arrays."""
    widest = max((len(row["table"].batches) for row in rows), default=1)
    batches = np.zeros((len(rows), widest), dtype=np.int64)
    rates = np.zeros((len(rows), widest, 2))
    for place, row in enumerate(rows):
        many = len(row["table"].batches)
        batches[place, :many] = row["table"].batches
        rates[place, :many] = row["table"].rates
    found: dict[str, Any] = {"batches": batches, "rates": rates}
    for name in ("done", "exact", "alpha", "beta", "served_s", "start_s"):
        found[name] = np.array([row[name] for row in rows], dtype=np.float64)
    for name in ("new", "known"):
        found[name] = np.array([row[name] for row in rows], dtype=np.bool_)
    most = np.array([row["most"] for row in rows], dtype=np.int64)
    fits = (batches > 0) & (np.arange(widest) <= most[:, None])
    found["most"] = np.where(fits, np.arange(widest), 0).max(axis=1, initial=0)
    found["limits"] = np.array([row["limits"] for row in rows], dtype=np.int64)
    return found
