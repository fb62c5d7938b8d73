"""How fast a job goes."""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 2.0
LEAST_S: Final = 0.5  # of a first window that is not complete


class SpeedMeter:
    """Samples per second, over a short window and over the epoch; time comes in from outside.

    Args:
        now: seconds, any origin; the epoch and the first window begin.
    """

    def __init__(self, now: float) -> None:
        self._epoch_began = now
        self._epoch_samples = 0
        self._mark, self._marked_samples = now, 0
        self._recent = 0.0

    def add(self, samples: int, now: float) -> None:
        """A step over `samples` ended at `now` (seconds, any origin).

        Args:
            samples: of the step, over all workers.
            now: seconds, any origin.
        """
        self._epoch_samples += samples
        self._marked_samples += samples
        elapsed = now - self._mark
        if elapsed >= WINDOW_S:
            self._recent = self._marked_samples / elapsed
            self._mark, self._marked_samples = now, 0

    def regroup(self, now: float) -> None:
        """Another group goes on: what was measured before tells nothing of it.

        Args:
            now: seconds, any origin; the epoch's count goes on.
        """
        self._mark, self._marked_samples, self._recent = now, 0, 0.0

    def recent(self, now: float) -> float:
        """Samples per second of late, in the present group; 0.0 when it has only just begun.

        Args:
            now: seconds, any origin.
        """
        if self._recent:
            return self._recent
        elapsed = now - self._mark
        return self._marked_samples / elapsed if elapsed >= LEAST_S else 0.0

    def of_epoch(self, now: float) -> tuple[float, float]:
        """Samples per second over the epoch so far, and its seconds.

        Args:
            now: seconds, any origin.
        """
        seconds = max(now - self._epoch_began, 1e-9)
        return self._epoch_samples / seconds, seconds

    def begin_epoch(self, now: float) -> None:
        """The next epoch begins.

        Args:
            now: seconds, any origin; the window of `recent` goes on.
        """
        self._epoch_began, self._epoch_samples = now, 0
