"""How fast a job goes."""

from __future__ import annotations


class SpeedMeter:
    """Samples per second over the epoch; time comes in from outside.

    Args:
        now: seconds, any origin; the epoch begins.
    """

    def __init__(self, now: float) -> None:
        self._epoch_began = now
        self._epoch_samples = 0

    def add(self, samples: int) -> None:
        """A step over `samples` ended.

        Args:
            samples: of the step, over all workers.
        """
        self._epoch_samples += samples

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
            now: seconds, any origin.
        """
        self._epoch_began, self._epoch_samples = now, 0
