"""Evolution: new candidates from old ones (ONES section 3.2.2)."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from controlplane.policy.ones.candidate import Candidate
from controlplane.policy.ones.greedy import filled, repaired, used
from controlplane.policy.ones.placement import PlacementHints
from controlplane.policy.ones.problem import Problem
from controlplane.prediction.array_types import FloatArray, IntArray

NOISE = 0.3  # sigma of the log factors that a draw by probability uses; a judgement
PAIR = 2
TRIOS = 0.25  # share of trades among three; a judgement
NODE_JITTER = 0.2  # sigma of what nodes are liked less by, when a place is drawn; a judgement


def refreshed(problem: Problem, levels: IntArray) -> IntArray:
    """Bring a former candidate to the present: new jobs get slots, idle ones are filled.

    Jobs that ended are no longer in the table. A job that never ran and waits takes its least
    slots from the one that has run longest, so that it does not starve (the paper's rule 3);
    what is still idle goes to whom it is worth most.

    Args:
        problem: the view as the search sees it.

    Returns:
        Shape (J,), within what there is.
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
    """Jobs that can give something up; the one that has run longest comes last."""
    able = [int(row) for row in np.flatnonzero(levels > low)]
    return sorted(able, key=lambda row: problem.job_rows[row].job.ran_s)


def crossed(problem: Problem, one: IntArray, other: IntArray, rng: Generator) -> IntArray:
    """Uniform crossover: each job's level from one parent or the other.

    Paper: GPU by GPU, which tears jobs apart. Here job by job; who gets too little room gives way
    by chance, and what is left is filled.

    Args:
        problem: the view as the search sees it.
        one: levels of a parent, shape (J,).
        other: levels of another one, shape (J,).

    Returns:
        Shape (J,), within what there is.
    """
    heads = rng.random(len(one)) < 0.5  # noqa: PLR2004 - a fair coin
    levels = repaired(problem, np.where(heads, one, other), rng.permutation(len(one)))
    return filled(problem, levels)


def mutated(problem: Problem, parent: IntArray, rate: float, rng: Generator) -> IntArray:
    """Uniform mutation: some jobs lose their slots, which others get by a draw.

    Args:
        problem: the view as the search sees it.
        parent: levels, shape (J,).
        rate: theta, the share of jobs that lose their slots.

    Returns:
        Shape (J,), within what there is.
    """
    lost = rng.random(len(parent)) < rate
    if not lost.any() and len(parent):
        lost[rng.integers(len(parent))] = True
    levels = repaired(problem, np.where(lost, problem.lowest, parent), rng.permutation(len(parent)))
    return filled(problem, levels, np.exp(rng.normal(0.0, NOISE, len(parent))))


def resized(problem: Problem, parent: IntArray, rng: Generator) -> IntArray:
    """One job takes another size, and others make room for it by chance.

    Args:
        problem: the view as the search sees it.
        parent: levels, shape (J,).

    Returns:
        Shape (J,), within what there is.
    """
    levels = parent.copy()
    row = int(rng.integers(len(parent)))
    allowed = np.flatnonzero(np.isfinite(problem.value[row]))
    levels[row] = int(rng.choice(allowed))
    order = rng.permutation(len(parent))
    order = np.concatenate([[row], order[order != row]])
    levels = repaired(problem, levels, order)
    if problem.places_matter and rng.random() < 0.5:  # noqa: PLR2004 - a coin
        return levels  # a slot of a slow GPU, or beside a bad neighbour, may be better left idle
    return filled(problem, levels)


def moved(problem: Problem, parent: Candidate, rng: Generator) -> PlacementHints | None:
    """Reorder and migration: a job goes elsewhere at the same size; None if nobody may.

    One that is on more nodes than it needs first; where GPU types or neighbours matter, any.

    Args:
        problem: the view as the search sees it.
        parent: the schedule in which it moves.
    """
    some = problem.scattered_rows(parent.owner)
    if problem.places_matter and (not len(some) or rng.random() < 0.5):  # noqa: PLR2004 - a coin
        some = np.flatnonzero(problem.free_to_move & (parent.levels > 0))
    if not len(some):
        return None
    return PlacementHints(movers=(int(rng.choice(some)),), jitter=node_jitter(problem, rng))


def traded(problem: Problem, parent: Candidate, rng: Generator) -> PlacementHints | None:
    """Some jobs share out the slots that they have together anew; None if nobody may.

    Two of them, or three; only where GPU types differ.

    Args:
        problem: the view as the search sees it.
        parent: the schedule in which they trade.
    """
    able = np.flatnonzero(problem.free_to_move & (parent.levels > 0))
    many = PAIR + int(rng.random() < TRIOS)
    if not problem.seeks_trades or len(able) < many:
        return None
    rows = rng.choice(able, size=many, replace=False)
    return PlacementHints(traders=tuple(rows.tolist()), jitter=node_jitter(problem, rng))


def node_jitter(problem: Problem, rng: Generator) -> FloatArray | None:
    """By how much nodes are liked less, at random; None where one is as good as another.

    Args:
        problem: the view as the search sees it.

    Returns:
        Shape (N,), added to the logarithms of step times.
    """
    if not problem.places_matter:
        return None
    return np.asarray(rng.normal(0.0, NODE_JITTER, len(problem.slots_on)))
