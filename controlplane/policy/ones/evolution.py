"""Population of the search (ONES section 3.2.2), updated for each view and improved by evolution.

A candidate is a schedule: the level of every job, the job on each slot, and the value of each job.
Where GPU types differ, jobs also exchange places.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import SearchStats
from controlplane.policy.ones.greedy import (
    baselines,
    core_limited,
    exchanged,
    filled,
    repaired,
    used,
)
from controlplane.policy.ones.placement import NO_HINTS, PlacementHints, lay_out
from controlplane.policy.ones.problem import Problem
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.search_loop import Evolution, spread_of
from controlplane.prediction import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its layout on slots and its score."""

    levels: IntArray  # shape (J,)
    owner: IntArray  # shape (S,), the row of the job on each slot; negative: no job
    value: FloatArray  # shape (J,), contribution of each job to the fitness
    fitness: float
    moves: int  # number of jobs that change

    @property
    def key(self) -> bytes:
        """Bytes that are equal for candidates with the same schedule."""
        return self.levels.tobytes() + self.owner.tobytes()

    def by_row(self) -> list[list[int]]:
        """Return, for each row, the places of the job's slots."""
        order = np.argsort(self.owner, kind="stable")
        edges = np.searchsorted(self.owner[order], np.arange(len(self.levels) + 1))
        cut = order[edges[0] :].tolist()
        at = (edges - edges[0]).tolist()
        return [cut[begin:end] for begin, end in itertools.pairwise(at)]

    def slots(self, row: int) -> tuple[int, ...]:
        """Return the places of the slots of the job in `row`."""
        return tuple(np.flatnonzero(self.owner == row).tolist())


def present(problem: Problem) -> Candidate:
    """Return the schedule in force as a candidate."""
    return score(problem, problem.present, problem.owner)


def score(problem: Problem, levels: IntArray, owner: IntArray) -> Candidate:
    """Return the candidate with these levels and layout, scored by the sum of its jobs' values.

    The values in the table assume the fewest nodes and the best GPU type;
    `Problem.placed_value` corrects them. A job below its due level is penalised (`Problem.floors`).
    """
    value, moved = problem.placed_value(levels, owner)
    if problem.floors is not None:
        value = value - problem.floors.penalty[problem.rows, levels]
    return Candidate(levels, owner, value, float(value.sum()), int(moved.sum()))


def laid_out(
    problem: Problem, parent: Candidate, levels: IntArray, hints: PlacementHints = NO_HINTS
) -> Candidate | None:
    """Return the schedule with these levels that is closest to `parent`; None if impossible."""
    owner = lay_out(problem, parent.owner, parent.levels, levels, hints)
    if owner is None or problem.has_barred_move(owner):
        return None
    return score(problem, levels, owner)


MUTATION_RATE = 0.1  # theta: share of a candidate's jobs that lose their slots
NOISE = 0.3  # sigma of the log factors of a random draw; a judgement
JITTER_SIGMA = 0.2  # sigma of the random costs of nodes; a judgement


def refreshed(problem: Problem, levels: IntArray) -> IntArray:
    """Return the levels of a former candidate, updated for the present jobs.

    Jobs that ended are no longer in the table. A waiting job that never ran gets its least slots
    from the jobs that have run longest, so that it does not starve (rule 3 of the paper). Slots
    that are still idle go to the jobs with the largest gain.
    """
    begun = [(bool(job_row.job.epoch), job_row.job.submitted_at) for job_row in problem.job_rows]
    order = np.array(sorted(range(len(begun)), key=begun.__getitem__), dtype=np.int64)
    levels = repaired(problem, levels, order)
    low = np.maximum(problem.lowest, 1)
    free = problem.capacity - used(problem, levels)
    donors = sorted(  # jobs that can give slots up; the longest-running last
        np.flatnonzero(levels > low).tolist(), key=lambda row: problem.job_rows[row].job.ran_s
    )
    for row in map(int, order):
        job_row = problem.job_rows[row]
        begun_before = levels[row] or job_row.now or job_row.job.epoch
        if begun_before or not np.isfinite(problem.value[row, 1]):
            continue
        need = int(problem.sizes[row, 1])
        while free < need and donors:
            other = donors[-1]
            lower = int(levels[other]) - 1
            free += int(problem.sizes[other, lower + 1] - problem.sizes[other, lower])
            levels[other] = lower
            if lower <= low[other]:
                donors.pop()
        if free >= need:
            levels[row], free = 1, free - need
    return filled(problem, levels)


