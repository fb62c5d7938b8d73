"""How many jobs there were, on average over the life of each: what a fair share is a share of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.policy.api import JobView
from schemas.ids import JobId, Seconds


@dataclass(frozen=True, slots=True)
class _Seen:
    at: Seconds  # first
    area: float  # up to then
    beside: int  # jobs there were then


class Contention:
    """Counts active jobs over time, as views show them."""

    def __init__(self) -> None:
        self._area = 0.0  # job seconds
        self._jobs = 0
        self._now = Seconds(0.0)
        self._seen: dict[JobId, _Seen] = {}

    def update(self, jobs: Mapping[JobId, JobView], now: Seconds) -> None:
        """Take note of who is there; nothing changes if that is said twice.

        Args:
            now: seconds on the controller's clock.
        """
        self._area += self._jobs * max(0.0, now - self._now)
        self._jobs, self._now = len(jobs), max(now, self._now)
        self._seen = {
            name: self._seen.get(name) or _Seen(now, self._area, len(jobs)) for name in jobs
        }

    def mean(self, job: JobView) -> float:
        """Jobs there were since this one was submitted, itself too; at least 1.

        Before it was first seen (by a search that began anew, say) there were as many as then.
        """
        seen = self._seen[job.job]
        before = max(0.0, seen.at - job.submitted_at)
        life = before + self._now - seen.at
        if life <= 0.0:
            return float(max(1, self._jobs))
        return max(1.0, (before * seen.beside + self._area - seen.area) / life)
