"""What workers use of their hosts, from what they report: of a job, its family, or anybody."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.policy.api import StepsSeen
from schemas.ids import JobId

KEPT = 0.8  # weight of what was known, at each report


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Of one worker, means."""

    cores: float = 0.0
    bytes_per_s: float = 0.0  # gradients that it sends


UNKNOWN = WorkerUsage()


class WorkerUsages:
    """Smoothed reports of each job, and of all jobs of a family."""

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._jobs: dict[JobId, WorkerUsage] = {}
        self._families: dict[str, WorkerUsage] = {}

    def take(self, event: StepsSeen) -> None:
        """Take in a report; one without usage teaches nothing.

        Args:
            event: telemetry; numbers that cannot be are not in it any more.
        """
        if event.cpu_cores is None or event.sent_bytes_per_s is None:
            return
        seen = WorkerUsage(event.cpu_cores, event.sent_bytes_per_s)
        self._jobs[event.job] = _mixed(self._jobs.get(event.job), seen)
        self._families[event.family] = _mixed(self._families.get(event.family), seen)

    def forget(self, job: JobId) -> None:
        """It is over; its family is remembered.

        Args:
            job: may have reported nothing.
        """
        self._jobs.pop(job, None)

    def of(self, job: JobId, family: str) -> WorkerUsage:
        """Its own, else its family's, else the mean of all families; zeros if nobody reported."""
        known = self._jobs.get(job) or self._families.get(family)
        if known is not None or not self._families:
            return known or UNKNOWN
        many, all_ = len(self._families), self._families.values()
        return WorkerUsage(
            sum(one.cores for one in all_) / many, sum(one.bytes_per_s for one in all_) / many
        )


def _mixed(known: WorkerUsage | None, seen: WorkerUsage) -> WorkerUsage:
    if known is None:
        return seen
    return WorkerUsage(
        KEPT * known.cores + (1.0 - KEPT) * seen.cores,
        KEPT * known.bytes_per_s + (1.0 - KEPT) * seen.bytes_per_s,
    )
