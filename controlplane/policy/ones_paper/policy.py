"""Policy `ones-paper`: the search of the ONES paper (figure 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator, default_rng

from controlplane.policy.api import Budget, ClusterView, JobView, Plan, SearchStats
from controlplane.policy.ones_paper.candidates import (
    Scorer,
    carried_over,
    counts_of,
    crossed,
    different,
    fill_costs,
    filled,
    mean_draw,
    mutated,
    random_schedules,
    refreshed,
    reordered,
    scorer_for,
    selected,
    slots_by_job,
    within_limits,
    work_left,
)
from controlplane.policy.ones_paper.job_estimates import PaperEstimates
from controlplane.policy.ones_paper.problem import Genes, PaperProblem, ProblemBuilder
from controlplane.policy.options import MAX_CANDIDATES, OnesPaperOptions
from controlplane.policy.placement.free_slots import Placer
from controlplane.policy.placement.slot_partition import (
    Partition,
    compose_plan,
    partition_of,
    slots_in_words,
    with_batch,
)
from controlplane.policy.search.search_loop import Evolution, SearchPolicy, spread_of
from controlplane.prediction import FloatArray
from schemas.ids import JobId, Seconds, SlotId

MIN_IMPROVEMENT: Final = 1e-9  # relative; a smaller gain is no progress


@dataclass(frozen=True, slots=True)
class _State:
    """Problem with its candidates, best first."""

    problem: PaperProblem
    scorer: Scorer
    genes: Genes  # shape (K, G)
    scores: FloatArray  # scores by mean progress, shape (K,)


class EvolutionarySearch(Evolution):
    """Evolution of K candidates; each generation has three steps.

    `update` must be called with a problem before the first step.
    """

    def __init__(self, options: OnesPaperOptions) -> None:
        super().__init__(options.patience)
        self._options = options
        self._now: _State | None = None
        self._children: list[Genes] = []  # children of the unfinished generation

    @property
    def best(self) -> Genes | None:
        """S*, the job on each slot in the best candidate, shape (G,); None without candidates."""
        return None if self._now is None or not len(self._now.genes) else self._now.genes[0]

    def stats(self) -> SearchStats:
        """Return statistics of the population."""
        scores = self._now.scores if self._now is not None else np.zeros(0)
        return SearchStats(
            generations=self.generations,
            best_fitness=float(scores.max()) if len(scores) else 0.0,
            mean_fitness=float(scores.mean()) if len(scores) else 0.0,
            spread=spread_of(scores),
            incumbent_fitness=self.incumbent(),
            diversity=self.diversity(),
        )

    def diversity(self) -> float:
        """Return the mean share of jobs with different numbers of slots in two candidates."""
        now = self._now
        if now is None or len(now.genes) < 2 or not now.problem.jobs:  # noqa: PLR2004 - a pair
            return 0.0
        jobs, many, sizes = len(now.problem.jobs), len(now.genes), now.genes.shape[1] + 1
        counts = counts_of(now.genes, jobs) + np.arange(jobs) * sizes
        alike = np.bincount(counts.ravel(), minlength=jobs * sizes).astype(np.float64)
        pairs = float((alike * (alike - 1.0)).sum())
        return 1.0 - pairs / (jobs * many * (many - 1.0))

    def incumbent(self) -> float:
        """Return the score of the schedule in force."""
        if self._now is None or not self._now.problem.jobs:
            return 0.0
        problem, scorer = self._now.problem, self._now.scorer
        genes = within_limits(problem.present[None, :], problem)
        return float((scorer.matrix(genes) @ scorer.weights(mean_draw(problem)))[0, 0])

    def update(self, problem: PaperProblem, rng: Generator) -> None:
        """Replace the problem and refresh every candidate with it (figure 7).

        Unlike in the paper, the initial population contains the schedule in force.
        """
        former = self._now
        if former is None or not former.genes.size:
            genes = random_schedules(problem, self._size(problem), rng)
        else:
            genes = carried_over(former.genes, former.problem, problem)
        genes = np.concatenate([problem.present[None, :], genes])
        genes = refreshed(genes, problem, fill_costs(problem, len(genes), rng))
        self._children, self._idle_generations = [], 0
        self._settle(problem, scorer_for(problem, self._options), genes, rng)

    def advance(self, rng: Generator) -> None:
        """Run one step of a generation: crossover, mutation, or reorder with selection."""
        now, options = self._now, self._options
        if now is None or not now.genes.size or not now.problem.jobs:
            self._stop()
            return
        problem, many = now.problem, len(now.genes)
        if not self._children:
            children = within_limits(crossed(now.genes, many, rng), problem)
            self._children.append(filled(children, problem, fill_costs(problem, 2 * many, rng)))
        elif len(self._children) == 1:
            parents = now.genes[rng.integers(0, many, many)]
            struck = rng.random((many, len(problem.jobs))) < options.mutation_rate  # theta
            left = fill_costs(problem, many, rng)
            self._children.append(mutated(parents, problem, struck, left))
        else:
            before = float(now.scores[0])
            children = reordered(np.concatenate(self._children), options.reorder)
            genes = np.concatenate([now.genes, children])
            self._children = []
            after = float(self._settle(problem, now.scorer, genes, rng).scores[0])
            better = after > before + MIN_IMPROVEMENT * max(1.0, abs(before))
            self._end_generation(better=better)

    def _settle(
        self, problem: PaperProblem, scorer: Scorer, genes: Genes, rng: Generator
    ) -> _State:
        """Keep the K best distinct candidates, and return them with their problem."""
        distinct = different(genes)
        rows, scores = selected(scorer, distinct, self._size(problem), rng)
        self._now = _State(problem, scorer, distinct[rows], scores[rows])
        return self._now

    def _size(self, problem: PaperProblem) -> int:
        """Return K, the number of candidates to keep."""
        return self._options.population or min(max(len(problem.slots), 2), MAX_CANDIDATES)


class OnesPaper(SearchPolicy[PaperProblem]):
    """Policy that evolves schedules, i.e. the job on each slot, and plans the best one.

    Each ambiguity of the paper is an option, and one of its values is the literal reading.
    """

    def __init__(self, options: OnesPaperOptions | None = None) -> None:
        self.options = options or OnesPaperOptions()
        self._estimates = PaperEstimates(self.options)
        self._builder = ProblemBuilder(self._estimates, self.options)
        self._search = EvolutionarySearch(self.options)
        self._placer = Placer()
        super().__init__(self._estimates, self._search)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Fit the progress model to finished jobs, then evolve as the base class does."""
        self._estimates.learn(rng)
        return super().improve(view, budget, rng, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the best candidate as a plan for ungated jobs, and reasons to change or wait."""
        problem = self._current_problem(view, now)
        partition = partition_of(view, now)
        rows = {job.job: row for row, job in enumerate(problem.jobs)}
        best = self._search.best
        if best is None or problem.held:
            placed = {job.job: dict(job.running_on) for job in partition.running}
        else:
            slots = self._slots(partition, problem, slots_by_job(problem, best))
            placed = {
                name: with_batch(view.jobs[name], int(problem.batches[row, len(chosen)]), chosen)
                if (row := rows.get(name)) is not None
                else dict(view.jobs[name].running_on)  # a gated job
                for name, chosen in slots.items()
            }
        left = work_left(problem, mean_draw(problem))[:, 0]

        def why(job: JobView, many: int) -> tuple[str, dict[str, float]]:
            row = rows[job.job]
            return _reason(job, problem, row, float(left[row]), many)

        opens_at = min((at for at in problem.opens_at if at > now), default=None)
        return compose_plan(partition, placed, why, wake_at=opens_at)

    def _build_problem(self, view: ClusterView, now: Seconds) -> PaperProblem:
        problem = self._builder.build(view, now)
        self._search.update(problem, default_rng((self.options.seed, view.version)))
        return problem

    def _next_change(
        self, problem: PaperProblem, view: ClusterView, now: Seconds
    ) -> Seconds | None:
        wake_at = partition_of(view, now).wake_at
        times = [at for at in (*problem.opens_at, wake_at) if at is not None and at > now]
        return min(times, default=None)

    def _slots(
        self, partition: Partition, problem: PaperProblem, chosen: dict[JobId, list[SlotId]]
    ) -> dict[JobId, list[SlotId]]:
        """Return the slots of each job by the best candidate; gated jobs keep their slots."""
        kept = {
            job.job: list(job.running_on) for job in partition.running if job.job in problem.gated
        }
        if self.options.reorder == "flat":
            return kept | {
                name: slots
                for name, slots in chosen.items()
                if _reachable(partition.view.jobs[name], slots)
            }
        sizes = {name: len(slots) for name, slots in (kept | chosen).items()}
        largest_first = dict(sorted(sizes.items(), key=lambda entry: -entry[1]))
        return self._placer.place(partition, largest_first)


def _reachable(job: JobView, slots: list[SlotId]) -> bool:
    """True if the job need not move, or has a sample for each of its old and new slots together."""
    both = job.running_on.keys() | set(slots)
    moves = len(both) > len(job.running_on) and len(both) > len(slots)
    return not moves or len(both) <= job.batch_limit


def _reason(
    job: JobView, problem: PaperProblem, row: int, left: float, many: int
) -> tuple[str, dict[str, float]]:
    """Return the text and the numbers that explain a job's size."""
    share = problem.alpha[row] / (problem.alpha[row] + problem.beta[row])
    numbers = {
        "batch_now": float(sum(job.running_on.values())),
        "batch_then": float(problem.batches[row, many]) if many else 0.0,
        "batch_limit": float(problem.limits[row]),
        "progress": float(share),
        "samples_left": left,
    }
    if not many:
        if problem.held:
            return "the schedule changes when all running jobs have finished an epoch", numbers
        if problem.most[row] < problem.least[row]:
            text = f"its batch limit of {problem.limits[row]} allows no slot"
            return text, numbers
        return "the best schedule that was found gives all slots to other jobs", numbers
    rate = float(problem.rates[row, many, 0])
    if rate > 0:
        numbers["utilization_s"] = left / rate * many  # T c of eq. 8
    text = f"batch {int(problem.batches[row, many])} of at most {problem.limits[row]}"
    return f"{text}, {100 * share:.0f}% done on {slots_in_words(many)}", numbers
