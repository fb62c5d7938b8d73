"""How wrong a kind of prediction was so far: in a family, by its user, and at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

FORGETTING: Final = 0.98  # weight of everything before, when something new comes
TRUST: Final = 2.0  # observations that what is known in a wider circle counts for; a judgement


@dataclass(slots=True)
class _Sums:
    count: float = 0.0
    first: float = 0.0  # of errors
    second: float = 0.0  # of their squares

    def add(self, error: float) -> None:
        self.count = FORGETTING * self.count + 1.0
        self.first = FORGETTING * self.first + error
        self.second = FORGETTING * self.second + error * error


@dataclass(slots=True)
class LearntErrors:
    """Bias and spread of errors, each circle drawn towards the next wider one while it is new."""

    prior_spread: float  # before anything came
    trust: float = TRUST
    _sums: dict[str, _Sums] = field(default_factory=dict)

    def add(self, circles: Sequence[str], error: float) -> None:
        """A prediction met what came.

        Args:
            circles: that it belongs to, such as all, its user's, its family's.
            error: usually a logarithm, of what came over what was predicted.
        """
        if not math.isfinite(error):
            return
        for circle in circles:
            self._sums.setdefault(circle, _Sums()).add(error)

    def of(self, circles: Sequence[str]) -> tuple[float, float]:
        """Bias and spread that the next error is expected to have."""
        bias, square = 0.0, self.prior_spread**2
        for circle in circles:
            seen = self._sums.get(circle)
            if seen is None:
                continue
            weight = self.trust + seen.count
            before, bias = bias, (self.trust * bias + seen.first) / weight
            around = seen.second - 2.0 * bias * seen.first + seen.count * bias * bias
            square = (self.trust * (square + (before - bias) ** 2) + max(around, 0.0)) / weight
        return bias, math.sqrt(square)


def circles_of(family: str) -> tuple[str, ...]:
    """All jobs, those of one user, those of one family; the widest first.

    Args:
        family: its name begins with its user's, up to a slash.
    """
    user, slash, _ = family.partition("/")
    return ("", f"{user}/", family) if slash else ("", family)
