"""Step times: a model for fixed batches (Optimus' form for all-reduce), and smoothed means."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
from scipy.optimize import nnls

from controlplane.prediction import FloatArray, IntArray

SPEED_UP: Final = 0.9  # exponent: r slots are r^0.9 times as fast, until measured
PRIOR_WEIGHT: Final = 0.1  # samples per size in `PRIOR_SLOTS`; divided by (measured sizes)^3
PRIOR_SLOTS: Final = (1, 2, 4, 8, 16)  # sizes at which the prior is fitted


@dataclass(frozen=True, slots=True)
class StepSample:
    """The mean step time measured at one size."""

    slots: int
    batch: int  # global, samples per step
    step_s: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """step = a B / w + b + c (w - 1) / w + d w, for a global batch B on w slots.

    The form is Optimus eq. 3, with the terms of a ring in place of those of parameter servers. The
    four terms are computation, fixed work, the bytes that a ring moves, and the hops of the ring.
    """

    coefficients: tuple[float, float, float, float]

    def step_s(self, slots: int, batch: int) -> float:
        """Return the duration in seconds of a step that processes the global batch `batch`."""
        terms = _terms(slots, batch)
        return sum(c * term for c, term in zip(self.coefficients, terms, strict=True))


def steps_at(coefficients: FloatArray, slots: IntArray, batches: IntArray) -> FloatArray:
    """Return the step times of M `StepModel`s at several sizes, shape (M, S), seconds.

    Shapes are (M, 4) for `coefficients`, (S,) or (M, S) for `slots`, and (M, 1) for `batches`,
    which are global samples per step.
    """
    a, b, c, d = coefficients.T[:, :, None]
    steps_s: FloatArray = a * batches / slots + b + c * (slots - 1) / slots + d * slots
    return steps_s


def fit_steps(samples: Sequence[StepSample], batch: int, alone_s: float = 1.0) -> StepModel:
    """Return the model closest to `samples` by relative least squares; no coefficient is below 0.

    A few sizes do not determine four coefficients. The fit therefore includes a prior: r slots are
    r^0.9 times as fast as one slot. The weight of the prior falls with the number of measured
    sizes. `alone_s` is the step time on one slot that is assumed if there are no samples.
    """
    if samples:  # scale the step time to one slot and to `batch`
        alone = [s.step_s * s.slots**SPEED_UP * batch / s.batch for s in samples]
        alone_s = float(np.exp(np.mean(np.log(alone))))
    priors = [StepSample(w, batch, alone_s / w**SPEED_UP) for w in PRIOR_SLOTS]
    rows = [*samples, *priors]
    weight = PRIOR_WEIGHT / max(1, len({sample.slots for sample in samples})) ** 3
    weights = np.sqrt(np.array([1.0] * len(samples) + [weight] * len(priors)))
    relative = weights / np.array([row.step_s for row in rows])
    matrix = np.array([_terms(row.slots, row.batch) for row in rows]) * relative[:, None]
    found, _ = nnls(matrix, weights)
    a, b, c, d = found.tolist()
    return StepModel((a, b, c, d))


def _terms(slots: int, batch: int) -> tuple[float, float, float, float]:
    return batch / slots, 1.0, (slots - 1) / slots, float(slots)


Size = tuple[int, int, int]  # nodes, slots, local batch
K = TypeVar("K", bound=Hashable)

SMOOTHING: Final = 0.3  # weight of the newest measurement at a size; a judgement
DRIFT: Final = 0.15  # relative change of a mean that triggers a new fit; a judgement
MAX_WEIGHT: Final = 10.0  # largest weight of a size, in measurements


@dataclass(slots=True)
class MeanStepTime:
    """The mean of the measurements at one size."""

    step_s: float
    fitted: float  # value of `step_s` when the model was last fitted
    weight: float = 1.0  # number of measurements


@dataclass(slots=True)
class StepTimes(Generic[K]):
    """Smoothed mean step times by key, such as `Size`."""

    kept: int | None = None  # number of newest keys that are kept; None: all
    means: dict[K, MeanStepTime] = field(default_factory=dict)

    def add(self, key: K, step_s: float) -> bool:
        """Add a step's seconds, above 0; return True if the key is new or its mean has drifted."""
        mean = self.means.get(key)
        if mean is None:
            if self.kept is not None and len(self.means) >= self.kept:
                del self.means[next(iter(self.means))]
            self.means[key] = MeanStepTime(step_s, step_s)
            return True
        mean.step_s += SMOOTHING * (step_s - mean.step_s)
        mean.weight = min(MAX_WEIGHT, mean.weight + 1.0)
        return abs(mean.step_s / mean.fitted - 1.0) > DRIFT

    def mark_fitted(self) -> None:
        """Record that a model was fitted to the current means."""
        for mean in self.means.values():
            mean.fitted = mean.step_s
