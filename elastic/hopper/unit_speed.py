"""How fast a hopper goes; time comes in from outside."""

from __future__ import annotations

from collections import deque
from typing import Final

RECENT: Final = 8  # units


class UnitSpeed:
    """Samples per second over the last units, with their waits; without idle time between them.

    One thread adds, another one asks.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.units = 0
        self.samples = 0  # in all

    def add(self, samples: int, seconds: float) -> None:
        """A unit is through.

        Args:
            seconds: from its order to its end.
        """
        self._recent.append((samples, seconds))
        self.units, self.samples = self.units + 1, self.samples + samples

    def samples_per_s(self) -> float | None:
        """Of this worker; None before its first unit is through."""
        recent = list(self._recent)
        seconds = sum(took for _, took in recent)
        return sum(samples for samples, _ in recent) / seconds if seconds > 0.0 else None
