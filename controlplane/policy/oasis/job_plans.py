"""Plans of one job for every completion time, and the one with the greatest worth beyond its cost.

`cheapest_schedules` is the dual subproblem: the cheapest schedule of the job's work for every
completion time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import JobView
from controlplane.policy.oasis.prices import IntervalGrid, Schedule, SlotPrices, Spread
from controlplane.prediction import BoolArray, FloatArray, IntArray
from schemas.jobs import Utility

IDLE = -1  # the option of an interval in which the job has no slots


@dataclass(frozen=True, slots=True)
class CheapestSchedules:
    """Cheapest schedules of one job, by the interval in which the job is done."""

    cost: FloatArray
    _option: IntArray  # choice for each amount done, (intervals, units + 1)
    _ran: BoolArray  # True: ran in the interval before that choice, same shape
    _idled_on: BoolArray  # True: an idle interval follows a run, same shape
    _done: IntArray  # units of each option if it continues, (2, options): first interval, others
    _fresh: IntArray  # the same if it starts

    def options(self, last: int) -> list[int]:
        """Return the options of the cheapest schedule that is done in interval `last`.

        One option for each interval up to `last`; `IDLE` where the job has no slots.
        """
        units, runs = self._option.shape[1] - 1, True
        found: list[int] = []
        for interval in range(last, -1, -1):
            row = min(interval, 1)
            if not runs:
                found.append(IDLE)
                runs = bool(self._idled_on[interval, units])
                continue
            option = int(self._option[interval, units])
            found.append(option)
            runs = bool(self._ran[interval, units])
            units = max(0, units - int((self._done if runs else self._fresh)[row, option]))
        return found[::-1]


def cheapest_schedules(
    costs: FloatArray,
    done: IntArray,
    fresh: IntArray,
    units: int,
    *,
    running: bool,
    enough: Callable[[int, float], bool] = lambda _interval, _cost: False,
) -> CheapestSchedules:
    """Dynamic programming over intervals and work (OASiS, section IV: its dual subroutine).

    COST(t, d) = min over options of cost_t(option) + COST(t - 1, d - done(option)), d in units of
    work; less than a whole unit is not counted. Paper: a job may stop and continue at no cost.
    Here: an interval in which it starts does less work (`fresh`), so that schedules do not
    alternate between running and idle intervals. Ties go to the earliest option.

    Args:
        costs: of each option in each interval, shape (intervals, options); infinite: no room.
        done: units that an option does in the first interval and in the others, (2, options),
            if the job ran in the interval before.
        fresh: the same if the job starts.
        running: True if the job runs when the first interval begins.
        enough: called with each interval and the cost of ending in it; True stops the search: later
            intervals get infinite cost.
    """
    intervals = len(costs)
    amounts = np.arange(units + 1)
    sources = [
        (np.maximum(amounts - done[row][:, None], 0), np.maximum(amounts - fresh[row][:, None], 0))
        for row in (0, 1)
    ]
    nothing = np.where(amounts == 0, 0.0, np.inf)
    ran, idle = (nothing, np.full(units + 1, np.inf))[:: 1 if running else -1]
    option = np.zeros((intervals, units + 1), dtype=np.int64)
    went_on = np.zeros((intervals, units + 1), dtype=bool)
    idled_on = np.zeros((intervals, units + 1), dtype=bool)
    cost = np.full(intervals, np.inf)
    for interval in range(intervals):
        on, off = sources[min(interval, 1)]
        goes_on, starts = ran[on], idle[off]
        cheapest = np.minimum(goes_on, starts) + costs[interval][:, None]
        best = cheapest.argmin(axis=0)
        option[interval] = best
        went_on[interval] = (goes_on <= starts)[best, amounts]
        idled_on[interval] = ran <= idle
        ran, idle = cheapest[best, amounts], np.minimum(ran, idle)
        cost[interval] = ran[units]
        if enough(interval, float(cost[interval])):
            break
    return CheapestSchedules(cost, option, went_on, idled_on, done, fresh)


UNITS_PER_INTERVAL: Final = 8  # units of work, on the slowest size
MAX_UNITS: Final = 200  # maximum units of one job's work
MAX_DENSE_SIZE: Final = 4  # each size up to this is an option, then powers of two
WORK_MARGIN: Final = 1.03  # planned over estimated work: tolerance for errors of estimates
SEARCH_FACTOR: Final = 2  # search up to this multiple of the first possible end
TINY: Final = 1e-9

Rates = Callable[[Sequence[int], Sequence[int]], FloatArray]  # (slots, nodes) -> samples/s


@dataclass(frozen=True, slots=True)
class Work:
    """Remaining work of a job, and its speeds."""

    samples: float
    rates: Rates
    running: bool
    start_s: float  # duration of a start


@dataclass(frozen=True, slots=True)
class JobPlans:
    """The cheapest schedule of one job for each completion interval."""

    ends: FloatArray
    cost: FloatArray
    _grid: IntervalGrid
    _prices: SlotPrices
    _sizes: tuple[tuple[int, bool], ...]  # options: (slots, True if on one node)
    _schedules: CheapestSchedules

    def worth(self, utility: Utility, submitted_at: float) -> FloatArray:
        """Return the worth of an end in each interval, shape (intervals,)."""
        return np.array([utility.at(float(end) - submitted_at) for end in self.ends])

    def schedule(self, last: int) -> Schedule:
        """Return the slots of the schedule that is done in this interval."""
        spreads: list[Spread] = []
        for interval, option in enumerate(self._schedules.options(last)):
            if option == IDLE:
                spreads.append(())
                continue
            slots, together = self._sizes[option]
            places = self._prices.place(interval, slots, together=together)
            spreads.append(tuple((self._grid.nodes[node], many) for node, many in places))
        return Schedule(self._grid.first, tuple(spreads))


def plans_of(
    job: JobView, work: Work, grid: IntervalGrid, prices: SlotPrices, *, by: float | None = None
) -> JobPlans | None:
    """Plan a job for every completion time (OASiS, section IV: one call of the dual subroutine).

    Completion times that cannot be the best any more are left out. `by` is the promised end, if
    any. Returns None if no size of the job fits the cluster.
    """
    sizes = _sizes(job, grid)
    if not sizes:
        return None
    widest = max(grid.capacity)
    slots = [many for many, _ in sizes]
    nodes = [1 if together else max(2, math.ceil(many / widest)) for many, together in sizes]
    rates = work.rates(slots, nodes)
    samples = max(work.samples * WORK_MARGIN, TINY)
    unit = max(float(rates.min()) * grid.interval_s / UNITS_PER_INTERVAL, samples / MAX_UNITS)
    units = max(1, math.ceil(samples / unit - TINY))
    lasts = np.array([grid.left_s, grid.interval_s])[:, None]
    starts = np.maximum(lasts - work.start_s, 0.0)
    ends = np.asarray(grid.interval_s * (grid.first + 1.0 + np.arange(grid.horizon)), np.float64)
    floor = prices.low * samples * float(np.min(np.array(slots) / rates))
    schedules = cheapest_schedules(
        _costs(grid, prices, sizes),
        np.minimum(rates * lasts / unit + TINY, units).astype(np.int64),
        np.minimum(rates * starts / unit + TINY, units).astype(np.int64),
        units,
        running=work.running,
        enough=_NoBetterEnd(job, ends, floor, by),
    )
    return JobPlans(ends, schedules.cost, grid, prices, sizes, schedules)


class _NoBetterEnd:
    """True when later completion times cannot be better: worth falls, costs have a lower bound."""

    def __init__(self, job: JobView, ends: FloatArray, floor: float, by: float | None) -> None:
        self._utility, self._since = job.utility or Utility(value=1.0), job.submitted_at
        self._ends, self._floor, self._by = ends, floor, by
        self._best = -math.inf  # worth less cost
        self._first: int | None = None  # first interval in which the job can end

    def __call__(self, interval: int, cost: float) -> bool:
        end = float(self._ends[interval])
        worth = self._utility.at(end - self._since)
        if math.isfinite(cost):
            self._best = max(self._best, worth - cost)
            self._first = interval if self._first is None else self._first
        if self._first is None:
            return False
        if self._by is not None and end >= self._by:
            return True
        looked_on = self._best > 0.0 or interval >= SEARCH_FACTOR * (self._first + 1)
        return looked_on and worth - self._floor <= self._best


def _sizes(job: JobView, grid: IntervalGrid) -> tuple[tuple[int, bool], ...]:
    """Return the sizes to choose from: on one node if they fit, and spread over nodes."""
    most = min(job.most, grid.slots, job.batch_size)
    many = {*range(1, MAX_DENSE_SIZE + 1), *(2**power for power in range(20)), job.least, most}
    fits = sorted(size for size in many if job.least <= size <= most)
    widest, nodes = max(grid.capacity, default=0), sum(each > 0 for each in grid.capacity)
    near = [(size, True) for size in fits if size <= widest]
    return (*near, *((size, False) for size in fits if size > 1 and nodes > 1))


def _costs(grid: IntervalGrid, prices: SlotPrices, sizes: Sequence[tuple[int, bool]]) -> FloatArray:
    """Return the costs of each option in each interval, shape (intervals, options)."""
    costs: FloatArray = np.stack(
        [
            prices.on_one_node(slots) if together else prices.on_any(slots)
            for slots, together in sizes
        ],
        axis=1,
    )
    costs *= grid.interval_s
    costs[0] *= grid.left_s / grid.interval_s
    return costs


def most_worth(plans: JobPlans, worth: FloatArray) -> int | None:
    """Return the completion interval with the greatest surplus of worth over cost, if positive.

    OASiS, algorithm 1: a job is admitted if max over t of f(t - a) - cost(t) is above 0.
    """
    surplus = worth - plans.cost
    best = int(np.argmax(surplus))
    return best if surplus[best] > 0.0 else None


def in_time(plans: JobPlans, worth: FloatArray, by: float) -> int | None:
    """Return the best completion interval for a job with a promised end.

    The one with the greatest surplus among those in time; if there is none, the earliest. None if
    the job cannot end within the horizon.
    """
    possible = np.isfinite(plans.cost)
    timely = possible & (plans.ends <= by + TINY)
    if timely.any():
        return int(np.argmax(np.where(timely, worth - plans.cost, -np.inf)))
    return int(np.argmax(possible)) if possible.any() else None
