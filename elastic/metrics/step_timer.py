"""How long a step takes."""

from __future__ import annotations


class StepTimer:
    """How long a step takes, without the pauses that are no steps; time comes in from outside."""

    def __init__(self) -> None:
        self._mark = 0.0
        self._seconds = 0.0

    def lap(self, now: float) -> float:
        """Seconds since the last lap, but at most twice what the lap before took.

        Args:
            now: seconds, any origin.
        """
        took = now - self._mark if self._mark else 0.0
        self._seconds = min(took, 2 * self._seconds) if self._seconds else took
        self._mark = now
        return self._seconds
