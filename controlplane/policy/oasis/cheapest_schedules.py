"""The dual subproblem: for every completion time, the cheapest schedule of one job's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controlplane.prediction.array_types import BoolArray, FloatArray, IntArray

IDLE = -1  # the option of an interval in which the job has no slots


@dataclass(frozen=True, slots=True)
class CheapestSchedules:
    """Of one job, by the interval in which it is done.

    Args:
        cost: of the cheapest schedule whose last interval is this, shape (intervals,); infinite
            where none ends there.
    """

    cost: FloatArray
    _option: IntArray  # chosen in each interval for each amount done, (intervals, units + 1)
    _ran: BoolArray  # whether it ran in the interval before that choice, the same shape
    _idled_on: BoolArray  # whether an idle interval follows one in which it ran, the same shape
    _done: IntArray  # units of each option where it goes on, (2, options): first interval, others
    _fresh: IntArray  # the same where it starts

    def options(self, last: int) -> list[int]:
        """What the cheapest schedule that is done in interval `last` does in each interval.

        Returns:
            An option for each interval up to `last`, `IDLE` where it has no slots.
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
    work; less than a whole unit is not counted. Paper: a job may stop and go on at no cost. Here:
    an interval in which it starts does less work (`fresh`), so that it is not planned to run every
    other interval.

    Args:
        costs: of each option in each interval, shape (intervals, options); infinite: no room.
        done: units that an option does in the first interval and in the others, (2, options),
            where the job ran in the interval before.
        units: of work to be done, 1 or more.
        running: whether it runs as the first interval begins.
        enough: told each interval and the cost of being done in it; whether later ones cannot
            matter. They are left out: their cost is infinite.

    Returns:
        The cost for each completion interval; among equals the earliest option.
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