def crossed(problem: Problem, one: IntArray, other: IntArray, rng: Generator) -> IntArray:
    """Uniform crossover: take each job's level from one of the two parents at random.

    The paper crosses GPU by GPU, which tears jobs apart. Here whole jobs are crossed. If the slots
    do not suffice, random jobs get their lowest level; slots that are left are filled.
    """
    heads = rng.random(len(one)) < 0.5  # noqa: PLR2004 - a fair coin
    levels = repaired(problem, np.where(heads, one, other), rng.permutation(len(one)))
    return filled(problem, levels)


def mutated(problem: Problem, parent: IntArray, rate: float, rng: Generator) -> IntArray:
    """Uniform mutation: a share `rate` (theta) of the jobs lose their slots to other jobs."""
    lost = rng.random(len(parent)) < rate
    if not lost.any() and len(parent):
        lost[rng.integers(len(parent))] = True
    levels = repaired(problem, np.where(lost, problem.lowest, parent), rng.permutation(len(parent)))
    return filled(problem, levels, np.exp(rng.normal(0.0, NOISE, len(parent))))


def resized(problem: Problem, parent: IntArray, rng: Generator) -> IntArray:
    """Give one random job another size; random other jobs lose slots to make room for it."""
    levels = parent.copy()
    row = int(rng.integers(len(parent)))
    allowed = np.flatnonzero(np.isfinite(problem.value[row]))
    levels[row] = int(rng.choice(allowed))
    order = rng.permutation(len(parent))
    order = np.concatenate([[row], order[order != row]])
    levels = repaired(problem, levels, order)
    if problem.places_matter and rng.random() < 0.5:  # noqa: PLR2004 - a coin
        return levels  # a slow GPU or a bad neighbour may cost more than an idle slot
    return filled(problem, levels)


def moved(problem: Problem, parent: Candidate, rng: Generator) -> PlacementHints | None:
    """Reorder and migration: choose a job to move at the same size, or None if none may move.

    The job is scattered, or, where places matter, sometimes any movable job.
    """
    some = problem.scattered_rows(parent.owner)
    if problem.places_matter and (not len(some) or rng.random() < 0.5):  # noqa: PLR2004 - a coin
        some = np.flatnonzero(problem.free_to_move & (parent.levels > 0))
    if not len(some):
        return None
    return PlacementHints(movers=(int(rng.choice(some)),), jitter=node_jitter(problem, rng))


def node_jitter(problem: Problem, rng: Generator) -> FloatArray | None:
    """Return random costs of nodes, shape (N,), in log step times; None if all places are equal."""
    if not problem.places_matter:
        return None
    return np.asarray(rng.normal(0.0, JITTER_SIGMA, len(problem.slots_on)))


KINDS = 4  # of children: crossed, mutated, resized, moved
MIN_IMPROVEMENT = 1e-9  # relative; a smaller gain is no progress
RELEVANT_CHANGE = 0.02  # relative change of a value that starts a new search


_Former = tuple[Problem, Candidate]


