"""The population, and one generation of it (ONES figure 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import SearchStats
from controlplane.policy.ones_paper.candidate_scores import (
    Scorer,
    counts_of,
    mean_draw,
    scorer_for,
    selected,
)
from controlplane.policy.ones_paper.operators import (
    crossed,
    fill_costs,
    filled,
    mutated,
    preempted,
    random_schedules,
    refreshed,
    reordered,
    within_limits,
)
from controlplane.policy.ones_paper.options import MOST_CANDIDATES, OnesPaperOptions
from controlplane.policy.ones_paper.problem import IDLE, Genes, Problem
from controlplane.policy.search.search_loop import Evolution
from controlplane.prediction.array_types import FloatArray
from schemas.ids import JobId, SlotId

BETTER: Final = 1e-9  # relative: less is no progress


@dataclass(frozen=True, slots=True)
class _State:
    """One problem, and the candidates for it; the best one first."""

    problem: Problem
    scorer: Scorer
    genes: Genes  # shape (K, G)
    scores: FloatArray  # by mean progress, shape (K,)


class EvolutionarySearch(Evolution):
    """Evolves K candidates, generation by generation, in three steps each."""

    def __init__(self, options: OnesPaperOptions) -> None:
        """Begin without a problem: `update` brings the first.

        Args:
            options: size of the population, mutation rate, order and patience.
        """
        super().__init__(options.patience)
        self._options = options
        self._now: _State | None = None
        self._children: list[Genes] = []  # of the generation that is not complete

    @property
    def best(self) -> Genes | None:
        """S*: the job on each slot, shape (G,)."""
        return None if self._now is None or not len(self._now.genes) else self._now.genes[0]

    @property
    def scores(self) -> FloatArray:
        """Of the population, by mean progress."""
        return np.zeros(0) if self._now is None else self._now.scores

    @property
    def population(self) -> Genes:
        """All candidates, shape (K, G)."""
        return np.zeros((0, 0), dtype=np.int16) if self._now is None else self._now.genes

    def stats(self) -> SearchStats:
        """How the population stands."""
        scores = self.scores
        return SearchStats(
            generations=self.generations,
            best_fitness=float(scores.max(initial=-np.inf)) if len(scores) else 0.0,
            mean_fitness=float(scores.mean()) if len(scores) else 0.0,
            incumbent_fitness=self.incumbent(),
            diversity=self.diversity(),
        )

    def diversity(self) -> float:
        """Mean share of jobs that have different numbers of slots in two candidates."""
        now = self._now
        if now is None or len(now.genes) < 2 or not now.problem.jobs:  # noqa: PLR2004 - a pair
            return 0.0
        jobs, many, sizes = len(now.problem.jobs), len(now.genes), now.genes.shape[1] + 1
        counts = counts_of(now.genes, jobs) + np.arange(jobs) * sizes
        alike = np.bincount(counts.ravel(), minlength=jobs * sizes).astype(np.float64)
        pairs = float((alike * (alike - 1.0)).sum())
        return 1.0 - pairs / (jobs * many * (many - 1.0))

    def incumbent(self) -> float:
        """The score of the schedule in force."""
        if self._now is None or not self._now.problem.jobs:
            return 0.0
        problem, scorer = self._now.problem, self._now.scorer
        genes = within_limits(problem.present[None, :], problem)
        return float((scorer.matrix(genes) @ scorer.weights(mean_draw(problem)))[0, 0])

    def update(self, problem: Problem, rng: Generator) -> None:
        """Take a new view: refresh every candidate with it (figure 7).

        Paper: the initial population is random. So it is here, beside the schedule in force.

        Args:
            problem: made of a new view, or of what was learnt since.
            rng: draws the initial population, and progress.
        """
        options, former = self._options, self._now
        many = options.population or min(max(len(problem.slots), 2), MOST_CANDIDATES)
        if former is None or not former.genes.size:
            genes = random_schedules(problem, many, rng)
        else:
            genes = carried_over(former.genes, former.problem, problem)
        if options.incumbent:
            genes = np.concatenate([problem.present[None, :], genes])
        genes = refreshed(genes, problem, self._left(problem, len(genes), rng))
        self._children, self._idle_generations = [], 0
        self._settle(problem, scorer_for(problem, options), genes, many, rng)

    def advance(self, rng: Generator) -> None:
        """One step of a generation: crossover, mutation, or reorder and selection.

        Args:
            rng: draws parents, mutations and the progress that candidates are scored with.
        """
        now, options = self._now, self._options
        if now is None or not now.genes.size or not now.problem.jobs:
            self._give_up()
            return
        problem, many = now.problem, len(now.genes)
        if not self._children:
            children = within_limits(crossed(now.genes, many, rng), problem)
            self._children.append(filled(children, problem, self._left(problem, 2 * many, rng)))
        elif len(self._children) == 1:
            parents = now.genes[rng.integers(0, many, many)]
            struck = preempted(parents, problem, options.mutation_rate, rng)
            left = self._left(problem, many, rng)
            self._children.append(mutated(parents, problem, struck, left))
        else:
            before = float(now.scores[0])
            children = reordered(np.concatenate(self._children), options.reorder)
            genes = np.concatenate([now.genes, children])
            self._children = []
            wanted = options.population or min(max(len(problem.slots), 2), MOST_CANDIDATES)
            after = float(self._settle(problem, now.scorer, genes, wanted, rng).scores[0])
            better = after > before + BETTER * max(1.0, abs(before))
            self._end_generation(better=better)

    def _settle(
        self, problem: Problem, scorer: Scorer, genes: Genes, many: int, rng: Generator
    ) -> _State:
        """Keep the K best different ones."""
        different = _different(genes)
        rows, scores = selected(scorer, different, many, rng)
        self._now = _State(problem, scorer, different[rows], scores[rows])
        return self._now

    def _left(self, problem: Problem, many: int, rng: Generator) -> FloatArray:
        return fill_costs(problem, sampled=self._options.fill == "sampled", many=many, rng=rng)


def carried_over(genes: Genes, before: Problem, after: Problem) -> Genes:
    """Candidates of one view in the rows and columns of the next; (1) of refresh.

    Slots of jobs that are over are idle. A slot that was not in play is as it is now.

    Args:
        genes: candidates, shape (K, G).

    Returns:
        Shape (K, G of `after`).
    """
    rows = {job.job: row for row, job in enumerate(after.jobs)}
    renamed = np.full(len(before.jobs) + 1, IDLE, dtype=np.int16)  # the last one: idle
    for row, job in enumerate(before.jobs):
        renamed[row] = rows.get(job.job, IDLE)
    columns: dict[SlotId, int] = {slot: place for place, slot in enumerate(before.slots)}
    source = np.array([columns.get(slot, -1) for slot in after.slots], dtype=np.int64)
    found = np.tile(after.present, (len(genes), 1))
    known = source >= 0
    found[:, known] = renamed[genes[:, source[known]]]
    return found


def _different(genes: Genes) -> Genes:
    """Every candidate once, in the order of their first occurrence."""
    if not genes.size:
        return genes[:1]
    seen: dict[bytes, int] = {}
    for place, row in enumerate(genes):
        seen.setdefault(row.tobytes(), place)
    return genes[list(seen.values())]


def slots_by_job(problem: Problem, best: Genes) -> dict[JobId, list[SlotId]]:
    """The slots of each job that has some in a candidate, in the order of the columns.

    Args:
        problem: the view as the search sees it.
        best: a candidate, shape (G,).
    """
    found: dict[JobId, list[SlotId]] = {}
    for place, row in enumerate(best.tolist()):
        if row != IDLE:
            found.setdefault(problem.jobs[row].job, []).append(problem.slots[place])
    return found
