"""Deterministic choice of sizes: greedy filling, pair exchange, repair, and baseline policies."""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from controlplane.policy.ones.problem import Problem
from controlplane.prediction import FloatArray, IntArray

MIN_GAIN: Final = 1e-12  # gain of a trade; a smaller one is a rounding error


def used(problem: Problem, levels: IntArray) -> int:
    """Return the number of slots that these levels need."""
    return int(problem.sizes[problem.rows, levels].sum())


def filled(
    problem: Problem, levels: IntArray, noise: FloatArray | None = None, capacity: int | None = None
) -> IntArray:
    """Return `levels` after giving the remaining slots to the jobs with the most value per slot.

    `noise`, shape (J,), multiplies the values of each job. The default `capacity` is all slots.
    """
    levels = levels.copy()
    left = (problem.capacity if capacity is None else capacity) - used(problem, levels)
    if left <= 0 or not len(levels):
        return levels
    value = problem.worth if noise is None else problem.worth * noise[:, None]
    sizes, rows = problem.sizes, problem.rows
    more = sizes - sizes[rows, levels][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(more > 0, (value - value[rows, levels][:, None]) / more, -np.inf)
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
        following = _next(value[row], sizes[row], int(levels[row]), left)
        if following is not None:
            heapq.heappush(heap, (-following[0], row, following[1]))
    return levels


def _next(value: FloatArray, sizes: IntArray, level: int, left: int) -> tuple[float, int] | None:
    """Return the steepest growth by at most `left` slots, as (value per slot, level), or None."""
    here, base = int(sizes[level]), float(value[level])
    ways = [
        (slope, other)
        for other in range(1, len(sizes))
        if 0 < (more := int(sizes[other]) - here) <= left
        if (slope := (float(value[other]) - base) / more) > 0
    ]
    return max(ways, key=lambda way: way[0], default=None)


def repaired(problem: Problem, levels: IntArray, order: IntArray) -> IntArray:
    """Return `levels`, changed so that all are allowed and together fit the capacity.

    Jobs that come later in `order`, a permutation of shape (J,), fall to their lowest level first.
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


def core_limited(problem: Problem) -> IntArray:
    """Return the least allowed level of each job, raised by greedy filling while cores are left."""
    least = np.maximum(problem.lowest, np.where(problem.allowed[:, 1], 1, problem.lowest))
    order = np.argsort([row.job.submitted_at for row in problem.job_rows], kind="stable")
    return filled(problem, repaired(problem, least, order), capacity=problem.cores)


def baselines(problem: Problem) -> list[IntArray]:
    """Return the levels of FIFO, SRTF and least attained service, with wanted sizes."""
    wanted = problem.lowest.copy()
    for row, job_row in enumerate(problem.job_rows):
        sizes = job_row.table.sizes
        level = max(1, int(np.searchsorted(sizes, job_row.job.wanted, side="right")))
        if problem.allowed[row, level]:
            wanted[row] = max(level, int(wanted[row]))
    jobs = [job_row.job for job_row in problem.job_rows]
    lengths = np.array([job_row.remaining_s for job_row in problem.job_rows], dtype=np.float64)
    orders = (
        np.argsort([job.submitted_at for job in jobs], kind="stable"),  # FIFO
        np.argsort(np.nan_to_num(lengths, nan=0.0), kind="stable"),  # SRTF
        np.argsort([job.slot_s for job in jobs], kind="stable"),  # least attained service, Tiresias
    )
    return [filled(problem, repaired(problem, wanted, order)) for order in orders]


def exchanged(problem: Problem, levels: IntArray) -> IntArray:
    """Pair local search: move slots from job to job while that increases the total value."""
    if len(levels) < 2:  # noqa: PLR2004 - a pair
        return levels
    trades = _Trades(problem, levels.copy())
    for _ in range(4 * len(levels)):
        if not trades.improve():
            break
    return filled(problem, trades.levels)


class _Trades:
    """The best gains from up to k more slots, and the least losses from k or more fewer slots."""

    def __init__(self, problem: Problem, levels: IntArray) -> None:
        self._problem = problem
        self.levels = levels
        widest = problem.widest
        self._steps = np.array(sorted({1, 2, 3, 4, widest, 2 * widest}), dtype=np.int64)
        self._up, self._to = self._ways(problem.rows, up=True)
        self._down, self._from = self._ways(problem.rows, up=False)

    def _ways(self, rows: IntArray, *, up: bool) -> tuple[FloatArray, IntArray]:
        """Return the best change of value for each step k and row, and the level that makes it."""
        sizes, value = self._problem.sizes[rows], self._problem.worth[rows]
        here, at = np.arange(len(rows)), self.levels[rows]
        more = sizes - sizes[here, at][:, None]
        gain = value - value[here, at][:, None]
        steps = self._steps[:, None, None]
        fits = (more > 0) & (more <= steps) if up else more <= -steps
        ways = np.where(fits, gain, -np.inf)
        to = ways.argmax(axis=2)
        return np.take_along_axis(ways, to[:, :, None], axis=2)[:, :, 0], to

    def improve(self) -> bool:
        """Apply the best trade; return False if no trade increases the value."""
        best, chosen = MIN_GAIN, None
        for step in range(len(self._steps)):
            up, down = self._up[step], self._down[step]
            taker, giver = int(up.argmax()), int(down.argmax())
            pairs = [(taker, giver)]
            if taker == giver:
                pairs = [(taker, _second(down, giver)), (_second(up, taker), giver)]
            for one, other in pairs:
                net = float(up[one] + down[other])
                if net > best:
                    best, chosen = net, (step, one, other)
        if chosen is None:
            return False
        step, one, other = chosen
        self.levels[one] = self._to[step, one]
        self.levels[other] = self._from[step, other]
        rows = np.array([one, other])
        self._up[:, rows], self._to[:, rows] = self._ways(rows, up=True)
        self._down[:, rows], self._from[:, rows] = self._ways(rows, up=False)
        return True


def _second(values: FloatArray, first: int) -> int:
    """Return the index of the greatest value other than the one at `first`."""
    rest = values.copy()
    rest[first] = -np.inf
    return int(rest.argmax())
