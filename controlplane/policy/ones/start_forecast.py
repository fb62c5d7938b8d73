"""The forecasts of waiting jobs' starts, with an interval that should contain 80% of the starts.

The schedule in force is rolled forward. Running jobs end when their remaining time is over, and
waiting jobs get their slots in the order in which the policy fills slots. The outcomes of similar
earlier forecasts (nearest neighbours by expected wait and length) correct the result. A job that
has waited longer than forecast is treated as if it started now; otherwise the predicted waits would
be too short.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import ClusterView, StartForecast
from controlplane.policy.ones.evolution import Candidate
from controlplane.policy.ones.greedy import used
from controlplane.policy.ones.job_rows import MIN_GAIN
from controlplane.policy.ones.problem import Problem
from controlplane.policy.ones.problem_builder import UNKNOWN_S, remaining_of
from controlplane.prediction import FloatArray
from schemas.ids import JobId, Seconds

MAX_FORECASTS: Final = 256  # jobs with a forecast, the first in line; bounds the computing time
MAX_ENDS: Final = 1024  # next ends of running jobs to consider; bounds the computing time
MAX_OUTCOMES: Final = 300  # kept outcomes
NEIGHBOURS: Final = 40  # outcomes that correct a new forecast
INTERVAL_S: Final = 5.0  # interval between forecasts of the same jobs
WAIT_OFFSET_S: Final = 5.0  # added to waits, so that ratios of short waits stay moderate
QUANTILES: Final = (0.1, 0.5, 0.9)
# Prior errors, evenly spread from a quarter to four times the wait; a judgement.
PRIOR_ERRORS: Final = tuple(math.log(4.0) * share / 5.0 for share in range(-5, 6))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forecast for a job that has not started yet."""

    at: Seconds
    wait_s: float  # wait found by rolling the schedule forward
    length_s: float  # length of the job on one slot
    median_s: float  # published wait

    @property
    def traits(self) -> tuple[float, float]:
        """Coordinates by which similar forecasts are found."""
        return math.log(self.wait_s + WAIT_OFFSET_S), math.log(self.length_s + WAIT_OFFSET_S)

    def error(self, now: Seconds) -> float:
        """Return log(actual wait / rolled wait) if the wait ends at `now`."""
        return math.log((now - self.at + WAIT_OFFSET_S) / (self.wait_s + WAIT_OFFSET_S))


