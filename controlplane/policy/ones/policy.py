"""`ones`: the online evolutionary search behind the interface of every policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from numpy.random import Generator

from controlplane.policy.api import Budget, ClusterView, Plan, PolicyEvent, Reason, SearchStats
from controlplane.policy.ones.candidate import Candidate
from controlplane.policy.ones.estimates import Estimates
from controlplane.policy.ones.evolution import EvolutionarySearch
from controlplane.policy.ones.explain import for_change, least_value, owners_of, waits
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import Problem
from controlplane.policy.ones.problem_builder import ProblemBuilder
from controlplane.policy.planning.packing import split
from controlplane.policy.planning.wait_reasons import backs_off, too_large
from schemas.ids import JobId, Seconds, SlotId


class Ones:
    """Gives every job the batch and the slots that serve all jobs best.

    Each view becomes a table of what every size of every job is worth; a population of candidate
    schedules, seeded with the schedule in force and with greedy, is evolved against it. The answer
    is at hand at once and gets better while there is time.
    """

    def __init__(self, options: OnesOptions | None = None) -> None:
        self.options = options or OnesOptions()
        self._estimates = Estimates(self.options)
        self._builder = ProblemBuilder(self._estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._problem: Problem | None = None
        self._stale = True  # something happened since the problem was built
        self._until = Seconds(0.0)  # when what is out of the question becomes possible

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn speeds, lengths and limits."""
        self._estimates.observe(event, now)
        self._stale = True

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Evolve for `budget`; whether to go on could still find something better."""
        self._face(view, now)
        for _ in range(budget.generations):
            self._search.evolve(rng)
        for _ in range(budget.steps):
            if not self._search.converged:
                self._search.advance(rng)
        return not self._search.converged

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """The fittest candidate, with a reason for every job that changes or waits."""
        problem = self._face(view, now)
        best = self._search.best
        local_batch = {name: dict(placed) for name, placed in problem.kept.items()}
        reasons: dict[JobId, Reason] = {}
        if best is not None:
            least, owners = least_value(problem, best), owners_of(problem, best)
            for row, places in enumerate(best.by_row()):
                job_row = problem.job_rows[row]
                placed = _dealt(problem, best, row, places)
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
            wake_at=_next_change(problem, view, now),
        )

    def stats(self) -> SearchStats:
        """How the population stands."""
        search = self._search
        fitness = [candidate.fitness for candidate in search.population]
        return SearchStats(
            generations=search.generations,
            best_fitness=max(fitness, default=0.0),
            mean_fitness=sum(fitness) / len(fitness) if fitness else 0.0,
            diversity=search.diversity,
            incumbent_fitness=search.incumbent.fitness if search.incumbent else 0.0,
        )

    def _face(self, view: ClusterView, now: Seconds) -> Problem:
        """The problem of `view`, built again if there is anything new."""
        problem = self._problem
        fresh = not self._stale and now < self._until
        if problem is None or problem.version != view.version or not fresh:
            problem = self._problem = self._builder.build(view, now)
            self._until = _next_change(problem, view, now) or Seconds(math.inf)
            self._search.update(problem)
            self._stale = False
        return problem


def _dealt(problem: Problem, best: Candidate, row: int, places: Sequence[int]) -> dict[SlotId, int]:
    """Local batches of a job; those of now where slots and batch stay the same."""
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


def _next_change(problem: Problem, view: ClusterView, now: Seconds) -> Seconds | None:
    """When something that is out of the question now becomes possible: a try, or a move."""
    times = [
        *problem.backing_off.values(),
        *(job.retry_at for job in view.jobs.values()),
        *problem.gates,
    ]
    return min((at for at in times if at > now), default=None)
