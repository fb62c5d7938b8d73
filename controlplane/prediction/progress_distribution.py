"""The progress of a job as a Beta distribution learnt from finished jobs (ONES section 3.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator
from scipy.optimize import minimize
from scipy.special import digamma, gammaln

from controlplane.prediction import FloatArray

FEATURES: Final = 5  # ||D||, initial loss, Y_processed, loss improvement ratio, accuracy
MARGIN: Final = 1e-3  # minimum distance of progress from 0 and 1, where a density may be infinite
RIDGE: Final = 1e-3  # penalty per point on the coefficients of standardised features


def features(
    epoch_samples: float,
    initial_loss: float | None,
    samples_done: float,
    loss: float | None,
    accuracy: float | None = None,
) -> FloatArray:
    """Return the paper's feature vector x, shape (5,); nan where a value is unknown or not finite.

    The model replaces nan by the mean of the feature.

    Args:
        epoch_samples: ||D||.
        initial_loss: L_initial; the paper measures it before training starts.
        samples_done: Y_processed.
        loss: latest reported loss; r_L = 1 - loss / L_initial.
        accuracy: latest reported validation accuracy.
    """
    found = np.full(FEATURES, np.nan)
    found[0], found[2] = epoch_samples, samples_done
    if initial_loss is not None and np.isfinite(initial_loss):
        found[1] = initial_loss
        if loss is not None and np.isfinite(loss) and initial_loss:
            found[3] = np.clip(1.0 - loss / initial_loss, -1.0, 1.0)
    if accuracy is not None and np.isfinite(accuracy):
        found[4] = accuracy
    return found


@dataclass(frozen=True)
class Points:
    """Training data: finished jobs at the ends of their epochs, with the progress at that time."""

    features: FloatArray  # x, shape (N, 5); nan where unknown
    epochs: FloatArray  # number of processed epochs, shape (N,)
    progress: FloatArray  # rho, shape (N,): share of the job's work that was done

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.epochs)


def points_of(rows: FloatArray, epochs: FloatArray) -> Points:
    """Return the points of one finished job from x, shape (E, 5), and rising epochs, shape (E,).

    The last entry is the end of the job. It does not become a point, because its progress is 1,
    where a Beta distribution has no information.
    """
    total = epochs[-1] if len(epochs) else 1.0
    before = epochs < total
    return Points(rows[before], epochs[before], epochs[before] / total)


@dataclass(frozen=True)
class ProgressModel:
    """The model rho ~ Be(alpha, beta) of the progress of a job (eq. 6).

    Here alpha is the number of processed epochs and beta = A x + b; both are at least 1. Features
    are standardised, which changes A and b, but not the set of functions that can be expressed.
    """

    weights: FloatArray  # A, shape (5,), epochs per standard deviation
    bias: float  # b, epochs
    mean: FloatArray  # shape (5,)
    scale: FloatArray  # shape (5,)

    def shapes(self, rows: FloatArray, epochs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return alpha and beta, shape (N,) each.

        `rows` has the features of each job, shape (N, 5). `epochs` has the finished
        epochs of each job, shape (N,).
        """
        linear = _standard(rows, self.mean, self.scale) @ self.weights + self.bias
        return np.maximum(epochs, 1.0), np.maximum(linear, 1.0)


def prior(epochs: float) -> ProgressModel:
    """Return the model used before any job has finished: `epochs` epochs always remain."""
    return ProgressModel(np.zeros(FEATURES), epochs, np.zeros(FEATURES), np.ones(FEATURES))


def mean_progress(alpha: FloatArray, beta: FloatArray) -> FloatArray:
    """Return the mean of Be(alpha, beta), shape (N,)."""
    return np.asarray(alpha / (alpha + beta))


