"""A candidate schedule: a level for every job, whose each slot is, and what that is worth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from controlplane.policy.ones.placement import NO_HINTS, PlacementHints, lay_out
from controlplane.policy.ones.problem import Problem
from controlplane.prediction.array_types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule, laid out and scored."""

    levels: IntArray  # shape (J,)
    owner: IntArray  # shape (S,), the row of the job on each slot; negative: of none
    value: FloatArray  # shape (J,), what each job adds to the fitness
    fitness: float
    moves: int  # jobs that change

    @property
    def key(self) -> bytes:
        """Two candidates with the same key are the same schedule."""
        return self.levels.tobytes() + self.owner.tobytes()

    def by_row(self) -> list[list[int]]:
        """Places of every job's slots."""
        order = np.argsort(self.owner, kind="stable")
        edges = np.searchsorted(self.owner[order], np.arange(len(self.levels) + 1))
        cut = order[edges[0] :].tolist()
        at = (edges - edges[0]).tolist()
        return [cut[begin:end] for begin, end in itertools.pairwise(at)]

    def slots(self, row: int) -> tuple[int, ...]:
        """Places of a job's slots."""
        return tuple(np.flatnonzero(self.owner == row).tolist())


def present(problem: Problem) -> Candidate:
    """The schedule in force.

    Args:
        problem: the view as the search sees it.
    """
    return score(problem, problem.present, problem.owner)


def score(problem: Problem, levels: IntArray, owner: IntArray) -> Candidate:
    """Add up what a schedule is worth where it is laid out.

    The worth in the table holds for the fewest nodes of the best type, without neighbours; see
    `Problem.placed_value`. Who lacks what it is due counts for less (`Problem.dues`).

    Args:
        problem: the view as the search sees it.
        owner: the row of the job on each slot, shape (S,).
    """
    value, moved = problem.placed_value(levels, owner)
    if problem.dues is not None:
        value = value - problem.dues.missing[problem.rows, levels]
    return Candidate(levels, owner, value, float(value.sum()), int(moved.sum()))


def laid_out(
    problem: Problem, parent: Candidate, levels: IntArray, hints: PlacementHints = NO_HINTS
) -> Candidate | None:
    """The schedule with these levels that differs least from `parent`; None if it cannot be.

    Where jobs end up on more nodes than they need, small ones are moved away if that is worth it.

    Args:
        problem: the view as the search sees it.
        hints: who moves at the same size, and where to.
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
