"""Population and generations of the search (ONES figure 5).

The four operations of ONES section 3.2.2 work on all candidates at once. None of them loses a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import SearchStats
from controlplane.policy.ones_paper.candidate_scores import (
    Scorer,
    counts_of,
    draws,
    mean_draw,
    ranks,
    scorer_for,
    selected,
    work_left,
)
from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem
from controlplane.policy.options import MAX_CANDIDATES, OnesPaperOptions
from controlplane.policy.search.search_loop import Evolution
from controlplane.prediction import BoolArray, FloatArray, IntArray
from schemas.ids import JobId, SlotId

INFINITE: Final = np.inf  # gain of a job that cannot grow
MAX_SAMPLES: Final = 1e15  # samples; upper bound in comparisons


def random_schedules(problem: PaperProblem, many: int, rng: Generator) -> Genes:
    """Initialize: put a random job on each slot, shape (K, G). The result may exceed limits."""
    jobs = len(problem.jobs)
    if not jobs:
        return np.full((many, len(problem.slots)), IDLE, dtype=np.int16)
    return rng.integers(0, jobs, (many, len(problem.slots)), dtype=np.int16)


def fill_costs(problem: PaperProblem, many: int, rng: Generator) -> FloatArray:
    """Draw Y of every job in `many` candidates for a fill, shape (K, J).

    The draws keep the candidates different.
    """
    return work_left(problem, draws(problem, rng, many)).T


def refreshed(genes: Genes, problem: PaperProblem, left: FloatArray) -> Genes:
    """Refresh (figure 7): (2) scale down, (3) give slots to new jobs, and fill idle slots.

    Part (1), freeing the slots of finished jobs, is done by `carried_over`.

    Args:
        genes: shape (K, G).
        left: Y for the fill, shape (K, J).
    """
    return filled(with_new_jobs(within_limits(genes, problem), problem), problem, left)


def within_limits(genes: Genes, problem: PaperProblem) -> Genes:
    """Scale every job down to floor(R c / B) slots; a job below its least slots gets none.

    This also repairs children: a crossover may give a job any number of slots.
    """
    counts = counts_of(genes, len(problem.jobs))
    allowed = np.minimum(counts, problem.most)
    allowed = np.where(allowed >= problem.least, allowed, 0)
    if (allowed == counts).all():
        return genes
    job = np.maximum(genes, 0).astype(np.int64)
    stays = (genes != IDLE) & (ranks(genes) < np.take_along_axis(allowed, job, axis=1))
    return np.where(stays, genes, IDLE).astype(np.int16)


def with_new_jobs(genes: Genes, problem: PaperProblem) -> Genes:
    """Give every new job its least slots, from jobs with the largest T_processed if none is idle.

    Paper: avoids starvation of new jobs by the preferential allocation.
    """
    found = genes
    candidates = np.arange(len(genes))
    new = _fitting_new_jobs(problem, genes.shape[1])
    served = np.append(problem.served_s, INFINITE)  # the last entry is IDLE: idle slots go first
    keeps = np.zeros(len(served), dtype=np.int64)  # slots that may not be taken
    keeps[new] = problem.least[new]
    for row in new:
        need = int(problem.least[row])
        lacks = (found == row).sum(axis=1) < need
        if not lacks.any():
            continue
        givers = np.where(ranks(found) < keeps[found], -INFINITE, served[found])
        givers = np.where(found == row, INFINITE, givers)  # a job keeps its own slots
        first = np.argsort(-givers, axis=1, kind="stable")[:, :need]
        found = found.copy() if found is genes else found
        found[candidates[lacks, None], first[lacks]] = row
    return found if found is genes else within_limits(found, problem)


def _fitting_new_jobs(problem: PaperProblem, room: int) -> list[int]:
    """Return the new jobs, in order of arrival, for whose least slots there is room."""
    found: list[int] = []
    for row in np.flatnonzero(problem.new & (problem.most >= problem.least)).tolist():
        room -= int(problem.least[row])
        if room < 0:
            break
        found.append(row)
    return found


def filled(
    genes: Genes, problem: PaperProblem, left: FloatArray, barred: BoolArray | None = None
) -> Genes:
    """Give idle slots to waiting and running jobs until no job can use one (eq. 4).

    Each step selects the job with the least utilization gain (phi' - phi) Y, where phi = c / X: the
    change of eq. 8 when its batch goes to R. A running job goes to floor(R c / B) slots; a waiting
    job, for which that is 0 / 0, to its least slots.

    Args:
        genes: shape (K, G), within limits.
        left: Y, shape (K, J).
        barred: jobs that get nothing, shape (K, J).
    """
    idle = genes == IDLE
    room = idle.sum(axis=1)
    if not room.any() or not len(problem.jobs):
        return genes
    counts, given = counts_of(genes, len(problem.jobs)), np.zeros(len(genes), dtype=np.int64)
    grown = np.full(genes.shape, IDLE, dtype=np.int16)  # job on the n-th idle slot
    phi, finite = _phi(problem), np.nan_to_num(left, posinf=MAX_SAMPLES)
    open_ = np.arange(len(genes))[room > 0]
    while len(open_):
        here, free = counts[open_], (room - given)[open_]
        target = _targets(here, free, problem)
        able = target > here
        if barred is not None:
            able &= ~barred[open_]
        gain = (phi[problem.rows, target] - phi[problem.rows, here]) * finite[open_]
        row = np.where(able, gain, INFINITE).argmin(axis=1)
        some = able.any(axis=1)
        open_, row = open_[some], row[some]
        further = (target - here)[some, row]
        for one, job, more in zip(open_.tolist(), row.tolist(), further.tolist(), strict=True):
            grown[one, given[one] : given[one] + more] = job
        counts[open_, row] += further
        given[open_] += further
        open_ = open_[given[open_] < room[open_]]
    return _with_idle_given(genes, idle, grown)


def _with_idle_given(genes: Genes, idle: BoolArray, grown: Genes) -> Genes:
    """Put the n-th entry of `grown` on the n-th idle slot of each candidate."""
    place = np.cumsum(idle, axis=1) - 1
    taken = np.take_along_axis(grown, np.maximum(place, 0), axis=1)
    return np.where(idle, taken, genes).astype(np.int16)


def _phi(problem: PaperProblem) -> FloatArray:
    """Return phi = c / X by job and size, shape (J, C + 1)."""
    rates = problem.rates[:, :, 0]
    slots = np.broadcast_to(np.arange(rates.shape[1]), rates.shape)
    return np.divide(slots, rates, out=np.zeros(rates.shape), where=rates > 0)


def _targets(counts: IntArray, free: IntArray, problem: PaperProblem) -> IntArray:
    """Return the sizes that jobs would grow to, within the free slots; the present size if none."""
    wanted = np.where(counts > 0, problem.most, problem.least)
    target = np.minimum(wanted, counts + free[:, None])
    fits = (target >= problem.least) & (target <= problem.most)
    return np.where(fits & (target > counts), target, counts)


def crossed(genes: Genes, many: int, rng: Generator) -> Genes:
    """Uniform crossover (figure 8): K random pairs, 2 K children, shape (2 K, G).

    On each slot a random child gets one parent's job, and the other child the other parent's job.
    """
    one = genes[rng.integers(0, len(genes), many)]
    other = genes[rng.integers(0, len(genes), many)]
    return swapped(one, other, rng.random(one.shape) < 0.5)  # noqa: PLR2004 - two children


def swapped(one: Genes, other: Genes, straight: BoolArray) -> Genes:
    """Return the children of pairs of parents; the first half gets `one`'s job where `straight`."""
    return np.concatenate([np.where(straight, one, other), np.where(straight, other, one)])


def preempted(genes: Genes, problem: PaperProblem, rate: float, rng: Generator) -> BoolArray:
    """Uniform mutation: choose each job of each candidate with probability theta, shape (K, J)."""
    return np.asarray(rng.random((len(genes), len(problem.jobs))) < rate)


def mutated(genes: Genes, problem: PaperProblem, struck: BoolArray, left: FloatArray) -> Genes:
    """Uniform mutation (figure 9): fill the slots of pre-empted jobs with other jobs.

    Slots that the other jobs cannot use go back to the pre-empted jobs (eq. 4).

    Args:
        genes: shape (K, G), within limits.
        left: Y for the fill, shape (K, J).
    """
    if not len(problem.jobs):
        return genes
    job = np.maximum(genes, 0).astype(np.int64)
    gone = (genes != IDLE) & np.take_along_axis(struck, job, axis=1)
    emptied = np.where(gone, IDLE, genes).astype(np.int16)
    return filled(filled(emptied, problem, left, struck), problem, left)


def reordered(genes: Genes, how: Literal["flat", "aligned"]) -> Genes:
    """Reorder (figure 10): put the slots of each job next to each other, idle slots at the end.

    `flat` is the paper's order, by first occurrence of the jobs. `aligned` orders by arrival, so
    that a slot has the same job in most candidates; the placer then chooses the real slots, aligned
    to nodes and with few moves.
    """
    if how == "aligned":
        keys = np.where(genes == IDLE, np.iinfo(np.int16).max, genes)
        return np.where(np.sort(keys, axis=1) == np.iinfo(np.int16).max, IDLE,
                        np.sort(keys, axis=1)).astype(np.int16)  # fmt: skip
    order = np.argsort(_first_places(genes), axis=1, kind="stable")
    return np.take_along_axis(genes, order, axis=1)


def _first_places(genes: Genes) -> Genes:
    """Return the first slot of the job on each slot, shape (K, G); G where the slot is idle."""
    many, width = genes.shape
    top = int(genes.max(initial=0)) + 1
    first = np.full((many, top + 1), width, dtype=np.int16)
    rows = np.arange(many)[:, None]
    places = np.arange(width - 1, -1, -1)
    first[rows, genes[:, ::-1]] = places  # the last write wins: the first slot
    first[:, IDLE] = width
    return np.asarray(first[rows, genes])


MIN_IMPROVEMENT: Final = 1e-9  # relative; a smaller gain is no progress


@dataclass(frozen=True, slots=True)
class _State:
    """Problem and its candidates, best first."""

    problem: PaperProblem
    scorer: Scorer
    genes: Genes  # shape (K, G)
    scores: FloatArray  # by mean progress, shape (K,)


class EvolutionarySearch(Evolution):
    """Evolution of K candidates; a generation has three steps.

    `update` must be called with a problem before the first step.
    """

    def __init__(self, options: OnesPaperOptions) -> None:
        super().__init__(options.patience)
        self._options = options
        self._now: _State | None = None
        self._children: list[Genes] = []  # of the incomplete generation

    @property
    def best(self) -> Genes | None:
        """S*: the job on each slot, shape (G,); None if there is no candidate."""
        return None if self._now is None or not len(self._now.genes) else self._now.genes[0]

    @property
    def scores(self) -> FloatArray:
        """Scores of the population by mean progress."""
        return np.zeros(0) if self._now is None else self._now.scores

    @property
    def population(self) -> Genes:
        """All candidates, shape (K, G)."""
        return np.zeros((0, 0), dtype=np.int16) if self._now is None else self._now.genes

    def stats(self) -> SearchStats:
        """Return statistics of the population."""
        scores = self.scores
        return SearchStats(
            generations=self.generations,
            best_fitness=float(scores.max(initial=-np.inf)) if len(scores) else 0.0,
            mean_fitness=float(scores.mean()) if len(scores) else 0.0,
            incumbent_fitness=self.incumbent(),
            diversity=self.diversity(),
        )

    def diversity(self) -> float:
        """Return the mean share of jobs whose numbers of slots differ between two candidates."""
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

        Paper: the initial population is random. Here it may contain the schedule in force as well
        (option `incumbent`).
        """
        options, former = self._options, self._now
        many = options.population or min(max(len(problem.slots), 2), MAX_CANDIDATES)
        if former is None or not former.genes.size:
            genes = random_schedules(problem, many, rng)
        else:
            genes = carried_over(former.genes, former.problem, problem)
        if options.incumbent:
            genes = np.concatenate([problem.present[None, :], genes])
        genes = refreshed(genes, problem, fill_costs(problem, len(genes), rng))
        self._children, self._idle_generations = [], 0
        self._settle(problem, scorer_for(problem, options), genes, many, rng)

    def advance(self, rng: Generator) -> None:
        """Run one step of a generation: crossover, mutation, or reorder and selection."""
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
            struck = preempted(parents, problem, options.mutation_rate, rng)
            left = fill_costs(problem, many, rng)
            self._children.append(mutated(parents, problem, struck, left))
        else:
            before = float(now.scores[0])
            children = reordered(np.concatenate(self._children), options.reorder)
            genes = np.concatenate([now.genes, children])
            self._children = []
            wanted = options.population or min(max(len(problem.slots), 2), MAX_CANDIDATES)
            after = float(self._settle(problem, now.scorer, genes, wanted, rng).scores[0])
            better = after > before + MIN_IMPROVEMENT * max(1.0, abs(before))
            self._end_generation(better=better)

    def _settle(
        self, problem: PaperProblem, scorer: Scorer, genes: Genes, many: int, rng: Generator
    ) -> _State:
        """Keep the K best distinct candidates."""
        different = _different(genes)
        rows, scores = selected(scorer, different, many, rng)
        self._now = _State(problem, scorer, different[rows], scores[rows])
        return self._now


def carried_over(genes: Genes, before: PaperProblem, after: PaperProblem) -> Genes:
    """Return candidates of one view in the rows and columns of the next; part (1) of refresh.

    Slots of ended jobs become idle. A slot that was not in play gets its present job.
    """
    rows = {job.job: row for row, job in enumerate(after.jobs)}
    renamed = np.full(len(before.jobs) + 1, IDLE, dtype=np.int16)  # the last entry is IDLE
    for row, job in enumerate(before.jobs):
        renamed[row] = rows.get(job.job, IDLE)
    columns: dict[SlotId, int] = {slot: place for place, slot in enumerate(before.slots)}
    source = np.array([columns.get(slot, -1) for slot in after.slots], dtype=np.int64)
    found = np.tile(after.present, (len(genes), 1))
    known = source >= 0
    found[:, known] = renamed[genes[:, source[known]]]
    return found


def _different(genes: Genes) -> Genes:
    """Return the distinct candidates in the order of their first occurrence."""
    if not genes.size:
        return genes[:1]
    seen: dict[bytes, int] = {}
    for place, row in enumerate(genes):
        seen.setdefault(row.tobytes(), place)
    return genes[list(seen.values())]


def slots_by_job(problem: PaperProblem, best: Genes) -> dict[JobId, list[SlotId]]:
    """Return the slots of each job that has slots in a candidate, in the order of the columns."""
    found: dict[JobId, list[SlotId]] = {}
    for place, row in enumerate(best.tolist()):
        if row != IDLE:
            found.setdefault(problem.jobs[row].job, []).append(problem.slots[place])
    return found
