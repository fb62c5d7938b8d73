"""Pair exchange of places, without chance: who loses most by its place goes where it fits best."""

from __future__ import annotations

from typing import Final

import numpy as np

from controlplane.policy.ones.candidate import Candidate, laid_out
from controlplane.policy.ones.placement import PlacementHints
from controlplane.policy.ones.problem import Problem
from controlplane.prediction.array_types import BoolArray

LOSERS: Final = 4  # jobs that are tried in each round
PARTNERS: Final = 4  # of each of them
ROUNDS: Final = 4  # each of which makes the best trade that it has found
LEAST_GAIN: Final = 1e-9  # relative: less is rounding


def with_places_exchanged(problem: Problem, best: Candidate) -> Candidate:
    """Let jobs trade places by pairs while that makes the schedule worth more.

    Beside greedy filling, which sees sizes and no places: where GPU types differ, the jobs that
    lose most by their places are tried with those whose nodes would suit them best.

    Args:
        problem: the view as the search sees it.

    Returns:
        One that is worth more, or `best`.
    """
    if not problem.seeks_trades:
        return best
    for _ in range(ROUNDS):
        found = max(
            (other for pair in _pairs(problem, best) if (other := _traded(problem, best, pair))),
            key=lambda other: other.fitness,
            default=best,
        )
        if found.fitness <= best.fitness * (1.0 + LEAST_GAIN):
            break
        best = found
    return best


def _traded(problem: Problem, best: Candidate, pair: tuple[int, int]) -> Candidate | None:
    return laid_out(problem, best, best.levels, PlacementHints(traders=pair))


def _pairs(problem: Problem, best: Candidate) -> list[tuple[int, int]]:
    """Who is tried with whom; the first one of a pair chooses first."""
    able = problem.free_to_move & (best.levels > 0)
    lost = np.where(able, problem.worth[problem.rows, best.levels] - best.value, 0.0)
    losers = [row for row in np.argsort(-lost, kind="stable")[:LOSERS].tolist() if lost[row] > 0]
    return [(row, other) for row in losers for other in _partners(problem, best, row, able)]


def _partners(problem: Problem, best: Candidate, row: int, able: BoolArray) -> list[int]:
    """Those elsewhere on nodes that would suit `row` best; among equals, of its size."""
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
