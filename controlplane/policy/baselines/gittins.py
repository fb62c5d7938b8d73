"""Gittins index: jobs that will probably end soon, judged by ended jobs, come first."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate
from typing import Annotated, Final

from controlplane.policy.api import (
    ClusterView,
    ImmediatePolicy,
    JobEnded,
    JobView,
    Plan,
    PolicyEvent,
)
from controlplane.policy.options import Count, Options, Within
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.sizes import fit_gangs, gang_plan
from controlplane.policy.placement.slot_partition import partition_of
from schemas.ids import JobId, Seconds

TOLERANCE: Final = 1e-6  # tolerance at the end of a quantum, slot seconds


class GittinsOptions(Options, frozen=True):
    """Options of policy `gittins`, table `[policy.options]` of the controller's settings."""

    # slot seconds after which a job's rank is updated
    quantum: Annotated[float, Within(1.0)] = 3250.0
    history: Count = 1000  # number of remembered jobs, which are those that ended last
    least_history: Count = 5  # with fewer remembered jobs, least attained service decides
    placer: PlacerName = "consolidate"


class ServiceHistory:
    """Total service of the latest `kept` jobs that ended, in slot seconds."""

    def __init__(self, kept: int) -> None:
        self._recent: deque[float] = deque()
        self._kept = kept
        self._sorted: list[float] = []
        self._sums: list[float] = [0.0]  # prefix sums of `_sorted`

    @property
    def size(self) -> int:
        """Number of remembered jobs."""
        return len(self._sorted)

    def add(self, service: float) -> None:
        """Add the slot seconds of a job that ended; a full history forgets its oldest entry."""
        if len(self._recent) == self._kept:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(service)
        insort(self._sorted, service)
        self._sums = [0.0, *accumulate(self._sorted)]

    def index(self, attained: float, quantum: float) -> float:
        """Return P / E of a job with this attained service (Tiresias section 3.3).

        Both are estimated from the jobs that took more service than `attained`. P is the
        probability that the job ends within the next quantum. E is its mean service in that
        quantum. Return 0 if no job ended in it. Arguments are in slot seconds.
        """
        first = bisect_right(self._sorted, attained)
        last = bisect_right(self._sorted, attained + quantum)
        end, longer = last - first, len(self._sorted) - last
        service = self._sums[last] - self._sums[first] - end * attained + longer * quantum
        return end / service if end else 0.0


class Gittins(ImmediatePolicy):
    """Pre-emptive gangs of the wanted size by Gittins index, greatest first, with backfill.

    A job's index is computed at the start of its current quantum, so that ranks change only when a
    quantum is over or a job ends. Ties are decided by quanta of service, then by arrival. Until a
    few jobs have ended, this order applies to all jobs. A long job may starve.
    """

    def __init__(self, options: GittinsOptions | None = None) -> None:
        self.options = options or GittinsOptions()
        self._placer = make_placer(self.options.placer)
        self._history = ServiceHistory(self.options.history)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn the service of a job that ended."""
        self._placer.observe(event, now)
        if isinstance(event, JobEnded) and event.slot_s > 0:
            self._history.add(event.slot_s)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that goes through jobs by falling index and runs each job that fits."""
        partition = partition_of(view, now)
        jobs = [*partition.running, *partition.waiting]
        ranks = {job.job: self._rank(job, now) for job in jobs}
        sizes = fit_gangs(
            partition, sorted(jobs, key=lambda job: (*ranks[job.job], job.submitted_at))
        )

        def why(job: JobView) -> tuple[str, dict[str, float]]:
            index, quanta = ranks[job.job]
            served = job.served(now)
            numbers = {"index": -index, "served": served, "quanta": float(quanta)}
            if self._history.size < self.options.least_history:
                return f"{served:.0f} slot seconds attained, too few jobs have ended", numbers
            return f"Gittins index {-index:.3g} after {served:.0f} slot seconds", numbers

        pinned = {job.job: len(job.running_on) for job in partition.pinned}
        return gang_plan(partition, sizes, self._placer, why, self._next(view, sizes | pinned, now))

    def _rank(self, job: JobView, now: Seconds) -> tuple[float, int]:
        """Return minus the index, and the quanta of service; the smallest rank is served first."""
        quanta = self._quanta(job, now)
        if self._history.size < self.options.least_history:
            return 0.0, quanta
        quantum = self.options.quantum
        return -self._history.index(quanta * quantum, quantum), quanta

    def _quanta(self, job: JobView, now: Seconds) -> int:
        return int((job.served(now) + TOLERANCE) // self.options.quantum)

    def _next(self, view: ClusterView, sizes: dict[JobId, int], now: Seconds) -> Seconds | None:
        quantum = self.options.quantum
        ends = [
            now + ((self._quanta(job, now) + 1) * quantum - job.served(now)) / size
            for job, size in ((view.jobs[name], size) for name, size in sizes.items())
        ]
        return Seconds(max(min(ends), math.nextafter(now, math.inf))) if ends else None
