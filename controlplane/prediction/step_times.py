"""How long a step of a fixed batch takes on so many slots: Optimus' all-reduce form.

How long steps took: smoothed means, and whether a model of them is out of date.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from scipy.optimize import nnls

from controlplane.prediction import FloatArray, IntArray

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


Size = tuple[int, int, int]  # nodes, slots, local batch
K = TypeVar("K", bound=Hashable)

SMOOTHING: Final = 0.3  # weight of the newest of several measurements at one size; a judgement
DRIFT: Final = 0.15  # relative change of a mean that makes the model be fitted again; a judgement
FULL_WEIGHT: Final = 10.0  # measurements after which one size counts no more


@dataclass(slots=True)
class MeanStepTime:
    """The mean of what was measured at one size."""

    step_s: float
    fitted: float  # its value when the model was last fitted
    weight: float = 1.0  # measurements that it stands for
    sync_share: float | None = None  # of its seconds, in the reduction; None: never told
    fitted_share: float | None = None  # its value when the model was last fitted

    def drifted(self) -> bool:
        """Whether a model of it is out of date."""
        if abs(self.step_s / self.fitted - 1.0) > DRIFT:
            return True
        if self.sync_share is None or self.fitted_share is None:
            return self.sync_share is not None
        return abs(self.sync_share - self.fitted_share) > DRIFT


@dataclass(slots=True)
class StepTimes(Generic[K]):
    """Smoothed means, by whatever the time of a step depends on; for `Size` see above."""

    kept: int | None = None  # that are remembered, the latest of them; None: all
    means: dict[K, MeanStepTime] = field(default_factory=dict)

    def add(self, key: K, step_s: float, sync_share: float | None = None) -> bool:
        """One more measurement.

        Args:
            key: where it was measured.
            step_s: seconds of a step, above 0.
            sync_share: of these, in the reduction, 0 to 1; None: not told.

        Returns:
            Whether it tells a model something new: a size that was never measured, or a mean that
            has drifted since the model was fitted.
        """
        mean = self.means.get(key)
        if mean is None:
            if self.kept is not None and len(self.means) >= self.kept:
                del self.means[next(iter(self.means))]
            self.means[key] = MeanStepTime(step_s, step_s, 1.0, sync_share, sync_share)
            return True
        mean.step_s += SMOOTHING * (step_s - mean.step_s)
        mean.weight = min(FULL_WEIGHT, mean.weight + 1.0)
        if sync_share is not None:
            before = sync_share if mean.sync_share is None else mean.sync_share
            mean.sync_share = before + SMOOTHING * (sync_share - before)
        return mean.drifted()

    def mark_fitted(self) -> None:
        """A model was fitted to the means as they are."""
        for mean in self.means.values():
            mean.fitted, mean.fitted_share = mean.step_s, mean.sync_share
