"""Tiresias: least attained service first, in a few queues (Gu et al., NSDI '19)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from controlplane.policy.api import ClusterView, ImmediatePolicy, JobView, Plan, PolicyEvent
from controlplane.policy.options import NotNegative, Options, refuse
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.sizes import fit_gangs, gang_plan
from controlplane.policy.placement.slot_partition import partition_of
from schemas.ids import JobId, Seconds

TOLERANCE: Final = 1e-6  # tolerance before a limit, slot seconds


class TiresiasOptions(Options, frozen=True):
    """Options of policy `tiresias`, table `[policy.options]` of the controller's settings."""

    limits: tuple[float, ...] = (3250.0, 7200.0)  # slot seconds at which a job leaves each queue
    # ratio of waiting to running time that promotes a job to the first queue; 0: never
    promote_after: NotNegative = 0.0
    placer: PlacerName = "consolidate"

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if not self.limits:
            refuse("limits", "empty", "give at least one, in slot seconds")
        if not all(math.isfinite(limit) and limit > 0 for limit in self.limits):
            refuse("limits", f"{list(self.limits)} are not all above 0", "give slot seconds")
        if any(high <= low for low, high in zip(self.limits, self.limits[1:], strict=False)):
            refuse("limits", f"{list(self.limits)} do not rise", "give them in rising order")


@dataclass(slots=True)
class _QueuePosition:
    """The queue of a job, with its service and times at its last promotion."""

    queue: int = 0
    served: float = 0.0  # slot seconds
    waited_s: float = 0.0
    ran_s: float = 0.0


class Tiresias(ImmediatePolicy):
    """Discretised two-dimensional LAS (section 3.3): least attained service (slots x time) first.

    A job starts in the first queue. When its attained service reaches the limit of its queue, it
    falls into the next queue. The first queue is ordered by arrival. Each other queue is ordered
    by the time at which its jobs fell; jobs that fall in the same plan keep their order. Jobs are
    scanned queue by queue. A job runs if it fits in the slots that are left. Otherwise it waits,
    and is pre-empted if it was running.

    The order of falling is not stored. After a restart, the controller orders the jobs of a queue
    by arrival.
    """

    def __init__(self, options: TiresiasOptions | None = None) -> None:
        self.options = options or TiresiasOptions()
        self._placer = make_placer(self.options.placer)
        self._positions: dict[JobId, _QueuePosition] = {}
        self._queues: list[dict[JobId, None]] = [{} for _ in (*self.options.limits, math.inf)]

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the placer."""
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that goes through jobs queue by queue and runs each job that fits."""
        self._sort(view, now)
        partition = partition_of(view, now)
        able = {job.job: job for job in (*partition.running, *partition.waiting)}
        ranked = [able[name] for queue in self._queues for name in queue if name in able]
        sizes = fit_gangs(partition, ranked)
        return gang_plan(
            partition,
            sizes,
            self._placer,
            lambda job: self._why(job, now),
            self._next_fall(
                view, sizes | {job.job: len(job.running_on) for job in partition.pinned}, now
            ),
        )

    # --- the queues; a repeated request at one moment does not change them

    def _sort(self, view: ClusterView, now: Seconds) -> None:
        """Add new jobs, remove ended jobs, and move jobs that are due for another queue."""
        for queue in self._queues:
            for name in [name for name in queue if name not in view.jobs]:
                del queue[name]
                del self._positions[name]
        new = [job for name, job in view.jobs.items() if name not in self._positions]
        for job in new:
            self._enter(job.job, _QueuePosition())
        risen = self._rise(view, now) if self.options.promote_after else False
        if new or risen:
            first = sorted(self._queues[0], key=lambda name: view.jobs[name].submitted_at)
            self._queues[0] = dict.fromkeys(first)
        for number, limit in enumerate(self.options.limits):
            for name in list(self._queues[number]):
                if self._served(view.jobs[name], now) >= limit - TOLERANCE:
                    del self._queues[number][name]
                    self._positions[name].queue = number + 1
                    self._queues[number + 1][name] = None

    def _enter(self, name: JobId, standing: _QueuePosition) -> None:
        self._positions[name] = standing
        self._queues[0][name] = None

    def _rise(self, view: ClusterView, now: Seconds) -> bool:
        """Promote jobs that waited too long (section 3.3); return True if there were any."""
        risen = [
            name
            for queue in self._queues[1:]
            for name in queue
            if self._rises_at(view.jobs[name], now) <= now
        ]
        for name in risen:
            job = view.jobs[name]
            del self._queues[self._positions[name].queue][name]
            self._enter(name, _QueuePosition(0, job.served(now), _waited_s(job, now), job.ran_s))
        return bool(risen)

    def _rises_at(self, job: JobView, now: Seconds) -> float:
        if job.running_on:
            return math.inf
        standing = self._positions[job.job]
        bears_s = self.options.promote_after * (job.ran_s - standing.ran_s)
        return now + bears_s - (_waited_s(job, now) - standing.waited_s)

    def _served(self, job: JobView, now: Seconds) -> float:
        return job.served(now) - self._positions[job.job].served

    def _next_fall(
        self, view: ClusterView, sizes: dict[JobId, int], now: Seconds
    ) -> Seconds | None:
        """Return when the next running job reaches its limit or a waiting job is promoted."""
        first = math.inf
        limits = self.options.limits
        for name, size in sizes.items():
            queue = self._positions[name].queue
            if queue < len(limits):
                left = limits[queue] - self._served(view.jobs[name], now)
                first = min(first, now + left / size)
        if self.options.promote_after:
            waiting = (name for queue in self._queues[1:] for name in queue if name not in sizes)
            rises = (self._rises_at(view.jobs[name], now) for name in waiting)
            first = min(first, min(rises, default=math.inf))
        return None if math.isinf(first) else Seconds(max(first, math.nextafter(now, math.inf)))

    def _why(self, job: JobView, now: Seconds) -> tuple[str, dict[str, float]]:
        served = self._served(job, now)
        queue = self._positions[job.job].queue
        words = f"in queue {queue + 1} after {served:.0f} slot seconds"
        return words, {"queue": float(queue + 1), "served": served}


def _waited_s(job: JobView, now: Seconds) -> float:
    return job.waited_s + (0.0 if job.running_on else max(0.0, now - job.moved_at))
