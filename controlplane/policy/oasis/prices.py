"""What a slot costs for an interval, by how much of its node is promised already."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from controlplane.prediction.array_types import FloatArray

BELOW: Final = 0.25  # of the least density seen: 1 / (2 eta) of the paper, with eta = 2
HIGH_SHARE: Final = 0.98  # of the densities seen lie below U; what is above is one strange job
LEAST_RATIO: Final = 10.0  # of U to L: without a spread the price would not rise
FIRST: Final = (1e-4, 1e-1)  # L and U before any job was seen; value per slot second


def price(share: FloatArray, low: float, high: float) -> FloatArray:
    """Value per slot second of a slot on a node of which so much is taken.

    OASiS (Bao et al., INFOCOM '18): p_h^r(t) = L (U / L)^(g_h^r(t) / c_h^r). The resource r is the
    slot: a GPU, or a CPU slot with its share of the node's cores; no job asks for others.

    Args:
        share: g / c, shape (...), in [0, 1].
        low: L, at which everybody is admitted who is worth anything.

    Returns:
        Shape (...), from `low` to `high`.
    """
    return np.asarray(low * np.power(high / low, share), dtype=np.float64)


class PriceBounds:
    """L and U, estimated online from what the jobs seen are worth for each slot second.

    Paper: U is the greatest value of a unit of resource, and L the least over 2 eta, over all jobs
    that will ever come. Here: over the latest jobs seen, since nobody knows those to come; and U is
    a high quantile of them.

    Args:
        low: L; None: estimated.
        high: U; None: estimated.
    """

    def __init__(self, window: int, low: float | None, high: float | None) -> None:
        self._seen: deque[float] = deque(maxlen=window)
        self._low, self._high = low, high

    def add(self, density: float) -> None:
        """One more job came.

        Args:
            density: its value for each slot second that it needs on its best size.
        """
        if np.isfinite(density) and density > 0.0:
            self._seen.append(density)

    def now(self) -> tuple[float, float]:
        """L and U, value per slot second, with L below U."""
        low, high = FIRST
        if self._seen:
            seen = np.array(self._seen)
            low, high = BELOW * float(seen.min()), float(np.quantile(seen, HIGH_SHARE))
        low = self._low if self._low is not None else low
        high = self._high if self._high is not None else max(high, low * LEAST_RATIO)
        if low >= high:  # one of them was fixed, and the other was seen beyond it
            low = high / LEAST_RATIO if self._low is None else low
        return low, max(high, low)
