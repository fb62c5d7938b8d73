"""What came of speed-ups that were promised for sizes nobody had measured, family by family."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from controlplane.policy.api import GainSeen
from controlplane.policy.ones.lengths.learnt_errors import LearntErrors
from controlplane.prediction.array_types import FloatArray, IntArray

TRUST: Final = 0.5  # measured promises that the model's word counts for; a judgement
SPREAD: Final = 0.3  # of logarithms of such errors, before any came
LEAST, MOST = 0.4, 1.5  # what a promise is multiplied by; beyond, something else is wrong


class GainCorrections:
    """A model of speeds is right where it was measured, and may be wrong in one way beyond that."""

    def __init__(self) -> None:
        self._errors = LearntErrors(SPREAD, TRUST)

    def observe(self, event: GainSeen) -> None:
        """A promise met what came.

        Args:
            event: counts if it was for a size that the family had not been measured at.
        """
        used = event.correction
        if used is None or not used > 0.0 or not min(event.predicted, event.realised) > 0.0:
            return
        error = math.log(event.realised / event.predicted) + math.log(used)
        self._errors.add((event.family,), error)

    def factor(self, family: str) -> float:
        """What a speed at a size beyond those that were measured is multiplied by.

        Args:
            family: 1 until a promise of it was measured.
        """
        bias, _ = self._errors.of((family,))
        return min(max(math.exp(bias), LEAST), MOST)

    def corrections(
        self, family: str, measured: Iterable[tuple[int, int]], nodes: IntArray, slots: IntArray
    ) -> FloatArray:
        """The same for each of some sizes; nan where the family was measured as large as that.

        Args:
            measured: nodes and slots of groups of it that were.
            nodes: that the sizes span, shape (L,).

        Returns:
            Shape (L,).
        """
        seen = list(measured)
        if not seen:
            return np.full(len(slots), np.nan)
        widest, largest = max(span for span, _ in seen), max(size for _, size in seen)
        beyond = (slots > largest) | (nodes > widest)
        return np.where(beyond, self.factor(family), np.nan)
