"""The population: seeded, refreshed with each new view, evolved generation by generation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from controlplane.policy.ones.fitness import IntArray
from controlplane.policy.ones.genome import BoolArray, Candidate, filled, lowest, score
from controlplane.policy.ones.operators import (
    crossed,
    mutated,
    refreshed,
    repacked,
    resized,
)
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import Problem
from schemas.ids import JobId

UNHURRIED = 2  # generations before a running job may be stopped
BETTER = 1e-9  # relative: less is no progress
NEWS = 0.02  # relative change of some worth that makes it worth while to search again


@dataclass(frozen=True, slots=True)
class _Gene:
    """What a candidate said of one job, kept while levels are numbered anew."""

    slots: int
    packed: bool


class Search:
    """Holds K candidates; the best of them is never worse than greedy or than doing nothing."""

    def __init__(self, options: OnesOptions) -> None:
        self._options = options
        self._problem: Problem | None = None
        self._searched: Problem | None = None  # the last one that was worth a search
        self.population: list[Candidate] = []
        self.incumbent: Candidate | None = None
        self.generations = 0
        self._faced_at = 0  # generation
        self._idle_generations = 0
        self._former: list[dict[JobId, _Gene]] = []  # of the last problem, not yet renewed
        self._children: list[Candidate | None] = []  # of the generation that is not complete
        self._born = 0
        self._scores: dict[bytes, Candidate | None] = {}  # of the present problem

    @property
    def best(self) -> Candidate | None:
        """The fittest; among equals the one that changes least."""
        return self.population[0] if self.population else None

    @property
    def chosen(self) -> Candidate | None:
        """What to do now: the fittest, but nobody is stopped before a little thought was given.

        The first answer comes from few candidates; a better one often finds room for all.
        """
        hurried = self.generations - self._faced_at < UNHURRIED and not self.resting
        if hurried and self._problem is not None:
            running = self._problem.present > 0
            gentle = (c for c in self.population if not (running & (c.levels == 0)).any())
            return next(gentle, self.best)
        return self.best

    @property
    def resting(self) -> bool:
        """Whether nothing better was found for so long that it is not worth while to go on."""
        return self._idle_generations >= self._options.patience

    def face(self, problem: Problem) -> None:
        """Take a new problem: seed it with incumbent and greedy, and refresh what was evolved."""
        former = [_genes(self._problem, candidate) for candidate in self.population]
        former = [*former, *self._former][: self._options.population]
        calm = self.resting and self._searched is not None and _alike(self._searched, problem)
        self._problem, self._idle_generations = problem, self._options.patience if calm else 0
        self._searched = self._searched if calm else problem
        self._faced_at = self.generations
        none = np.zeros(len(problem.cases), dtype=np.bool_)
        self.incumbent = score(problem, problem.present, none)
        seeds = [
            problem.present,
            filled(problem, problem.present),
            filled(problem, lowest(problem)),
            refreshed(problem, problem.present),
        ]
        found = [score(problem, levels, none) for levels in seeds]
        self._scores = {}
        self._former, self._children, self._born = former[1:], [], 0
        found += [self._renewed(problem, genes) for genes in former[:1]]
        self._select(found)

    def evolve(self, rng: Generator) -> bool:
        """One generation; whether a better candidate was found."""
        before = self.generations
        while self.generations == before and not self.resting:
            self.breed(rng)
        return not self._idle_generations

    def breed(self, rng: Generator) -> None:
        """One step of a generation: renew a former candidate, or have one child."""
        problem = self._problem
        if problem is None or not problem.cases or not self.population:
            self._idle_generations = self._options.patience
        elif self._former:
            self._children.append(self._renewed(problem, self._former.pop()))
        elif self._born < self._options.population:
            self._children.append(self._child(problem, rng))
            self._born += 1
        else:
            self._succeed()

    def _child(self, problem: Problem, rng: Generator) -> Candidate | None:
        many = len(self.population)
        one = self.population[int(rng.integers(many))]
        match self._born % 3:
            case 0:
                other = self.population[int(rng.integers(many))]
                levels = crossed(problem, one.levels, other.levels, rng)
            case 1:
                levels = mutated(problem, one.levels, self._options.mutation_rate, rng)
            case _:
                levels = resized(problem, one.levels, rng)
        return self._scored(problem, levels, repacked(problem, one.packed, levels, rng))

    def _scored(self, problem: Problem, levels: IntArray, packed: BoolArray) -> Candidate | None:
        """The same schedule is placed and scored once for each problem."""
        key = levels.tobytes() + packed.tobytes()
        if key not in self._scores:
            self._scores[key] = score(problem, levels, packed)
        return self._scores[key]

    def _succeed(self) -> None:
        """The generation is complete: the fittest of parents and children go on."""
        before = self.population[0].fitness
        self._select([*self.population, *self._children])
        self._children, self._born = [], 0
        self.generations += 1
        better = self.population[0].fitness > before * (1.0 + BETTER) + BETTER
        self._idle_generations = 0 if better else self._idle_generations + 1

    def _renewed(self, problem: Problem, genes: dict[JobId, _Gene]) -> Candidate | None:
        levels, packed = _levels(problem, genes)
        levels = refreshed(problem, levels)
        return self._scored(problem, levels, packed & (levels == problem.present))

    def _select(self, found: list[Candidate | None]) -> None:
        """The K fittest different ones (by mean values: the paper draws, which flips decisions)."""
        unique: dict[bytes, Candidate] = {}
        for candidate in found:
            if candidate is not None:
                unique.setdefault(candidate.key, candidate)
        problem = self._problem
        present = problem.present if problem is not None else None
        ranked = sorted(
            unique.values(), key=lambda c: (-round(c.fitness, 9), _moves(c, present), c.key)
        )
        self.population = ranked[: self._options.population]


def _alike(one: Problem, other: Problem) -> bool:
    """Whether two problems differ by so little that there is nothing new to find."""
    if one.capacity != other.capacity or one.sizes.shape != other.sizes.shape:
        return False
    pairs = zip(one.cases, other.cases, strict=True)
    same = all(a.job.job == b.job.job and a.now == b.now for a, b in pairs)
    same = same and np.array_equal(one.sizes, other.sizes)
    same = same and np.array_equal(one.present, other.present)
    return bool(same and np.allclose(one.worth, other.worth, rtol=NEWS, atol=0.0))


def _moves(candidate: Candidate, present: IntArray | None) -> int:
    return int((candidate.levels != present).sum()) + int(candidate.packed.sum())


def _genes(problem: Problem | None, candidate: Candidate) -> dict[JobId, _Gene]:
    if problem is None:
        return {}
    return {
        case.job.job: _Gene(
            int(problem.sizes[row, candidate.levels[row]]), bool(candidate.packed[row])
        )
        for row, case in enumerate(problem.cases)
    }


def _levels(problem: Problem, genes: dict[JobId, _Gene]) -> tuple[IntArray, BoolArray]:
    """A former candidate in the numbers of `problem`: the nearest size that a job may have."""
    levels = problem.present.copy()
    packed = np.zeros(len(levels), dtype=np.bool_)
    for row, case in enumerate(problem.cases):
        gene = genes.get(case.job.job)
        if gene is None:
            continue
        if gene.slots == 0:
            levels[row] = 0
            continue
        sizes = case.offers.sizes
        levels[row] = max(1, int(np.searchsorted(sizes, gene.slots, side="right")))
        same = levels[row] == problem.present[row]
        packed[row] = gene.packed and same and problem.spread[row]
    return levels, packed