class EvolutionarySearch(Evolution):
    """Population of K candidates; the best is never worse than the greedy or present schedule.

    `update` must be called with a problem before the first step.
    """

    def __init__(self, options: OnesOptions) -> None:
        super().__init__(options.patience)
        self._options = options
        self._problem: Problem  # set by `update`
        self._searched: Problem | None = None  # last problem that was searched
        self.population: list[Candidate] = []
        self.incumbent: Candidate  # set by `update`
        self._former: list[_Former] = []  # candidates of earlier problems, to be refreshed
        self._baselines: list[IntArray] | None = []  # levels that baselines choose; None: unknown
        self._children: list[Candidate | None] = []  # children of the unfinished generation
        self._bred_count = 0
        self._seen: dict[bytes, Candidate | None] = {}  # cached layouts for the present problem

    @property
    def best(self) -> Candidate:
        """Fittest candidate; among equally fit candidates, the one with the fewest changes."""
        return self.population[0]

    def update(self, problem: Problem) -> None:
        """Replace the problem; form the population from present, greedy and former schedules."""
        former = [(self._problem, candidate) for candidate in self.population]
        former = [*former, *self._former][: self._options.population]
        how = self._options.search
        if how == "auto":  # evolution gains nothing if GPUs are alike (docs/evolution.md)
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

    def stats(self) -> SearchStats:
        """Return statistics of the population."""
        fitness = [candidate.fitness for candidate in self.population]
        return SearchStats(
            generations=self.generations,
            best_fitness=max(fitness, default=0.0),
            mean_fitness=sum(fitness) / len(fitness) if fitness else 0.0,
            spread=spread_of(fitness),
            diversity=self.diversity,
            incumbent_fitness=self.incumbent.fitness if self.population else 0.0,
        )

    @property
    def diversity(self) -> float:
        """The share of jobs with different levels in two candidates, averaged over all pairs."""
        if len(self.population) < 2 or not len(self.population[0].levels):  # noqa: PLR2004 - two
            return 0.0
        levels = np.array([candidate.levels for candidate in self.population])
        differ = sum(float((levels[n:] != levels[:-n]).mean(axis=1).sum())
                     for n in range(1, len(levels)))  # fmt: skip
        return 2.0 * differ / (len(levels) * (len(levels) - 1))

    def advance(self, rng: Generator) -> None:
        """Run one step of a generation: lay out a baseline, a former candidate or a child."""
        problem = self._problem
        if not problem.job_rows:
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
        many = len(self.population)
        one = self.population[int(rng.integers(many))]
        match self._bred_count % KINDS:
            case 0:
                other = self.population[int(rng.integers(many))]
                levels = crossed(problem, one.levels, other.levels, rng)
            case 1:
                levels = mutated(problem, one.levels, MUTATION_RATE, rng)
            case 2:
                levels = resized(problem, one.levels, rng)
            case _:
                hints = moved(problem, one, rng)
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
        """Return the layout of `levels`; layouts without hints are cached."""
        parent = parent or self.incumbent
        if hints is not NO_HINTS:
            return laid_out(problem, parent, levels, hints)
        key = parent.owner.tobytes() + levels.tobytes()
        if key not in self._seen:
            self._seen[key] = laid_out(problem, parent, levels)
        return self._seen[key]

    def _finish_generation(self) -> None:
        """End the generation; the fittest among parents and children survive."""
        enough = self.best.fitness * (1.0 + MIN_IMPROVEMENT) + MIN_IMPROVEMENT
        self._select([*self.population, *self._children])
        self._children, self._bred_count = [], 0
        self._end_generation(better=self.best.fitness > enough)

    def _refresh_former(self, problem: Problem, former: _Former) -> Candidate | None:
        return self._child(problem, refreshed(problem, _levels(problem, former)))

    def _select(self, found: list[Candidate | None]) -> None:
        """Keep the K fittest distinct candidates.

        The paper selects by a random draw, which would flip decisions.
        """
        unique: dict[bytes, Candidate] = {}
        for candidate in found:
            if candidate is not None:
                unique.setdefault(candidate.key, candidate)
        ranked = sorted(unique.values(), key=lambda c: (-round(c.fitness, 9), c.moves, c.key))
        self.population = ranked[: self._options.population]


def _alike(one: Problem, other: Problem) -> bool:
    """True if two problems differ so little that a new search would find nothing new."""
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
    """True if GPU types cost about the same in both problems."""
    a, b = one.slow, other.slow
    if a is None or b is None or a.shape != b.shape:
        return a is b
    return bool(np.allclose(a, b, rtol=RELEVANT_CHANGE, atol=RELEVANT_CHANGE))


def _levels(problem: Problem, former: _Former) -> IntArray:
    """Return the levels of `problem` with sizes nearest to those of a former candidate."""
    then, candidate = former
    sizes_then = then.sizes[then.rows, candidate.levels].tolist()
    genes = {row.job.job: size for row, size in zip(then.job_rows, sizes_then, strict=True)}
    slots = np.array([genes.get(row.job.job, -1) for row in problem.job_rows], dtype=np.int64)
    sizes = problem.sizes[:, 1:]  # ascending, padded with 0
    at = np.count_nonzero((sizes > 0) & (sizes <= slots[:, None]), axis=1)
    found = np.where(slots > 0, np.maximum(1, at), 0)
    return np.where(slots < 0, problem.present, found)
