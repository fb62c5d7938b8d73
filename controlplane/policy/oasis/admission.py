"""Admission of jobs with schedules and promises, and the revision of promises that slip."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from msgspec.structs import replace

from controlplane.policy.api import ClusterView, JobView, Reason
from controlplane.policy.oasis.job_estimates import OasisEstimates
from controlplane.policy.oasis.job_plans import (
    IntervalGrid,
    JobPlans,
    PriceBounds,
    Schedule,
    SlotPrices,
    grid_of,
    in_time,
    most_worth,
    plans_of,
)
from controlplane.policy.options import OasisOptions
from controlplane.prediction import IntArray
from schemas.ids import JobId
from schemas.jobs import MAX_UTILITY, Utility

WORTHLESS_SHARE: Final = 0.05  # if less than this share is left, the value is regarded as gone


def rejection(job: JobView, utility: Utility, plans: JobPlans, now: float) -> Reason:
    """Return the reason of a rejection, for the user; all `plans` cost more than their worth."""
    possible = np.isfinite(plans.cost)
    if not possible.any():
        horizon_s = float(plans.ends[-1]) - now
        words = f"no slots are left for it in the {_span(horizon_s)} that are planned ahead"
        return Reason("rejected", words, {"horizon_s": horizon_s})
    gone_at = job.submitted_at + gone_after_s(utility)
    last = in_time(plans, plans.worth(utility, job.submitted_at), gone_at)
    end, cost = float(plans.ends[last or 0]), float(plans.cost[last or 0])
    numbers = {"end": end, "cost": cost, "worth": utility.at(end - job.submitted_at)}
    if gone_at <= end:
        words = f"it would be done at {_clock(end, now)}, its value is gone by "
        words += _clock(gone_at, now)
        numbers["value_gone"] = gone_at
    else:
        words = f"it would be done at {_clock(end, now)}, which is worth {numbers['worth']:.3g}, "
        words += f"less than the price of its slots, {cost:.3g}"
    window_s = accepted_deadline_s(utility, plans, now)
    if window_s is not None:
        numbers["accepted_deadline_s"] = window_s
        words += f"; a window that would be accepted: deadline_s >= {window_s:.0f}"
    elif (value := accepted_value(utility, plans, now)) <= MAX_UTILITY:
        numbers["accepted_value"] = value
        words += f"; a value that would be accepted: value >= {value:.3g}"
    return Reason("rejected", words, numbers)


def gone_after_s(utility: Utility) -> float:
    """Return the seconds after submission when almost no value is left; may be infinite."""
    if utility.decay == 0.0 or not math.isfinite(utility.deadline_s):
        return math.inf
    return max(0.0, utility.deadline_s + math.log(1.0 / WORTHLESS_SHARE - 1.0) / utility.decay)


def accepted_deadline_s(utility: Utility, plans: JobPlans, now: float) -> float | None:
    """Return the least deadline with which the job would be admitted if it were submitted now.

    For each completion time t, value / (1 + exp(decay (t - deadline))) > cost is solved for the
    deadline. The result is in whole seconds. Return None if no deadline suffices.
    """
    pays = (plans.cost < utility.value) & np.isfinite(plans.cost)
    if not pays.any() or utility.decay == 0.0:
        return None
    cost = np.maximum(plans.cost[pays], 1e-12)
    needed = plans.ends[pays] - now - np.log((utility.value - cost) / cost) / utility.decay
    return float(max(1.0, math.floor(float(needed.min())) + 1.0))


def accepted_value(utility: Utility, plans: JobPlans, now: float) -> float:
    """Return the least value with which the job would be admitted if it were submitted now."""
    shares = plans.worth(replace(utility, value=1.0), now)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        needed = np.where(np.isfinite(plans.cost), plans.cost / shares, np.inf)
    return float(np.nanmin(needed)) * 1.001


def _clock(at: float, now: float) -> str:
    """Return a time of day in UTC as text, with the date if it is not today."""
    if not math.isfinite(at) or abs(at) > 1e11:  # noqa: PLR2004 - beyond the calendar
        return "never"
    moment, today = (dt.datetime.fromtimestamp(each, dt.UTC) for each in (at, now))
    days = "" if moment.date() == today.date() else f"{moment:%Y-%m-%d} "
    return f"{days}{moment:%H:%M:%S} UTC"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"  # noqa: PLR2004


DEFAULT_UTILITY: Final = Utility(value=1.0)  # utility of a job that states none
UNKNOWN_LENGTH: Final = "its length is unknown"
TOO_EXPENSIVE: Final = "its end is worth less than its slots would cost"
NO_ROOM: Final = "it does not fit into the planned intervals"
RETRY_INTERVALS: Final = 10  # intervals until a failed plan is tried again


@dataclass(slots=True)
class Decisions:
    """Decisions about jobs, which `Oasis.plan` turns into a plan."""

    schedules: dict[JobId, Schedule] = field(default_factory=dict)
    promised: dict[JobId, float] = field(default_factory=dict)  # promised completion times
    expected: dict[JobId, float] = field(default_factory=dict)  # completion times as scheduled now
    rejected: dict[JobId, Reason] = field(default_factory=dict)
    measured: dict[JobId, str] = field(default_factory=dict)  # measured first: job -> family
    unplanned: dict[JobId, str] = field(default_factory=dict)  # job -> why it has no schedule
    numbers: dict[JobId, dict[str, float]] = field(default_factory=dict)  # facts of an admission
    worth: float = 0.0  # total value of the jobs at their expected completion times
    more: bool = False  # True: some jobs are still undecided


class Admissions:
    """The schedules of admitted jobs; new decisions follow from old ones and a view.

    A policy that restarts has no schedules. It makes new ones from the promises in the view.
    """

    def __init__(self, options: OasisOptions, estimates: OasisEstimates) -> None:
        self._options = options
        self._estimates = estimates
        self._bounds = PriceBounds(options.window, options.l, options.u)
        self._counted: set[JobId] = set()  # jobs that U and L include
        self._tried: dict[JobId, int] = {}  # interval of the last failed plan
        self._last = Decisions()

    def forget(self, job: JobId) -> None:
        """Forget a job that ended."""
        self._counted.discard(job)
        self._tried.pop(job, None)

    def decide(self, view: ClusterView, now: float, *, at_most: int) -> Decisions:
        """Check schedules, then make up to `at_most` decisions about new jobs, by arrival."""
        self._estimates.follow(view)
        grid = grid_of(view, now, self._options.interval_s, self._options.horizon)
        decided = Decisions()
        decided.rejected = {n: why for n, why in self._last.rejected.items() if n in view.jobs}
        used = self._keep(view, grid, decided)
        left = at_most
        for job in self._open_jobs(view, decided):
            if left <= 0:
                decided.more = True
                break
            left -= self._decide_one(job, grid, used, decided)
        decided.worth = sum(
            (view.jobs[name].utility or DEFAULT_UTILITY).at(end - view.jobs[name].submitted_at)
            for name, end in decided.expected.items()
        )
        self._last = decided
        return decided

    # --- earlier promises

    def _keep(self, view: ClusterView, grid: IntervalGrid, decided: Decisions) -> IntArray:
        """Keep schedules that still suffice, and plan other jobs again, earliest promises first.

        Return the promised slots, shape (horizon, nodes).
        """
        last, used, again = self._last, grid.nothing_used(), list[JobView]()
        for name, job in view.jobs.items():
            if job.promised_at is not None:
                decided.promised[name] = job.promised_at
            elif name in last.promised:
                decided.promised[name] = last.promised[name]
            if name in last.numbers:
                decided.numbers[name] = last.numbers[name]
        in_order = sorted(decided.promised, key=lambda name: (decided.promised[name], name))
        for name in in_order:
            job, schedule = view.jobs[name], last.schedules.get(name)
            held = None if schedule is None else self._still_holds(job, schedule, grid)
            if held is None or not grid.take(used, held):
                again.append(job)
            else:
                decided.schedules[name], decided.expected[name] = held, grid.end_of(held.end - 1)
        for job in again:
            self._plan_again(job, grid, used, decided)
        return used

    def _still_holds(self, job: JobView, schedule: Schedule, grid: IntervalGrid) -> Schedule | None:
        """Return the rest of a schedule up to the job's completion, or None without one."""
        left, rest = self._work(job, grid), schedule.cut(grid.first, schedule.end)
        if left is None:
            return None
        runs = bool(job.running_on)
        rates: dict[tuple[int, int], float] = {}
        for interval, spread in enumerate(rest.spreads, start=rest.first):
            slots = sum(many for _, many in spread)
            if slots:
                lasts = grid.left_s if interval == grid.first else grid.interval_s
                trains_s = lasts if runs else max(0.0, lasts - self._options.start_stall_s)
                size = (slots, len(spread))
                if size not in rates:
                    rate = self._estimates.samples_per_s(job, (slots,), (len(spread),))
                    rates[size] = float(rate[0])
                left -= rates[size] * trains_s
            runs = bool(slots)
            if left <= 0.0:
                return rest.cut(grid.first, interval + 1)
        return None

    def _plan_again(
        self, job: JobView, grid: IntervalGrid, used: IntArray, decided: Decisions
    ) -> None:
        """Plan a job so that it keeps its promise if possible, else as early as possible."""
        promised = decided.promised[job.job]
        tried = self._was_tried(job, grid)
        plans = None if tried else self._plans(job, grid, used, by=promised)
        if plans is None:
            why = NO_ROOM if tried else UNKNOWN_LENGTH
            decided.unplanned[job.job] = why
            decided.expected[job.job] = self._last.expected.get(job.job, promised)
            return
        worth = plans.worth(job.utility or DEFAULT_UTILITY, job.submitted_at)
        last = in_time(plans, worth, promised)
        if last is None:
            decided.unplanned[job.job], self._tried[job.job] = NO_ROOM, grid.first
            decided.expected[job.job] = max(promised, float(plans.ends[-1]))
            return
        schedule = decided.schedules[job.job] = plans.schedule(last)
        decided.expected[job.job] = float(plans.ends[last])
        grid.take(used, schedule)

    # --- new jobs

    def _open_jobs(self, view: ClusterView, decided: Decisions) -> Iterable[JobView]:
        """Return the jobs with a utility that are neither promised nor rejected, by arrival."""
        found = [
            job
            for name, job in view.jobs.items()
            if job.utility is not None and name not in decided.promised
            if name not in decided.rejected
        ]
        return sorted(found, key=lambda job: (job.submitted_at, job.job))

    def _decide_one(
        self, job: JobView, grid: IntervalGrid, used: IntArray, decided: Decisions
    ) -> bool:
        """Admit the job, reject it, or have it measured first; return True if it was planned."""
        if grid.slots < job.least or job.utility is None:
            return False
        remaining = self._estimates.remaining(job, grid.now)
        if remaining is None or not self._estimates.knows_speed(job):
            self._have_measured(job, decided)
            return False
        self._count(job, job.utility, remaining)
        plans = None if self._was_tried(job, grid) else self._plans(job, grid, used)
        if plans is None:
            decided.unplanned[job.job] = TOO_EXPENSIVE
            return False
        worth = plans.worth(job.utility, job.submitted_at)
        last = most_worth(plans, worth)
        if last is not None:
            self._admit(job, plans, last, grid, decided)
            decided.numbers[job.job]["worth"] = float(worth[last])
            grid.take(used, decided.schedules[job.job])
        elif job.undecided:
            decided.rejected[job.job] = rejection(job, job.utility, plans, grid.now)
        else:
            decided.unplanned[job.job], self._tried[job.job] = TOO_EXPENSIVE, grid.first
        return True

    def _admit(
        self, job: JobView, plans: JobPlans, last: int, grid: IntervalGrid, decided: Decisions
    ) -> None:
        """Reserve slots for the job, and promise its end with a margin."""
        end = float(plans.ends[last])
        decided.schedules[job.job], decided.expected[job.job] = plans.schedule(last), end
        later_s = max(grid.interval_s, self._options.margin * (end - grid.now))
        decided.promised[job.job] = end + later_s
        decided.numbers[job.job] = {"cost": float(plans.cost[last])}

    def _have_measured(self, job: JobView, decided: Decisions) -> None:
        """Have the job measured first; if its speed is unknown, only one job of its family."""
        knows_speed = self._estimates.knows_speed(job)
        if knows_speed and not job.undecided:
            decided.unplanned[job.job] = UNKNOWN_LENGTH
        elif knows_speed or job.family not in decided.measured.values():
            decided.measured[job.job] = job.family

    def _count(self, job: JobView, utility: Utility, remaining: float) -> None:
        """Include the job's value per slot second, on its minimum slots, in U and L once."""
        if job.job in self._counted:
            return
        self._counted.add(job.job)
        rate = float(self._estimates.samples_per_s(job, (job.least,), (1,))[0])
        slot_s = job.least * (remaining / rate + self._options.start_stall_s)
        self._bounds.add(utility.value / slot_s if math.isfinite(slot_s) and slot_s > 0.0 else 0.0)

    # --- plans

    def _was_tried(self, job: JobView, grid: IntervalGrid) -> bool:
        """True if planning the job failed so recently that it should not be tried again yet."""
        return grid.first < self._tried.get(job.job, -RETRY_INTERVALS) + RETRY_INTERVALS

    def _plans(
        self, job: JobView, grid: IntervalGrid, used: IntArray, by: float | None = None
    ) -> JobPlans | None:
        samples = self._work(job, grid)
        if samples is None:
            return None
        prices = SlotPrices(used, grid.capacity, *self._bounds.now())
        rates = partial(self._estimates.samples_per_s, job)
        return plans_of(
            job, samples, rates, grid, prices, start_s=self._options.start_stall_s, by=by
        )

    def _work(self, job: JobView, grid: IntervalGrid) -> float | None:
        """Return the remaining samples, at least 1; None if work or speed of the job is unknown."""
        remaining = self._estimates.remaining(job, grid.now)
        if remaining is None or not self._estimates.knows_speed(job):
            return None
        return max(remaining, 1.0)
