"""The latest step report of each job: for the eye, never for the core."""

from __future__ import annotations

from schemas.ids import JobId, Seconds
from schemas.messages.agent import StepsReported


class TelemetryTable:
    """What workers said last about a job that runs; lost when the controller restarts."""

    def __init__(self) -> None:
        self._latest: dict[JobId, tuple[Seconds, StepsReported]] = {}

    def take(self, steps: StepsReported, now: Seconds) -> None:
        """Remember a report that came at `now`; a late one of an older group tells nothing.

        Args:
            steps: the report; it replaces the one before of its job.
            now: seconds since the epoch.
        """
        known = self.of(steps.job)
        if known is None or steps.group >= known.group:
            self._latest[steps.job] = (now, steps)

    def of(self, job: JobId) -> StepsReported | None:
        """The latest report of `job`.

        Args:
            job: if nothing was reported of it since the controller began, the answer is None.
        """
        found = self._latest.get(job)
        return found[1] if found else None

    def forget(self, job: JobId) -> None:
        """Drop an ended job.

        Args:
            job: may have no report.
        """
        self._latest.pop(job, None)
