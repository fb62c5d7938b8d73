"""How the training loss will go on falling: Optimus' convergence curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from controlplane.prediction.array_types import FloatArray

FLOORS: Final = 40  # that are tried for the loss that is never gone below
LEAST_POINTS: Final = 3  # the curve has three coefficients
FURTHEST: Final = 10_000  # epochs that are looked at for convergence


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss after k epochs: 1 / (b0 k + b1) + b2, all at least 0 (Optimus eq. 1)."""

    b0: float
    b1: float
    b2: float

    def at(self, epoch: float) -> float:
        """The loss after so many epochs.

        Args:
            epoch: finished ones.
        """
        return 1.0 / max(self.b0 * epoch + self.b1, 1e-12) + self.b2

    def fall(self, epoch: float) -> float:
        """The share of the loss after `epoch` that the next epoch takes away.

        Args:
            epoch: finished ones.
        """
        loss = self.at(epoch)
        return (loss - self.at(epoch + 1)) / loss

    def converged_at(self, convergence: float) -> int:
        """The first epoch after which an epoch takes less than such a share of the loss away.

        Args:
            convergence: share of the loss, in (0, 1).
        """
        low, high = 0, FURTHEST  # the share falls from epoch to epoch
        while low < high:
            middle = (low + high) // 2
            if self.fall(middle) < convergence:
                high = middle
            else:
                low = middle + 1
        return low


def fit_loss(epochs: Sequence[int], losses: Sequence[float]) -> LossCurve | None:
    """The curve closest to what was reported; None if that does not tell one.

    For each of some floors b2 below the least loss, b0 and b1 come by non-negative least squares
    on 1 / (loss - b2), weighted so that errors count as they do in the loss itself.

    Args:
        epochs: k, finished ones, at least three.
        losses: mean training loss of each, above 0.
    """
    k, loss = np.array(epochs, dtype=float), np.array(losses, dtype=float)
    sane = np.isfinite(loss) & (loss > 0)
    k, loss = k[sane], loss[sane]
    if len(k) < LEAST_POINTS or np.ptp(loss) <= 0:
        return None
    floors = float(loss.min()) * np.linspace(0.0, 0.99, FLOORS)
    fits = [_with_floor(k, loss, float(floor)) for floor in floors]
    error, curve = min(fits, key=lambda fit: fit[0])
    return curve if np.isfinite(error) else None


def _with_floor(k: FloatArray, loss: FloatArray, floor: float) -> tuple[float, LossCurve]:
    above = loss - floor
    weight = above**2  # d(loss) = (loss - b2)^2 d(1 / (loss - b2))
    matrix = np.column_stack([k, np.ones_like(k)]) * weight[:, None]
    (b0, b1), _ = nnls(matrix, weight / above)
    curve = LossCurve(float(b0), float(b1), floor)
    said = 1.0 / np.maximum(b0 * k + b1, 1e-12) + floor
    return float(np.sum((said - loss) ** 2)), curve
