"""The plans of one job for every completion time, at the prices of slots by interval."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, JobView
from controlplane.prediction import BoolArray, FloatArray, IntArray
from schemas.ids import NodeId
from schemas.jobs import Utility

LOW_SHARE: Final = 0.25  # L as a share of the least density; 1 / (2 eta) of the paper, eta = 2
HIGH_QUANTILE: Final = 0.98  # quantile of the densities for U; excludes outliers
MIN_RATIO: Final = 10.0  # least U / L; with equal bounds the price would not rise
INITIAL_BOUNDS: Final = (1e-4, 1e-1)  # L and U before the first job; value per slot second


def price(share: FloatArray, low: float, high: float) -> FloatArray:
    """Return the price on a node of which `share` is promised, from `low` to `high`.

    OASiS (Bao et al., INFOCOM '18): p_h^r(t) = L (U / L)^(g_h^r(t) / c_h^r), as value per slot
    second. The resource r is the slot: a GPU, or a CPU slot with its share of the node's cores.
    Jobs request no other resources. At price L every job with a positive value is admitted.
    """
    return np.asarray(low * np.power(high / low, share), dtype=np.float64)


class PriceBounds:
    """Price bounds L and U, given or estimated from the jobs so far (value per slot second).

    In the paper, U is the greatest value of a unit of resource, and L the least value divided by 2
    eta, over all jobs that will ever come. Here they cover the latest jobs seen, because future
    jobs are unknown, and U is a high quantile.
    """

    def __init__(self, window: int, low: float | None, high: float | None) -> None:
        self._seen: deque[float] = deque(maxlen=window)
        self._low, self._high = low, high

    def add(self, density: float) -> None:
        """Add the value per slot second of a job."""
        if np.isfinite(density) and density > 0.0:
            self._seen.append(density)

    def now(self) -> tuple[float, float]:
        """Return L and U, as value per slot second; L is below U."""
        low, high = INITIAL_BOUNDS
        if self._seen:
            seen = np.array(self._seen)
            low, high = LOW_SHARE * float(seen.min()), float(np.quantile(seen, HIGH_QUANTILE))
        low = self._low if self._low is not None else low
        high = self._high if self._high is not None else max(high, low * MIN_RATIO)
        if low >= high:  # a fixed bound is beyond the estimate of the other bound
            low = high / MIN_RATIO if self._low is None else low
        return low, max(high, low)


@dataclass(frozen=True, slots=True)
class SlotPrices:
    """The prices of every node in every interval, before the next job is planned.

    In the paper a job pays the price from before its arrival for all its slots. Here each further
    slot on a node has a higher price, computed as if half of this slot were promised already,
    because one job may need a whole node and not just a small part.
    """

    used: IntArray
    capacity: IntArray
    low: float
    high: float

    def on_one_node(self, slots: int) -> FloatArray:
        """Return the price/s of `slots` on the cheapest node, (intervals,); infinite: no room."""
        return np.asarray(self._of_each_node(self.used, slots).min(axis=1))

    def on_any(self, slots: int) -> FloatArray:
        """Return the price/s of the cheapest `slots`, (intervals,); infinite: no room."""
        costs, free = self._by_level()
        before = np.cumsum(free, axis=1) - free
        taken = np.clip(slots - before, 0, free)
        total = (taken * costs).sum(axis=1)
        return np.where(free.sum(axis=1) >= slots, total, np.inf)

    def place(self, interval: int, slots: int, *, together: bool) -> list[tuple[int, int]]:
        """Return the cheapest free slots as (node number, slots); the first node wins ties."""
        used = self.used[interval]
        if together:
            return [(int(np.argmin(self._of_each_node(used[None, :], slots)[0])), slots)]
        taken = used.copy()
        for _ in range(slots):
            share = (taken + 0.5) / np.maximum(self.capacity, 1)
            taken[np.argmin(np.where(taken < self.capacity, share, np.inf))] += 1
        return [(node, many) for node, many in enumerate((taken - used).tolist()) if many]

    def _of_each_node(self, used: IntArray, slots: int) -> FloatArray:
        """Return the value per second of `slots` slots on each node, in the shape of `used`."""
        steps = np.arange(slots) + 0.5
        share = (used[:, :, None] + steps) / np.maximum(self.capacity, 1)[None, :, None]
        cost = price(np.minimum(share, 1.0), self.low, self.high).sum(axis=2)
        return np.where(used + slots <= self.capacity, cost, np.inf)

    def _by_level(self) -> tuple[FloatArray, IntArray]:
        """Return the prices, rising, (levels,), and the free slots at each, (intervals, levels)."""
        sizes = np.unique(self.capacity[self.capacity > 0]).tolist()
        levels = [(size, step) for size in sizes for step in range(size)]
        shares = [(step + 0.5) / size for size, step in levels]
        free = [(self.used[:, self.capacity == size] <= step).sum(axis=1) for size, step in levels]
        order = np.argsort(shares, kind="stable")
        costs = price(np.array(shares)[order], self.low, self.high)
        return costs, np.stack(free, axis=1)[:, order]


Spread = tuple[tuple[NodeId, int], ...]  # slots of each node


@dataclass(frozen=True, slots=True)
class Schedule:
    """The slots reserved for one job, by interval; intervals are numbered from time 0."""

    first: int  # interval of the first entry of `spreads`
    spreads: tuple[Spread, ...]  # slots in each interval; empty: no slots

    @property
    def end(self) -> int:
        """Number of the interval after the last interval of the schedule."""
        return self.first + len(self.spreads)

    def size(self, interval: int) -> int:
        """Return the number of slots in an interval, or 0 outside the schedule."""
        place = interval - self.first
        if not 0 <= place < len(self.spreads):
            return 0
        return sum(slots for _, slots in self.spreads[place])

    def next_size(self, interval: int) -> int:
        """Return the slots of the first interval with slots, from `interval` on; 0: none."""
        later = range(max(interval, self.first), self.end)
        return next((size for at in later if (size := self.size(at))), 0)

    def cut(self, first: int, end: int) -> Schedule:
        """Return the part of the schedule from interval `first` up to, but not including, `end`."""
        begin, over = max(0, first - self.first), max(0, end - self.first)
        return replace(self, first=max(first, self.first), spreads=self.spreads[begin:over])


@dataclass(frozen=True, slots=True, eq=False)
class IntervalGrid:
    """Intervals that are planned, and the slots of each node that can be promised."""

    first: int  # current interval
    now: float  # seconds
    interval_s: float
    horizon: int
    nodes: tuple[NodeId, ...]
    capacity: IntArray  # number of slots of each node that jobs have or may get, shape (nodes,)

    @property
    def slots(self) -> int:
        """Total number of slots that can be promised."""
        return int(self.capacity.sum())

    @property
    def left_s(self) -> float:
        """Remaining seconds of the first interval."""
        return self.end_of(self.first) - self.now

    def end_of(self, interval: int) -> float:
        """Return the end of an interval, in seconds on the controller's clock."""
        return (interval + 1) * self.interval_s

    def nothing_used(self) -> IntArray:
        """Return an array of zeros for promised slots, shape (horizon, nodes)."""
        return np.zeros((self.horizon, len(self.nodes)), dtype=np.int64)

    def take(self, used: IntArray, schedule: Schedule) -> bool:
        """Add a schedule to `used` if all of it fits; otherwise add nothing and return False.

        Intervals beyond the horizon are ignored.
        """
        number = {node: place for place, node in enumerate(self.nodes)}
        added = self.nothing_used()
        inside = schedule.cut(self.first, self.first + self.horizon)
        for place, spread in enumerate(inside.spreads, start=inside.first - self.first):
            for node, slots in spread:
                if node not in number:
                    return False
                added[place, number[node]] += slots
        if (used + added > self.capacity).any():
            return False
        used += added
        return True


def grid_of(view: ClusterView, now: float, interval_s: float, horizon: int) -> IntervalGrid:
    """Return the grid of the slots that are free, being left, or held by jobs in the view.

    Other slots belong to jobs that an operator holds.
    """
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    capacity: dict[NodeId, int] = {}
    for slot in view.slots:
        counts = slot.up and (slot.usable or slot.leaving or slot.slot in held)
        capacity[slot.node] = capacity.get(slot.node, 0) + counts
    return IntervalGrid(
        first=int(now // interval_s),
        now=now,
        interval_s=interval_s,
        horizon=horizon,
        nodes=tuple(capacity),
        capacity=np.array(list(capacity.values()), dtype=np.int64),
    )


IDLE = -1  # the option of an interval in which the job has no slots


@dataclass(frozen=True, slots=True)
class CheapestSchedules:
    """Cheapest schedules of one job, by the interval in which the job is done."""

    cost: FloatArray
    _option: IntArray  # choice for each amount done, (intervals, units + 1)
    _ran: BoolArray  # True: the job ran in the interval before, same shape
    _idled_on: BoolArray  # True: an idle interval follows a run, same shape
    _done: IntArray  # units of each option if it continues, (2, options): first interval, others
    _fresh: IntArray  # the same if it starts

    def options(self, last: int) -> list[int]:
        """Return the cheapest schedule that is done in interval `last`: an option per interval."""
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
    """Return the cheapest schedules by dynamic programming over intervals and work.

    This is the dual subroutine of OASiS, section IV. COST(t, d) = min over options of
    cost_t(option) + COST(t - 1, d - done(option)), with d in units of work; partial units are
    dropped. In the paper a job may stop and continue at no cost. Here a job does less work
    (`fresh`) in an interval in which it starts, so that schedules do not alternate between running
    and idle intervals. The earliest option wins ties.

    Args:
        costs: cost of each option in each interval, shape (intervals, options); infinite: no room.
        done: units that an option does in the first interval and in the others, (2, options),
            if the job ran in the interval before.
        fresh: units as in `done`, but if the job did not run in the interval before.
        running: True if the job runs when the first interval begins.
        enough: called with each interval and the cost of ending in it. True stops the search, and
            later intervals get infinite cost.
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


UNITS_PER_INTERVAL: Final = 8  # units of work per interval at the slowest size
MAX_UNITS: Final = 200  # most units of one job's work
MAX_DENSE_SIZE: Final = 4  # each size up to this is an option, then powers of two
WORK_MARGIN: Final = 1.03  # planned over estimated work; tolerates errors of estimates
SEARCH_FACTOR: Final = 2  # search up to this multiple of the first possible end
TINY: Final = 1e-9

Rates = Callable[[Sequence[int], Sequence[int]], FloatArray]  # (slots, nodes) -> samples/s


@dataclass(frozen=True, slots=True)
class JobPlans:
    """Cheapest schedules of one job for each completion interval."""

    ends: FloatArray
    cost: FloatArray
    _grid: IntervalGrid
    _prices: SlotPrices
    _sizes: tuple[tuple[int, bool], ...]  # options: (slots, True if on one node)
    _schedules: CheapestSchedules

    def worth(self, utility: Utility, submitted_at: float) -> FloatArray:
        """Return the value of a job that completes in each interval, shape (intervals,)."""
        return np.array([utility.at(float(end) - submitted_at) for end in self.ends])

    def schedule(self, last: int) -> Schedule:
        """Return the schedule that is done in interval `last`, with its slots."""
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
    job: JobView,
    samples: float,
    rates_of: Rates,
    grid: IntervalGrid,
    prices: SlotPrices,
    *,
    start_s: float,
    by: float | None = None,
) -> JobPlans | None:
    """Return the plans of a job for every completion time; None if no size fits the cluster.

    This is one call of the dual subroutine (OASiS, section IV). Completion times that can no longer
    be the best are left out.

    Args:
        samples: remaining work.
        rates_of: speeds of the job at given numbers of slots and nodes.
        start_s: duration of a start.
        by: promised completion time, if any.
    """
    sizes = _sizes(job, grid)
    if not sizes:
        return None
    widest = int(grid.capacity.max())
    slots = [many for many, _ in sizes]
    nodes = [1 if together else max(2, math.ceil(many / widest)) for many, together in sizes]
    rates = rates_of(slots, nodes)
    samples = max(samples * WORK_MARGIN, TINY)
    unit = max(float(rates.min()) * grid.interval_s / UNITS_PER_INTERVAL, samples / MAX_UNITS)
    units = max(1, math.ceil(samples / unit - TINY))
    lasts = np.array([grid.left_s, grid.interval_s])[:, None]
    starts = np.maximum(lasts - start_s, 0.0)
    ends = np.asarray(grid.interval_s * (grid.first + 1.0 + np.arange(grid.horizon)), np.float64)
    floor = prices.low * samples * float(np.min(np.array(slots) / rates))
    schedules = cheapest_schedules(
        _costs(grid, prices, sizes),
        np.minimum(rates * lasts / unit + TINY, units).astype(np.int64),
        np.minimum(rates * starts / unit + TINY, units).astype(np.int64),
        units,
        running=bool(job.running_on),
        enough=_no_better_end(job, ends, floor, by),
    )
    return JobPlans(ends, schedules.cost, grid, prices, sizes, schedules)


def _no_better_end(
    job: JobView, ends: FloatArray, floor: float, by: float | None
) -> Callable[[int, float], bool]:
    """Return a test that is True if no later completion time can be better.

    Worth falls with time, and no schedule costs less than `floor`.
    """
    utility = job.utility or Utility(value=1.0)
    best = -math.inf  # best worth minus cost so far
    first: int | None = None  # first interval in which the job can end

    def test(interval: int, cost: float) -> bool:
        nonlocal best, first
        end = float(ends[interval])
        worth = utility.at(end - job.submitted_at)
        if math.isfinite(cost):
            best, first = max(best, worth - cost), interval if first is None else first
        if first is None:
            return False
        if by is not None and end >= by:
            return True
        looked_on = best > 0.0 or interval >= SEARCH_FACTOR * (first + 1)
        return looked_on and worth - floor <= best

    return test


def _sizes(job: JobView, grid: IntervalGrid) -> tuple[tuple[int, bool], ...]:
    """Return the sizes to choose from: on one node if they fit, and spread over nodes."""
    most = min(job.most, grid.slots, job.batch_size)
    many = {*range(1, MAX_DENSE_SIZE + 1), *(2**power for power in range(20)), job.least, most}
    fits = sorted(size for size in many if job.least <= size <= most)
    widest, nodes = grid.capacity.max(initial=0), np.count_nonzero(grid.capacity)
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
    """Return the completion interval with the greatest surplus of value over cost.

    OASiS, algorithm 1: a job is admitted if max over t of f(t - a) - cost(t) is above 0. Return
    None if no surplus is positive.
    """
    surplus = worth - plans.cost
    best = int(np.argmax(surplus))
    return best if surplus[best] > 0.0 else None


def in_time(plans: JobPlans, worth: FloatArray, by: float) -> int | None:
    """Return the best completion interval for a job with the promised completion time `by`.

    Among the intervals that keep the promise, the interval with the greatest surplus is best. If no
    interval keeps it, the earliest interval is best. Return None if the job cannot complete within
    the horizon.
    """
    possible = np.isfinite(plans.cost)
    timely = possible & (plans.ends <= by + TINY)
    if timely.any():
        return int(np.argmax(np.where(timely, worth - plans.cost, -np.inf)))
    return int(np.argmax(possible)) if possible.any() else None
