"""Operators of the evolution (ONES section 3.2.2), and the exchange of places.

A candidate is a schedule: the level of every job, the job on each slot, and the value.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.ones.greedy import filled, repaired, used
from controlplane.policy.ones.placement import NO_HINTS, PlacementHints, lay_out
from controlplane.policy.ones.problem import Problem
from controlplane.prediction import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Candidate:
    """Schedule with its layout and score."""

    levels: IntArray  # shape (J,)
    owner: IntArray  # shape (S,), the row of the job on each slot; negative: of none
    value: FloatArray  # shape (J,), contribution of each job to the fitness
    fitness: float
    moves: int  # jobs that change

    @property
    def key(self) -> bytes:
        """Equal for candidates with the same schedule."""
        return self.levels.tobytes() + self.owner.tobytes()

    def by_row(self) -> list[list[int]]:
        """Return the places of every job's slots."""
        order = np.argsort(self.owner, kind="stable")
        edges = np.searchsorted(self.owner[order], np.arange(len(self.levels) + 1))
        cut = order[edges[0] :].tolist()
        at = (edges - edges[0]).tolist()
        return [cut[begin:end] for begin, end in itertools.pairwise(at)]

    def slots(self, row: int) -> tuple[int, ...]:
        """Return the places of a job's slots."""
        return tuple(np.flatnonzero(self.owner == row).tolist())


def present(problem: Problem) -> Candidate:
    """Return the schedule in force."""
    return score(problem, problem.present, problem.owner)


def score(problem: Problem, levels: IntArray, owner: IntArray) -> Candidate:
    """Return the candidate with the sum of the jobs' values in a layout.

    The values of the table hold for the fewest nodes of the best type without neighbours; see
    `Problem.placed_value`. A job that lacks what it is due counts for less (`Problem.floors`).
    """
    value, moved = problem.placed_value(levels, owner)
    if problem.floors is not None:
        value = value - problem.floors.penalty[problem.rows, levels]
    return Candidate(levels, owner, value, float(value.sum()), int(moved.sum()))


def laid_out(
    problem: Problem, parent: Candidate, levels: IntArray, hints: PlacementHints = NO_HINTS
) -> Candidate | None:
    """Return the schedule with these levels that differs least from `parent`; None if impossible.

    If jobs end up on more nodes than they need, small jobs are moved away if that is better.
    """
    owner = lay_out(problem, parent.owner, parent.levels, levels, hints)
    if owner is None or problem.has_barred_move(owner):
        return None
    plain = score(problem, levels, owner)
    if not problem.evacuates or not problem.is_scattered(levels, owner):
        return plain
    roomy = replace(hints, evacuate=True)
    owner = lay_out(problem, parent.owner, parent.levels, levels, roomy)
    if owner is None or problem.has_barred_move(owner):
        return plain
    other = score(problem, levels, owner)
    return other if other.fitness > plain.fitness else plain


NOISE = 0.3  # sigma of the log factors of a random draw; a judgement
PAIR = 2
TRIO_SHARE = 0.25  # share of trades of three jobs; a judgement
JITTER_SIGMA = 0.2  # sigma of the random costs of nodes; a judgement


def refreshed(problem: Problem, levels: IntArray) -> IntArray:
    """Update a former candidate: new jobs get slots, idle slots are filled.

    Jobs that ended are no longer in the table. A job that never ran and waits takes its least slots
    from the job that has run longest, so that it does not starve (rule 3 of the paper). Slots that
    are still idle go to the jobs with the largest gain.
    """
    order = _longest_waiting_first(problem)
    levels = repaired(problem, levels, order)
    low = np.maximum(problem.lowest, 1)
    free = problem.capacity - used(problem, levels)
    donors = _longest_run_first(problem, levels, low)
    for row in map(int, order):
        job_row = problem.job_rows[row]
        if (
            levels[row]
            or job_row.now
            or job_row.job.epoch
            or not np.isfinite(problem.value[row, 1])
        ):
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


def _longest_waiting_first(problem: Problem) -> IntArray:
    begun = [(bool(job_row.job.epoch), job_row.job.submitted_at) for job_row in problem.job_rows]
    return np.array(sorted(range(len(begun)), key=lambda row: begun[row]), dtype=np.int64)


def _longest_run_first(problem: Problem, levels: IntArray, low: IntArray) -> list[int]:
    """Return the jobs that can give slots up; the job that has run longest comes last."""
    able = [int(row) for row in np.flatnonzero(levels > low)]
    return sorted(able, key=lambda row: problem.job_rows[row].job.ran_s)


def crossed(problem: Problem, one: IntArray, other: IntArray, rng: Generator) -> IntArray:
    """Uniform crossover: take each job's level from one of the parents.

    Paper: GPU by GPU, which tears jobs apart. Here job by job; if the slots do not suffice, random
    jobs get less, and what is left is filled.
    """
    heads = rng.random(len(one)) < 0.5  # noqa: PLR2004 - a fair coin
    levels = repaired(problem, np.where(heads, one, other), rng.permutation(len(one)))
    return filled(problem, levels)


