"""Population of the search: seeded, refreshed with each new view, evolved by generations."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import SearchStats
from controlplane.policy.ones.greedy import baselines, core_limited, exchanged, filled
from controlplane.policy.ones.operators import (
    Candidate,
    crossed,
    laid_out,
    moved,
    mutated,
    node_jitter,
    present,
    refreshed,
    resized,
    traded,
    with_places_exchanged,
)
from controlplane.policy.ones.placement import NO_HINTS, PlacementHints
from controlplane.policy.ones.problem import Problem
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.search_loop import Evolution
from controlplane.prediction import IntArray
from schemas.ids import JobId

KINDS = 4  # kinds of children: crossed, mutated, resized, moved; traded is a fifth
MIN_IMPROVEMENT = 1e-9  # relative; a smaller gain is no progress
RELEVANT_CHANGE = 0.02  # relative change of a value that starts a new search


_Former = tuple[Problem | None, Candidate]
_Genes = dict[JobId, int]  # slots of each job, independent of the numbering of levels


class EvolutionarySearch(Evolution):
    """Population of K candidates; the best is never worse than greedy or than no change.

    `update` must be called with a problem before the first step.
    """

    def __init__(self, options: OnesOptions) -> None:
        super().__init__(options.patience)
        self._options = options
        self._problem: Problem | None = None
        self._searched: Problem | None = None  # last problem that was searched
        self.population: list[Candidate] = []
        self.incumbent: Candidate | None = None
        self._former: list[_Former] = []  # candidates of earlier problems, not refreshed yet
        self._baselines: list[IntArray] | None = []  # levels by baselines; None: not computed yet
        self._children: list[Candidate | None] = []  # of the incomplete generation
        self._bred_count = 0
        self._seen: dict[bytes, Candidate | None] = {}  # layouts for the present problem

    @property
    def best(self) -> Candidate | None:
        """Fittest candidate; of equal ones the one with the fewest changes."""
        return self.population[0] if self.population else None

    def update(self, problem: Problem) -> None:
        """Replace the problem: seed with present and greedy schedules, refresh former ones."""
        former = [(self._problem, candidate) for candidate in self.population]
        former = [*former, *self._former][: self._options.population]
        how = self._options.search
        if how == "auto":  # no gain elsewhere (docs/evolution.md)
            how = "evolution" if problem.slow is not None else "greedy"
        calm = how == "greedy" or (
            self.converged and self._searched is not None and _alike(self._searched, problem)
        )
        self._problem, self._idle_generations = problem, self._options.patience if calm else 0
        self._searched = self._searched if calm else problem
        self.incumbent = present(problem)
        self._seen = {}
        seeds = [filled(problem, problem.present), filled(problem, problem.lowest)]
        seeds += [exchanged(problem, levels) for levels in seeds]
        seeds.append(refreshed(problem, problem.present))
        if problem.cores < problem.capacity and problem.job_rows:
            seeds.append(core_limited(problem))
        found = [self.incumbent, *(self._child(problem, levels) for levels in seeds)]
        self._former = former[1:] if how == "evolution" else []
        self._baselines = None if how == "evolution" else []
        self._children, self._bred_count = [], 0
        found += [self._refresh_former(problem, one) for one in former[:1]]
        self._select(found)
        if self.population:
            self._select([*self.population, with_places_exchanged(problem, self.population[0])])

    def stats(self) -> SearchStats:
        """Return statistics of the population."""
        fitness = [candidate.fitness for candidate in self.population]
        return SearchStats(
            generations=self.generations,
            best_fitness=max(fitness, default=0.0),
            mean_fitness=sum(fitness) / len(fitness) if fitness else 0.0,
            diversity=self.diversity,
            incumbent_fitness=self.incumbent.fitness if self.incumbent else 0.0,
        )

    @property
    def diversity(self) -> float:
        """Mean share of jobs in which two candidates differ."""
        if len(self.population) < 2 or not len(self.population[0].levels):  # noqa: PLR2004 - two
            return 0.0
        levels = np.array([candidate.levels for candidate in self.population])
        differ = sum(float((levels[n:] != levels[:-n]).mean(axis=1).sum())
                     for n in range(1, len(levels)))  # fmt: skip
        return 2.0 * differ / (len(levels) * (len(levels) - 1))

    def advance(self, rng: Generator) -> None:
        """Run one step of a generation: lay out one baseline or former candidate, or one child."""
        problem = self._problem
        if problem is None or not problem.job_rows or not self.population:
            self._stop()
        elif self._baselines is None:
            self._baselines = baselines(problem)
        elif self._baselines:
            self._children.append(self._child(problem, self._baselines.pop()))
        elif self._former:
            self._children.append(self._refresh_former(problem, self._former.pop()))
        elif self._bred_count < self._options.population:
            self._children.append(self._make_child(problem, rng))
            self._bred_count += 1
        else:
            self._finish_generation()

    def _make_child(self, problem: Problem, rng: Generator) -> Candidate | None:
        climbs = self._options.search == "climb"
        many = 1 if climbs else len(self.population)
        one = self.population[int(rng.integers(many))]
        match self._bred_count % (KINDS + problem.seeks_trades):
            case 0 if not climbs:
                other = self.population[int(rng.integers(many))]
                levels = crossed(problem, one.levels, other.levels, rng)
            case 0 | 1:
                levels = mutated(problem, one.levels, self._options.mutation_rate, rng)
            case 2:
                levels = resized(problem, one.levels, rng)
            case kind:
                hints = (moved if kind < KINDS else traded)(problem, one, rng)
                if hints is None:
                    levels = resized(problem, one.levels, rng)
                else:
                    return laid_out(problem, one, one.levels, hints)
        jitter = node_jitter(problem, rng)
        return self._child(
            problem, levels, one, NO_HINTS if jitter is None else PlacementHints(jitter=jitter)
        )

    def _child(
        self,
        problem: Problem,
        levels: IntArray,
        parent: Candidate | None = None,
        hints: PlacementHints = NO_HINTS,
    ) -> Candidate | None:
        """Lay out levels from `parent` or the present schedule; cached if without hints."""
        parent = parent or self.incumbent
        if parent is None:
            return None
        if hints is not NO_HINTS:
            return laid_out(problem, parent, levels, hints)
        key = parent.owner.tobytes() + levels.tobytes()
        if key not in self._seen:
            self._seen[key] = laid_out(problem, parent, levels)
        return self._seen[key]

    def _finish_generation(self) -> None:
        """Complete the generation: the fittest of parents and children survive."""
        before = self.population[0].fitness
        self._select([*self.population, *self._children])
        self._children, self._bred_count = [], 0
        self._end_generation(
            better=self.population[0].fitness > before * (1.0 + MIN_IMPROVEMENT) + MIN_IMPROVEMENT
        )

    def _refresh_former(self, problem: Problem, former: _Former) -> Candidate | None:
        levels = _levels(problem, _genes(*former))
        return self._child(problem, refreshed(problem, levels))

    def _select(self, found: list[Candidate | None]) -> None:
        """Keep the K fittest distinct candidates.

        Paper: by a draw, which flips decisions. Here: by mean values.
        """
        unique: dict[bytes, Candidate] = {}
        for candidate in found:
            if candidate is not None:
                unique.setdefault(candidate.key, candidate)
        ranked = sorted(unique.values(), key=lambda c: (-round(c.fitness, 9), c.moves, c.key))
        self.population = ranked[: self._options.population]


def _alike(one: Problem, other: Problem) -> bool:
    """True if two problems differ too little for a new search to find anything."""
    if one.capacity != other.capacity or one.sizes.shape != other.sizes.shape:
        return False
    if not _same_places(one, other):
        return False
    pairs = zip(one.job_rows, other.job_rows, strict=True)
    same = all(a.job.job == b.job.job and a.now == b.now for a, b in pairs)
    same = same and np.array_equal(one.sizes, other.sizes)
    same = same and np.array_equal(one.present, other.present)
    return bool(same and np.allclose(one.worth, other.worth, rtol=RELEVANT_CHANGE, atol=0.0))


def _same_places(one: Problem, other: Problem) -> bool:
    """True if GPU types and neighbours cost about the same."""
    costs = [(one.slow, other.slow)]
    if one.interference is not None and other.interference is not None:
        costs.append((one.interference.log_slowdowns, other.interference.log_slowdowns))
    elif one.interference is not other.interference:
        return False
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.shape == b.shape
            and bool(np.allclose(a, b, rtol=RELEVANT_CHANGE, atol=RELEVANT_CHANGE)))
        for a, b in costs
    )  # fmt: skip


def _genes(problem: Problem | None, candidate: Candidate) -> _Genes:
    if problem is None:
        return {}
    sizes = problem.sizes[problem.rows, candidate.levels].tolist()
    return {job_row.job.job: size for job_row, size in zip(problem.job_rows, sizes, strict=True)}


def _levels(problem: Problem, genes: _Genes) -> IntArray:
    """Return a former candidate as levels of `problem`: the nearest allowed sizes."""
    names = (job_row.job.job for job_row in problem.job_rows)
    slots = np.array([genes.get(name, -1) for name in names], dtype=np.int64)
    sizes = problem.sizes[:, 1:]  # ascending, padded with 0
    at = np.count_nonzero((sizes > 0) & (sizes <= slots[:, None]), axis=1)
    found = np.where(slots > 0, np.maximum(1, at), 0)
    return np.where(slots < 0, problem.present, found)
