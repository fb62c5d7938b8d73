"""The latest step report of each job: for the eye, never for the core."""

from __future__ import annotations

from schemas.ids import JobId, Seconds
from schemas.wire.agent import StepsReported


class TelemetryTable:
    """What workers said last about a job that runs; lost when the controller restarts."""

    def __init__(self) -> None:
        self._latest: dict[JobId, StepsReported] = {}
        self._stepped: dict[JobId, Seconds] = {}  # when a report first had its latest step

    def take(self, steps: StepsReported, now: Seconds) -> None:
        """Remember a report; a late one of an older group tells nothing.

        Args:
            steps: the report, of a job that has not ended; it replaces the one before of its job.
            now: seconds since the epoch.
        """
        known = self.of(steps.job)
        if known is None or steps.group >= known.group:
            self._latest[steps.job] = steps
            if known is None or (steps.group, steps.step) != (known.group, known.step):
                self._stepped[steps.job] = now

    def stands_s(self, job: JobId, now: Seconds) -> float:
        """Return for how many seconds `job` has made no step; 0 if nothing was reported of it."""
        return now - self._stepped.get(job, now)

    def of(self, job: JobId) -> StepsReported | None:
        """The latest report of `job`.

        Args:
            job: if nothing was reported of it since the controller began, the answer is None.
        """
        return self._latest.get(job)

    def forget(self, job: JobId) -> None:
        """Drop an ended job.

        Args:
            job: may have no report.
        """
        self._latest.pop(job, None)
        self._stepped.pop(job, None)
