"""A candidate schedule: a level for every job, and the slots that follow from it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from controlplane.policy.ones.fitness import FloatArray, IntArray
from controlplane.policy.ones.placement import place, span_factor
from controlplane.policy.ones.problem import Problem

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One schedule, placed and scored."""

    levels: IntArray  # shape (J,)
    packed: BoolArray  # shape (J,), jobs that are moved close together
    placed: tuple[tuple[int, ...], ...]  # slots of each job
    fitness: float

    @property
    def key(self) -> bytes:
        """Two candidates with the same key are the same schedule."""
        return self.levels.tobytes() + self.packed.tobytes()


def score(problem: Problem, levels: IntArray, packed: BoolArray) -> Candidate | None:
    """Place a candidate and add up what it is worth; None if it cannot be placed.

    The worth in the table holds for the fewest nodes that a size can span; a job that spans more
    is worth less by what its steps take longer.
    """
    placed = place(problem, levels, packed)
    if placed is None:
        return None
    rows = problem.rows
    fitness = float(problem.worth[rows, levels].sum()) if len(levels) else 0.0
    for row in np.flatnonzero((levels != problem.present) | packed):
        if levels[row]:
            worth = float(problem.worth[row, levels[row]])
            fitness += worth * (span_factor(problem, int(row), placed[row], packed[row]) - 1.0)
    return Candidate(levels, packed, placed, fitness)


def used(problem: Problem, levels: IntArray) -> int:
    """Slots that a candidate needs."""
    return int(problem.sizes[problem.rows, levels].sum())


def lowest(problem: Problem) -> IntArray:
    """The lowest level that each job may have: waiting, but for those that must stay."""
    return problem.lowest


def filled(problem: Problem, levels: IntArray, noise: FloatArray | None = None) -> IntArray:
    """Grow jobs from `levels` on while slots are left, the most worth per slot first.

    Args:
        problem: the table.
        levels: shape (J,), where each job begins.
        noise: shape (J,), factors on what each is worth; for a draw by probability.

    Returns:
        Shape (J,), levels; no job is lower than it began.
    """
    levels = levels.copy()
    left = problem.capacity - used(problem, levels)
    if left <= 0 or not len(levels):
        return levels
    worth = problem.worth if noise is None else problem.worth * noise[:, None]
    sizes, rows = problem.sizes, problem.rows
    more = sizes - sizes[rows, levels][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(more > 0, (worth - worth[rows, levels][:, None]) / more, -np.inf)
    best = slope.argmax(axis=1)
    heap = [
        (-float(slope[row, best[row]]), row, int(best[row]))
        for row in map(int, np.flatnonzero(slope[rows, best] > 0))
    ]
    heapq.heapify(heap)
    while heap and left > 0:
        _, row, level = heapq.heappop(heap)
        need = int(sizes[row, level] - sizes[row, levels[row]])
        if need <= 0:
            continue
        if need <= left:
            levels[row] = level
            left -= need
        following = _next(worth[row], sizes[row], int(levels[row]), left)
        if following is not None:
            heapq.heappush(heap, (-following[0], row, following[1]))
    return levels


def _next(worth: FloatArray, sizes: IntArray, level: int, left: int) -> tuple[float, int] | None:
    """The steepest way up that still fits."""
    best: tuple[float, int] | None = None
    here, base = int(sizes[level]), float(worth[level])
    for other in range(1, len(sizes)):
        more = int(sizes[other]) - here
        if 0 < more <= left:
            slope = (float(worth[other]) - base) / more
            if slope > 0 and (best is None or slope > best[0]):
                best = (slope, other)
    return best


def repaired(problem: Problem, levels: IntArray, order: IntArray) -> IntArray:
    """`levels` within what is allowed and what there is; later jobs of `order` give way.

    Args:
        problem: the table.
        levels: shape (J,).
        order: shape (J,), a permutation: who is served first.
    """
    low, rows = problem.lowest, problem.rows
    levels = np.where(problem.allowed[rows, levels], levels, problem.present)
    levels = np.where(problem.allowed[rows, levels], levels, low)
    extra = problem.sizes[rows, levels] - problem.sizes[rows, low]
    room = problem.capacity - used(problem, low)
    running = np.cumsum(np.maximum(extra[order], 0))
    fits = np.empty(len(levels), dtype=np.bool_)
    fits[order] = running <= room
    return np.asarray(np.where(fits, levels, low), dtype=np.int64)
