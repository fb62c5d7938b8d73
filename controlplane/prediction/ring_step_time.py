"""How long a step of a fixed batch takes on so many slots: Optimus' all-reduce form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from controlplane.prediction.array_types import FloatArray, IntArray

SPEED_UP: Final = 0.9  # r^0.9 on r slots, until it was measured
PRIOR_WEIGHT: Final = (
    0.1  # weight of that, in samples, at each size below; falls as sizes are measured
)
PRIOR_SLOTS: Final = (1, 2, 4, 8, 16)  # slots


@dataclass(frozen=True, slots=True)
class StepSample:
    """The mean time of a step that was measured at one size."""

    slots: int
    batch: int  # global, samples per step
    step_s: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """step = a B / w + b + c (w - 1) / w + d w, for a global batch B on w slots.

    Optimus eq. 3 for parameter servers, with the terms of a ring instead of those of servers:
    computing, what is done once, the bytes that a ring moves, and its hops.
    """

    coefficients: tuple[float, float, float, float]

    def step_s(self, slots: int, batch: int) -> float:
        """Seconds of a step.

        Args:
            slots: w.
            batch: B, global, samples per step.
        """
        terms = _terms(slots, batch)
        return sum(c * term for c, term in zip(self.coefficients, terms, strict=True))


def steps_at(coefficients: FloatArray, slots: IntArray, batches: IntArray) -> FloatArray:
    """Seconds of a step of several models at several sizes.

    Args:
        coefficients: of `StepModel`, shape (M, 4).
        slots: w, shape (S,) or (M, S).
        batches: B, global, samples per step, shape (M, 1).

    Returns:
        Shape (M, S).
    """
    a, b, c, d = coefficients.T[:, :, None]
    steps_s: FloatArray = a * batches / slots + b + c * (slots - 1) / slots + d * slots
    return steps_s


def fit_steps(samples: Sequence[StepSample], batch: int, alone_s: float = 1.0) -> StepModel:
    """The model that explains `samples` best: relative least squares, nothing below 0.

    Few sizes do not tell four coefficients, so that a speed-up of r^0.9 from what was measured is
    believed with little weight, the less the more sizes there are.

    Args:
        batch: of the job that it is for; what is believed is believed for it.
        alone_s: seconds of its step on one slot, if there are no samples.
    """
    if samples:  # per sample of a batch: what a single slot would take
        alone = [s.step_s * s.slots**SPEED_UP * batch / s.batch for s in samples]
        alone_s = float(np.exp(np.mean(np.log(alone))))
    priors = [StepSample(w, batch, alone_s / w**SPEED_UP) for w in PRIOR_SLOTS]
    rows = [*samples, *priors]
    weight = PRIOR_WEIGHT / max(1, len({sample.slots for sample in samples})) ** 3
    weights = np.sqrt(np.array([1.0] * len(samples) + [weight] * len(priors)))
    relative = weights / np.array([row.step_s for row in rows])
    matrix = np.array([_terms(row.slots, row.batch) for row in rows]) * relative[:, None]
    found, _ = nnls(matrix, weights)
    a, b, c, d = map(float, found)
    return StepModel((a, b, c, d))


def _terms(slots: int, batch: int) -> tuple[float, float, float, float]:
    return batch / slots, 1.0, (slots - 1) / slots, float(slots)
