"""Lengths of jobs: remaining samples by relatives' totals, and Optimus' loss curve."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from controlplane.prediction import FloatArray


def remaining_samples(
    done: float, stated: float | None, finished: Sequence[float], largest: float
) -> float:
    """Return the samples that a job will still process.

    The estimate is the mean residual life of the `finished` jobs of the family. If none of them
    went beyond `done`, the job is expected to reach the larger of 2 `done` and `largest`, the most
    samples that any job of the family has done. A total that the user stated *is* the end of a job
    in a live cluster; it is None if the end depends on a metric.
    """
    if stated is not None:
        return max(0.0, stated - done)
    longer = [total for total in finished if total > done]
    if longer:
        return sum(longer) / len(longer) - done
    return max(2.0 * done, largest) - done


FLOORS: Final = 40  # number of lower bounds of the loss that the fit tries
MIN_POINTS: Final = 3  # the curve has three coefficients
MAX_LOSS_EPOCHS: Final = 10_000  # limit of the search for convergence


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss after k epochs: 1 / (b0 k + b1) + b2, with b0, b1 and b2 at least 0 (Optimus eq. 1)."""

    b0: float
    b1: float
    b2: float

    def at(self, epoch: float) -> float:
        """Return the loss after `epoch` finished epochs."""
        return 1.0 / max(self.b0 * epoch + self.b1, 1e-12) + self.b2

    def fall(self, epoch: float) -> float:
        """Return the share of the loss at `epoch` that the next epoch removes."""
        loss = self.at(epoch)
        return (loss - self.at(epoch + 1)) / loss

    def converged_at(self, convergence: float) -> int:
        """Return the first epoch with a `fall` below `convergence`."""
        epochs = range(MAX_LOSS_EPOCHS)  # the share falls from epoch to epoch
        return bisect_left(epochs, x=True, key=lambda epoch: self.fall(epoch) < convergence)


def fit_loss(epochs: Sequence[int], losses: Sequence[float]) -> LossCurve | None:
    """Return the curve closest to the reports, or None if the reports do not determine a curve.

    The fit tries several floors b2 below the smallest loss. For each floor, non-negative least
    squares on 1 / (loss - b2) finds b0 and b1, weighted so that errors count as errors of the loss.
    Three losses above 0 are needed. `epochs` has the number of finished epochs for each loss.
    """
    k, loss = np.array(epochs, dtype=float), np.array(losses, dtype=float)
    valid = np.isfinite(loss) & (loss > 0)
    k, loss = k[valid], loss[valid]
    if len(k) < MIN_POINTS or np.ptp(loss) <= 0:
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
    predicted = 1.0 / np.maximum(b0 * k + b1, 1e-12) + floor
    return float(np.sum((predicted - loss) ** 2)), curve
