"""Turns views into problems; what did not change since the last one is not worked out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from controlplane.policy.api import ClusterView
from controlplane.policy.ones.decision_scope import InPlay, in_play
from controlplane.policy.ones.interference import InterferenceModel
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.job_rows import JobRowBuilder
from controlplane.policy.ones.lone_jobs import for_jobs
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import CLOSED, FREE, JobRow, Problem
from controlplane.policy.ones.size_value_table import value_table
from controlplane.policy.ones.stretch import FairShares
from controlplane.policy.search.cluster_index import ClusterIndexCache
from controlplane.prediction.array_types import IntArray
from schemas.ids import JobId, Seconds, SlotId


class ProblemBuilder:
    """Builds problems.

    Args:
        estimates: what was learnt; every view that is built is shown to it.
    """

    def __init__(self, estimates: Estimates, options: OnesOptions) -> None:
        self._estimates = estimates
        self._options = options
        self._clusters = ClusterIndexCache()
        self._rows = JobRowBuilder(estimates, options)
        self._fair_shares = FairShares(options)

    def build(self, view: ClusterView, now: Seconds) -> Problem:
        """The problem that `view` poses at `now`.

        Args:
            now: seconds on the controller's clock.
        """
        cluster, found = self._clusters.of(view), in_play(view, now)
        self._estimates.update(view, contended=found.supply.contended, now=now)
        self._rows.update(cluster, view.jobs, len(view.jobs))
        job_rows = [self._rows.row(job, found.supply) for job in found.jobs.values()]
        options = for_jobs(found.jobs.values(), self._options)
        table = value_table(job_rows, found.supply, options)
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
            speedup_exponent=options.speedup_exponent,
            evacuates=self._options.migration,
            swaps=self._options.swaps,
            slow=self._estimates.type_slowdowns(cluster.types, families),
            interference=self._interference(job_rows, found.kept, view),
            dues=self._fair_shares.dues(job_rows, table, view, now),
        )

    def rows(self, view: ClusterView, jobs: Iterable[JobId], now: Seconds) -> list[JobRow]:
        """Some running jobs as the search would see them, without the problem around them.

        Args:
            jobs: of which; those that nobody may move now are left out.
            now: seconds on the controller's clock.
        """
        found = in_play(view, now)
        self._estimates.update(view, contended=found.supply.contended, now=now)
        self._rows.update(self._clusters.of(view), view.jobs, len(view.jobs))
        chosen = [found.jobs[name] for name in jobs if name in found.jobs]
        return [self._rows.row(job, found.supply) for job in chosen if job.running_on]

    def _interference(
        self, job_rows: Sequence[JobRow], kept: Mapping[JobId, Iterable[SlotId]], view: ClusterView
    ) -> InterferenceModel | None:
        """What is known of who slows down whom."""
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
    """The row of the job on each slot, shape (S,); `FREE` or `CLOSED` where there is none."""
    owner = np.full(slots, CLOSED, dtype=np.int64)
    owner[list(found.free_now)] = owner[list(found.free_soon)] = FREE
    for row, job_row in enumerate(job_rows):
        owner[list(job_row.now)] = row
    return owner