class StartForecasts:
    """The forecasts of starts, corrected by the outcomes of earlier forecasts."""

    def __init__(self) -> None:
        self._pending: dict[JobId, _Pending] = {}
        self._outcomes: deque[tuple[tuple[float, float], float]] = deque(maxlen=MAX_OUTCOMES)
        self._ends: dict[JobId, Seconds] = {}  # expected ends of running jobs
        self._latest: dict[JobId, StartForecast] = {}
        self._forecast_jobs: frozenset[JobId] = frozenset()  # waiting jobs at the last forecast
        self._made_at = Seconds(-math.inf)

    def update(self, view: ClusterView, now: Seconds) -> None:
        """Record the outcomes of forecasts for jobs that have started."""
        for name in [name for name in self._pending if _has_left(view, name)]:
            forecast = self._pending.pop(name)
            if name in view.jobs and now > forecast.at:
                self._outcomes.append((forecast.traits, forecast.error(now)))
        self._ends = {name: at for name, at in self._ends.items() if name in view.jobs}

    def of(self, problem: Problem, best: Candidate, now: Seconds) -> dict[JobId, StartForecast]:
        """Return forecasts for the jobs that the schedule `best` leaves waiting."""
        rows = np.flatnonzero(best.levels == 0).tolist()
        if not rows:
            return {}
        waiting = frozenset(problem.job_rows[row].job.job for row in rows)
        if now - self._made_at >= INTERVAL_S or not waiting <= self._forecast_jobs:
            self._latest = self._compute(problem, best, now)
            self._made_at, self._forecast_jobs = now, waiting
        return {name: said for name, said in self._latest.items() if name in waiting}

    def _compute(
        self, problem: Problem, best: Candidate, now: Seconds
    ) -> dict[JobId, StartForecast]:
        length_s = remaining_of(problem.job_rows)
        line = _in_line(problem, best, length_s)
        free = problem.capacity - used(problem, best.levels)
        waits = _rolled(self._occupied(problem, best, length_s, now), free, line, now)
        if not waits:
            return {}
        wait_s = np.array(list(waits.values()))
        factors = self._corrections(wait_s, length_s[list(waits)], now)
        spans = np.maximum(0.0, (wait_s[:, None] + WAIT_OFFSET_S) * factors - WAIT_OFFSET_S)
        found: dict[JobId, StartForecast] = {}
        for (row, rolled_s), (low, middle, high) in zip(waits.items(), spans.tolist(), strict=True):
            name = problem.job_rows[row].job.job
            self._pending.setdefault(name, _Pending(now, rolled_s, float(length_s[row]), middle))
            found[name] = StartForecast(
                at=Seconds(now + middle), earliest=Seconds(now + low), latest=Seconds(now + high)
            )
        return found

    def _occupied(
        self, problem: Problem, best: Candidate, length_s: FloatArray, now: Seconds
    ) -> list[tuple[float, int]]:
        """Return (time, slots) for the slots of running and changing jobs that become free next."""
        rows = np.flatnonzero(best.levels)
        levels = best.levels[rows]
        running = [problem.job_rows[row] for row in rows.tolist()]
        levels_of = zip(running, levels.tolist(), strict=True)
        gains = np.array([row.table.gains[level - 1] for row, level in levels_of], dtype=np.float64)
        ends = (now + length_s[rows] / np.maximum(gains, MIN_GAIN)).tolist()
        self._ends |= {row.job.job: at for row, at in zip(running, ends, strict=True)}
        held = list(zip(ends, problem.sizes[rows, levels].tolist(), strict=True))
        usual = float(np.median(ends)) if ends else now + UNKNOWN_S
        held += [
            (max(now, self._ends.get(name, usual)), len(placed))
            for name, placed in problem.kept.items()
        ]
        return heapq.nsmallest(MAX_ENDS, held)

    def _corrections(self, wait_s: FloatArray, length_s: FloatArray, now: Seconds) -> FloatArray:
        """Return quantiles of (actual / rolled wait) over similar forecasts, shape (N, 3)."""
        late = [
            forecast for forecast in self._pending.values() if now - forecast.at > forecast.median_s
        ]
        samples = [*self._outcomes, *((forecast.traits, forecast.error(now)) for forecast in late)]
        if len(samples) <= len(PRIOR_ERRORS):
            errors = np.array([*(error for _, error in samples), *PRIOR_ERRORS])
            return np.tile(np.exp(np.quantile(errors, QUANTILES)), (len(wait_s), 1))
        traits = np.array([trait for trait, _ in samples])
        errors = np.array([error for _, error in samples])
        mine = np.log(np.column_stack([wait_s, length_s]) + WAIT_OFFSET_S)
        apart = np.abs(mine[:, None, :] - traits[None, :, :]).sum(axis=2)
        alike = np.argsort(apart, axis=1, kind="stable")[:, :NEIGHBOURS]
        return np.asarray(np.exp(np.quantile(errors[alike], QUANTILES, axis=1)).T)


def _has_left(view: ClusterView, name: JobId) -> bool:
    """True if a job runs or has ended, i.e. no longer waits."""
    job = view.jobs.get(name)
    return job is None or bool(job.running_on)


def _in_line(
    problem: Problem, best: Candidate, length_s: FloatArray
) -> list[tuple[int, int, float]]:
    """Return (row, slots, seconds) of the waiting jobs, the largest value per slot first."""
    rows = np.flatnonzero((best.levels == 0) & problem.allowed[:, 1:].any(axis=1))
    sizes, worth = problem.sizes[rows], problem.worth[rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where((sizes > 0) & np.isfinite(worth), (worth - worth[:, :1]) / sizes, -np.inf)
    level = slopes.argmax(axis=1)
    steepest = slopes[np.arange(len(rows)), level]
    found = []
    for at in np.argsort(-steepest, kind="stable")[:MAX_FORECASTS].tolist():
        row, chosen = int(rows[at]), int(level[at])
        gain = float(problem.job_rows[row].table.gains[chosen - 1])
        found.append((row, int(sizes[at, chosen]), float(length_s[row]) / max(gain, MIN_GAIN)))
    return found


def _rolled(
    held: Iterable[tuple[float, int]],
    free: int,
    line: Sequence[tuple[int, int, float]],
    now: Seconds,
) -> Mapping[int, float]:
    """Return, by row, the seconds until jobs get their slots; without jobs that never get any.

    Args:
        held: times at which slots become free, each with the number of these slots.
        free: number of slots that are free at `now`.
        line: row, slots and seconds of each waiting job, in order; smaller jobs may overtake.
    """
    ends = list(held)
    heapq.heapify(ends)
    waits: dict[int, float] = {}
    left, at = list(line), float(now)
    while left:
        passed = []
        for place, (row, slots, length_s) in enumerate(left):
            if not free:
                passed += left[place:]
                break
            if slots <= free:
                free -= slots
                waits[row] = at - now
                heapq.heappush(ends, (at + length_s, slots))
            else:
                passed.append((row, slots, length_s))
        left = passed
        if not ends:
            break
        at, slots = heapq.heappop(ends)
        free += slots
    return waits