def mutated(problem: Problem, parent: IntArray, rate: float, rng: Generator) -> IntArray:
    """Uniform mutation: some jobs lose their slots, and a random draw gives them to others.

    Args:
        rate: theta, the share of jobs that lose their slots.
    """
    lost = rng.random(len(parent)) < rate
    if not lost.any() and len(parent):
        lost[rng.integers(len(parent))] = True
    levels = repaired(problem, np.where(lost, problem.lowest, parent), rng.permutation(len(parent)))
    return filled(problem, levels, np.exp(rng.normal(0.0, NOISE, len(parent))))


def resized(problem: Problem, parent: IntArray, rng: Generator) -> IntArray:
    """Give one random job another size; random jobs make room for it."""
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
    """Reorder and migration: choose a job to move at the same size; None if no job may move.

    Jobs on more nodes than they need come first; if GPU types or neighbours matter, any job may be
    chosen.
    """
    some = problem.scattered_rows(parent.owner)
    if problem.places_matter and (not len(some) or rng.random() < 0.5):  # noqa: PLR2004 - a coin
        some = np.flatnonzero(problem.free_to_move & (parent.levels > 0))
    if not len(some):
        return None
    return PlacementHints(movers=(int(rng.choice(some)),), jitter=node_jitter(problem, rng))


def traded(problem: Problem, parent: Candidate, rng: Generator) -> PlacementHints | None:
    """Choose two or three jobs that share out their slots anew; None if impossible.

    Only where GPU types differ.
    """
    able = np.flatnonzero(problem.free_to_move & (parent.levels > 0))
    many = PAIR + int(rng.random() < TRIO_SHARE)
    if not problem.seeks_trades or len(able) < many:
        return None
    rows = rng.choice(able, size=many, replace=False)
    return PlacementHints(traders=tuple(rows.tolist()), jitter=node_jitter(problem, rng))


def node_jitter(problem: Problem, rng: Generator) -> FloatArray | None:
    """Return random costs of nodes, shape (N,), on log step times; None if places are equal."""
    if not problem.places_matter:
        return None
    return np.asarray(rng.normal(0.0, JITTER_SIGMA, len(problem.slots_on)))


LOSERS: Final = 4  # jobs tried in each round
PARTNERS: Final = 4  # partners of each
ROUNDS: Final = 4  # each round makes its best trade
MIN_GAIN: Final = 1e-9  # relative; less is rounding


def with_places_exchanged(problem: Problem, best: Candidate) -> Candidate:
    """Let pairs of jobs trade places while that improves the schedule; return the best schedule.

    Greedy filling sees sizes but no places. Where GPU types differ, the jobs that lose most by
    their places are tried with the jobs on the nodes that suit them best.
    """
    if not problem.seeks_trades:
        return best
    for _ in range(ROUNDS):
        found = max(
            (other for pair in _pairs(problem, best) if (other := _traded(problem, best, pair))),
            key=lambda other: other.fitness,
            default=best,
        )
        if found.fitness <= best.fitness * (1.0 + MIN_GAIN):
            break
        best = found
    return best


def _traded(problem: Problem, best: Candidate, pair: tuple[int, int]) -> Candidate | None:
    return laid_out(problem, best, best.levels, PlacementHints(traders=pair))


def _pairs(problem: Problem, best: Candidate) -> list[tuple[int, int]]:
    """Return the pairs to try; the first job of a pair chooses first."""
    able = problem.free_to_move & (best.levels > 0)
    lost = np.where(able, problem.worth[problem.rows, best.levels] - best.value, 0.0)
    losers = [row for row in np.argsort(-lost, kind="stable")[:LOSERS].tolist() if lost[row] > 0]
    return [(row, other) for row in losers for other in _partners(problem, best, row, able)]


def _partners(problem: Problem, best: Candidate, row: int, able: BoolArray) -> list[int]:
    """Return jobs on other nodes that suit `row` best; of equal ones those closest in size."""
    at = np.flatnonzero(best.owner >= 0)
    owners = best.owner[at]
    costs = problem.node_costs(row, best.owner)[problem.node_of[at]]
    worst = np.full(len(able), -np.inf)
    np.maximum.at(worst, owners, costs)
    mine = np.flatnonzero(best.owner == row)
    home = np.isin(problem.node_of[at], problem.node_of[mine])
    elsewhere = able.copy()
    elsewhere[owners[home]] = False
    sizes = problem.sizes[problem.rows, best.levels]
    others = np.flatnonzero(elsewhere & np.isfinite(worst))
    order = np.lexsort((others, np.abs(sizes[others] - sizes[row]), worst[others].round(3)))
    return [int(other) for other in others[order][:PARTNERS]]
