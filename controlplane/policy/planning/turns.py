"""Who has slots first where not all can have their least: by arrival, or in turns."""

from __future__ import annotations

from collections.abc import Container, Iterable

from controlplane.policy.api import ClusterView, JobView
from controlplane.policy.planning.slot_partition import Partition
from schemas.ids import JobId, Seconds


class Turns:
    """A job that ran for a quantum goes behind those that wait, so that nobody starves."""

    def __init__(self, quantum_s: float) -> None:
        """Begin with no job known.

        Args:
            quantum_s: seconds; 0: no turns, the oldest run to their end.
        """
        self._quantum_s = quantum_s
        self._stays: dict[JobId, tuple[bool, Seconds]] = {}  # whether it runs, and since when

    def follow(self, view: ClusterView, now: Seconds) -> None:
        """Since when jobs run or wait; other than `moved_at`, a new size does not count.

        Args:
            now: seconds on the controller's clock.
        """
        stays: dict[JobId, tuple[bool, Seconds]] = {}
        for name, job in view.jobs.items():
            runs = bool(job.running_on)
            was, since = self._stays.get(name, (runs, job.moved_at))
            stays[name] = (runs, since if was == runs else now)
        self._stays = stays

    def line(self, partition: Partition) -> list[JobView]:
        """Jobs in the order in which they are given their least.

        Args:
            partition: of the view that was followed last.
        """
        by_arrival = sorted(
            (*partition.running, *partition.waiting), key=lambda job: job.submitted_at
        )
        if not self._quantum_s:
            return by_arrival
        fresh, tired, waiting = [], [], []
        for job in by_arrival:
            runs, since = self._stays[job.job]
            if not runs:
                waiting.append(job)
            elif partition.now < since + self._quantum_s:
                fresh.append(job)
            else:
                tired.append(job)
        waiting.sort(key=lambda job: self._stays[job.job][1])
        return [*fresh, *waiting, *tired]

    def next_at(self, partition: Partition, served: Container[JobId]) -> Seconds | None:
        """When the turn of somebody is over for whom others wait; None: nobody waits.

        Args:
            partition: of the view that was followed last.
            served: jobs that have slots by the plan.
        """
        jobs: Iterable[JobView] = (*partition.running, *partition.waiting)
        names = [job.job for job in jobs]
        if not self._quantum_s or all(name in served for name in names):
            return None
        ends = [
            (self._stays[name][1] if self._stays[name][0] else partition.now) + self._quantum_s
            for name in names
            if name in served
        ]
        later = [end for end in ends if end > partition.now]
        return Seconds(min(later)) if later else None