def fit(points: Points, start: ProgressModel | None = None) -> ProgressModel | None:
    """Return the maximum likelihood model (A and b), or None if there are no valid points.

    The search starts at the earlier model `start` if `start` fits the points better than least
    squares do.
    """
    valid = np.isfinite(points.progress) & np.isfinite(points.epochs) & (points.epochs > 0)
    if not valid.any():
        return None
    rows, epochs = points.features[valid], points.epochs[valid]
    progress = np.clip(points.progress[valid], MARGIN, 1.0 - MARGIN)
    mean, scale = _moments(rows)
    design = np.column_stack([_standard(rows, mean, scale), np.ones(len(rows))])
    alpha = np.maximum(epochs, 1.0)
    # Least squares on the remaining epochs, so that few points start below the threshold.
    left = np.maximum(alpha * (1.0 / progress - 1.0), 1.0)
    gram = design.T @ design + RIDGE * len(rows) * np.eye(FEATURES + 1)
    candidates = [np.linalg.solve(gram, design.T @ left)]
    candidates.append(np.append(np.zeros(FEATURES), left.mean()))
    if start is not None:  # express `start` in the new standardisation
        both = np.isfinite(scale) & np.isfinite(start.scale)
        weights = np.where(both, start.weights, 0.0) * np.where(both, scale, 1.0) / start.scale
        shift = float(((mean - start.mean) / start.scale) @ start.weights)
        candidates.append(np.append(weights, start.bias + shift))
    tried = [(loss(one, design, alpha, progress)[0], place) for place, one in enumerate(candidates)]
    begin, data, limits = candidates[min(tried)[1]], (design, alpha, progress), {"maxiter": 100}
    found = minimize(loss, begin, data, jac=True, method="L-BFGS-B", options=limits)
    best = np.asarray(found.x, dtype=np.float64)
    if not np.isfinite(best).all():
        return None
    return ProgressModel(best[:-1], float(best[-1]), mean, scale)


def loss(
    parameters: FloatArray, design: FloatArray, alpha: FloatArray, progress: FloatArray
) -> tuple[float, FloatArray]:
    """Return the mean negative log likelihood plus a ridge penalty on A, and its gradient.

    d/d beta of log Be(rho; alpha, beta) is log(1 - rho) + psi(alpha + beta) - psi(beta). Where
    A x + b is below the threshold 1, beta does not depend on the parameters.

    Args:
        parameters: A and b, shape (6,).
        design: standardised x and a column of ones, shape (N, 6).
        alpha: shape (N,).
        progress: rho, shape (N,), inside (0, 1).
    """
    linear = design @ parameters
    beta = np.maximum(linear, 1.0)
    likelihood = (
        (alpha - 1.0) * np.log(progress)
        + (beta - 1.0) * np.log1p(-progress)
        + gammaln(alpha + beta)
        - gammaln(alpha)
        - gammaln(beta)
    )
    slope = np.log1p(-progress) + digamma(alpha + beta) - digamma(beta)
    slope = np.where(linear > 1.0, slope, 0.0)
    ridge = RIDGE * np.append(parameters[:-1], 0.0)
    value = -float(likelihood.mean()) + 0.5 * float(ridge @ parameters)
    return value, -(design.T @ slope) / len(alpha) + ridge


def _moments(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and spread of each feature; a constant feature has an infinite spread."""
    known = np.isfinite(rows)
    many = np.maximum(known.sum(axis=0), 1)
    filled = np.where(known, rows, 0.0)
    mean = filled.sum(axis=0) / many
    spread = np.sqrt((np.where(known, rows - mean, 0.0) ** 2).sum(axis=0) / many)
    return mean, np.where(spread > 1e-9 * np.maximum(np.abs(mean), 1.0), spread, np.inf)


def _standard(rows: FloatArray, mean: FloatArray, scale: FloatArray) -> FloatArray:
    known = np.isfinite(rows)
    return np.asarray(np.where(known, (np.where(known, rows, 0.0) - mean) / scale, 0.0))


# --- a bounded sample


class Reservoir:
    """Uniform sample of at most `capacity` of all offered points (Vitter 1985, algorithm R)."""

    def __init__(self, capacity: int) -> None:
        self._rows = np.zeros((capacity, FEATURES + 2))
        self.seen = 0

    def offer(self, points: Points, rng: Generator) -> None:
        """Offer points; each point ever offered is in the sample with the same probability."""
        table = np.column_stack([points.features, points.epochs, points.progress])
        capacity = len(self._rows)
        free = table[: max(0, capacity - self.seen)]
        self._rows[self.seen : self.seen + len(free)] = free
        rest = table[len(free) :]
        if len(rest):
            numbers = self.seen + len(free) + np.arange(len(rest))
            places = rng.integers(0, numbers + 1)
            kept = places < capacity
            self._rows[places[kept]] = rest[kept]  # the last point at a place stays
        self.seen += len(table)

    @property
    def points(self) -> Points:
        """The points that are currently in the sample."""
        rows = self._rows[: min(self.seen, len(self._rows))]
        return Points(rows[:, :FEATURES].copy(), rows[:, -2].copy(), rows[:, -1].copy())
