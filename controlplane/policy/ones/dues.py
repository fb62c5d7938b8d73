"""What jobs are due by `max_stretch`: the part of it that candidates are scored with."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.prediction.array_types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Dues:
    """How the jobs of a problem stand against the limit, and what each is due."""

    limit: float  # max_stretch
    expected: FloatArray  # shape (J,), stretch if each has its fair share from now on
    at_best: FloatArray  # shape (J,), stretch on the largest size that each may have now
    level: IntArray  # shape (J,), lowest level that each is due; 0: none
    missing: FloatArray  # shape (J, 1 + L), worth of what is due and not there at each level

    def is_kept(self, row: int) -> bool:
        """Whether the limit can still be kept."""
        return bool(self.at_best[row] <= self.limit)
