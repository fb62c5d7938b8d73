"""Latest step report of each job, used for display and never by the core."""

from __future__ import annotations

from schemas.ids import JobId, Seconds
from schemas.wire.agent import StepsReported


class TelemetryTable:
    """Latest reports of running jobs. They are lost when the controller restarts."""

    def __init__(self) -> None:
        self._latest: dict[JobId, StepsReported] = {}
        self._last_step_at: dict[JobId, Seconds] = {}  # when the latest step was first reported

    def take(self, steps: StepsReported, now: Seconds) -> None:
        """Store a report in place of the last one. Ignore a late report of an older group."""
        known = self.of(steps.job)
        if known is None or steps.group >= known.group:
            self._latest[steps.job] = steps
            if known is None or (steps.group, steps.step) != (known.group, known.step):
                self._last_step_at[steps.job] = now

    def idle_s(self, job: JobId, now: Seconds) -> float:
        """Return how many seconds ago `job` made its last step, or 0 if there is no report."""
        return now - self._last_step_at.get(job, now)

    def of(self, job: JobId) -> StepsReported | None:
        """Return the latest report of `job` since the controller's start, or None."""
        return self._latest.get(job)

    def forget(self, job: JobId) -> None:
        """Drop the report of an ended job, if any."""
        self._latest.pop(job, None)
        self._last_step_at.pop(job, None)
