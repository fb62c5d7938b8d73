"""Policy `ones`: an online evolutionary search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    Plan,
    PolicyEvent,
    Reason,
    SearchStats,
    StartForecast,
    StepsSeen,
)
from controlplane.policy.ones.evolution import EvolutionarySearch
from controlplane.policy.ones.explain import (
    for_batch,
    for_change,
    least_value,
    slot_owners,
    waits,
)
from controlplane.policy.ones.job_estimates import Estimates
from controlplane.policy.ones.operators import Candidate
from controlplane.policy.ones.problem import Problem
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.ones.slowdowns import CoreDemand
from controlplane.policy.ones.start_forecast import StartForecasts
from controlplane.policy.options import OnesOptions
from controlplane.policy.placement.slot_partition import backs_off, split, too_large
from controlplane.policy.search.search_loop import SearchPolicy
from schemas.ids import JobId, Seconds, SlotId


class Ones(SearchPolicy[Problem]):
    """Policy that chooses the batch and the slots of every job for the benefit of all jobs.

    Each view becomes a table with the value of every size of every job. A population of candidate
    schedules, seeded with the schedule in force and with greedy ones, evolves against this table. A
    plan is available at once and improves while there is time.
    """

    def __init__(self, options: OnesOptions | None = None) -> None:
        self.options = options or OnesOptions()
        self.estimates = Estimates(self.options)
        self.builder = ProblemBuilder(self.estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._core_demand = CoreDemand()
        self._forecasts = StartForecasts() if self.options.forecast_starts else None
        self._reported: dict[JobId, None] = {}  # jobs that reported since batches were last chosen
        super().__init__(self.estimates, self._search)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths, limits, and the CPU use of workers."""
        super().observe(event, now)
        self._core_demand.observe(event)
        if self.options.rebatch and isinstance(event, EpochSeen | StepsSeen):
            self._reported[event.job] = None

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the fittest candidate, with a reason for every job that changes or waits."""
        problem = self._current_problem(view, now)
        self._reported.clear()  # a full plan chooses all batches
        best = self._search.best
        local_batch = {name: dict(placed) for name, placed in problem.kept.items()}
        reasons: dict[JobId, Reason] = {}
        starts: Mapping[JobId, StartForecast] = {}
        if best is not None:
            if self._forecasts is not None:
                starts = self._forecasts.of(problem, best, now)
            least, owners = least_value(problem, best), slot_owners(problem, best)
            for row, places in enumerate(best.by_row()):
                job_row = problem.job_rows[row]
                placed = _local_batches(problem, best, row, places)
                if placed:
                    local_batch[job_row.job.job] = placed
                if placed != dict(job_row.job.running_on):
                    reasons[job_row.job.job] = for_change(problem, best, owners, row, placed)
                elif not placed:
                    reasons[job_row.job.job] = waits(problem, best, row, least)
        reasons |= {name: backs_off(at, now) for name, at in problem.backing_off.items()}
        reasons |= {
            name: too_large(needs, len(problem.slots)) for name, needs in problem.too_large.items()
        }
        return Plan(
            based_on=view.version,
            local_batch=local_batch,
            reasons=reasons,
            starts=starts,
            wake_at=self._next_change(problem, view, now),
        )

    def stats(self) -> SearchStats:
        """Return statistics of the search and of the predicted lengths."""
        stats, seen = super().stats(), self.estimates.lengths.calibration
        if seen is None:
            return stats
        return replace(
            stats,
            length_predictions=seen.predictions,
            length_error=seen.median_error,
            length_coverage_80=seen.narrow,
            length_coverage_90=seen.wide,
        )

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best batch of each job that reported since the last call, on the same slots.

        Batches come from the same table as those of a full plan, with the same limits and margins.
        """
        local_batch: dict[JobId, dict[SlotId, int]] = {}
        reasons: dict[JobId, Reason] = {}
        for job_row in self.builder.rows(self._core_demand.shown(view), self._reported, now):
            job, batch = job_row.job, int(job_row.table.batches[job_row.level - 1])
            if job_row.moves_to or batch == sum(job.running_on.values()):
                continue
            local_batch[job.job] = split(batch, list(job.running_on))
            reasons[job.job] = for_batch(job_row)
        self._reported.clear()
        return Plan(based_on=view.version, local_batch=local_batch, reasons=reasons)

    def _build_problem(self, view: ClusterView, now: Seconds) -> Problem:
        problem = self.builder.build(self._core_demand.shown(view), now)
        self._search.update(problem)
        if self._forecasts is not None:
            self._forecasts.update(view, now)
        return problem

    def _next_change(self, problem: Problem, view: ClusterView, now: Seconds) -> Seconds | None:
        times = [
            *problem.backing_off.values(),
            *(job.retry_at for job in view.jobs.values()),
            *problem.gates,
        ]
        return min((at for at in times if at > now), default=None)


def _local_batches(
    problem: Problem, best: Candidate, row: int, places: Sequence[int]
) -> dict[SlotId, int]:
    """Return a job's local batches; the present ones if slots and batch stay the same."""
    job_row = problem.job_rows[row]
    level = int(best.levels[row])
    if not level:
        return {}
    batch = int(job_row.table.batches[level - 1])
    slots = [problem.slots[place] for place in places]
    present = dict(job_row.job.running_on)
    if set(slots) == set(present) and batch == sum(present.values()):
        return present
    return split(batch, slots)
