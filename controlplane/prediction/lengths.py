"""Lengths of jobs: total work as a distribution, remaining samples, and Optimus' loss curve.

Lengths differ by orders of magnitude between families and by a percentage within a family, so
averages and spreads use logarithms of totals. Each finished job of a family adds one log-normal
component (a kernel estimate). Other knowledge about the end of a job is evidence that multiplies
the components.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls
from scipy.special import log_ndtr, ndtr

from controlplane.prediction import FloatArray

MIN_SPREAD: Final = 0.01  # of a log total: no length is known better than to 1%
MIN_TAIL: Final = 1e-12  # smaller survival probabilities count as outliving all components
MIN_SAMPLES: Final = 1e-9  # samples; keeps a logarithm finite
BISECTION_STEPS: Final = 60  # they shrink the interval to 2^-60 of its length
MAX_DEVIATIONS: Final = 12.0  # search range beyond the outer components, standard deviations


@dataclass(frozen=True, slots=True)
class Evidence:
    """Log-normal estimate of one job's total work."""

    log_total: float  # natural logarithm of samples
    spread: float  # standard deviation of `log_total`


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Distribution of a job's total work, as a mixture of log-normal components."""

    log_totals: FloatArray  # centres, natural logarithms of samples, shape (K,)
    weights: FloatArray  # shape (K,), above 0; their sum is 1
    spread: float  # standard deviation of each component, in the logarithm

    def given(self, evidence: Evidence) -> LengthDistribution:
        """Return the product of the distribution and independent evidence about the same job."""
        own, other = self.spread**2, evidence.spread**2
        both = own + other
        apart = self.log_totals - evidence.log_total
        logs = np.log(self.weights) - 0.5 * apart**2 / both
        weights = np.exp(logs - logs.max())
        kept = weights > MIN_TAIL
        centres = (self.log_totals * other + evidence.log_total * own) / both
        spread = max(MIN_SPREAD, math.sqrt(own * other / both))
        return LengthDistribution(centres[kept], weights[kept] / weights[kept].sum(), spread)

    def mean_left(self, done: float) -> float:
        """Return the mean residual life: the expected samples that remain after `done`, above 0.

        If the job outlived all plausible totals, the result is a share of `done` set by the spread.
        """
        if done <= 0.0:
            means = np.exp(self.log_totals + 0.5 * self.spread**2)
            return float(self.weights @ means)
        # log(E[T; T > done] / P(T > done)), without underflow in any component
        above = (self.log_totals - math.log(done)) / self.spread
        logs = np.log(self.weights)
        means = self.log_totals + 0.5 * self.spread**2
        alive = _log_sum(logs + log_ndtr(above))
        log_mean = _log_sum(logs + means + log_ndtr(above + self.spread)) - alive
        total = math.exp(min(log_mean, math.log(done) + MAX_DEVIATIONS))
        return max(total - done, MIN_SAMPLES)

    def quantiles_left(self, done: float, shares: Sequence[float]) -> list[float]:
        """Return quantiles of the samples that remain after `done`; `shares` are in (0, 1)."""
        at = math.log(max(done, MIN_SAMPLES))
        alive = float(self.weights @ ndtr((self.log_totals - at) / self.spread))
        if done > 0.0 and alive < MIN_TAIL:  # outlived all components: use an exponential tail
            wide = self.spread
            return [done * (math.exp(-wide * math.log1p(-share)) - 1.0) for share in shares]
        low = at if done > 0.0 else float(self.log_totals.min()) - MAX_DEVIATIONS * self.spread
        high = max(low, float(self.log_totals.max())) + MAX_DEVIATIONS * self.spread
        over = (1.0 - np.asarray(shares)) * (alive if done > 0.0 else 1.0)
        totals = np.exp(self._where_survival_is(over, low, high))
        return [max(total - done, 0.0) for total in totals.tolist()]

    def _where_survival_is(self, wanted: FloatArray, low: float, high: float) -> FloatArray:
        """Return the logarithms of the totals that are exceeded with probabilities `wanted`."""
        lows, highs = np.full(len(wanted), low), np.full(len(wanted), high)
        for _ in range(BISECTION_STEPS):
            middle = 0.5 * (lows + highs)
            over = ndtr((self.log_totals - middle[:, None]) / self.spread) @ self.weights
            lows = np.where(over > wanted, middle, lows)
            highs = np.where(over > wanted, highs, middle)
        return highs


def _log_sum(values: FloatArray) -> float:
    most = float(values.max())
    return most + math.log(float(np.exp(values - most).sum()))


def one_length(evidence: Evidence) -> LengthDistribution:
    """Return a distribution with one component, the evidence."""
    centre = np.array([evidence.log_total])
    return LengthDistribution(centre, np.ones(1), max(evidence.spread, MIN_SPREAD))


def of_relatives(
    finished: Sequence[float], outlived: Sequence[float], spread: float
) -> LengthDistribution:
    """Return the distribution of totals in a family, with one component per finished job.

    Jobs that were given up or still run are censored: their weight goes to the jobs that finished
    with larger totals (Kaplan and Meier 1958). Otherwise the first jobs to finish, which are the
    short ones, would dominate. Many components are narrower than `spread` (Silverman 1986: by the
    fifth root of their number). Few components are wider, because they also represent the lengths
    between them.

    Args:
        finished: totals of finished jobs, samples; at least one.
        outlived: samples done by jobs that were given up or still run.
        spread: standard deviation of log totals within a family.
    """
    valid = np.maximum(np.asarray(finished, dtype=np.float64), MIN_SAMPLES)
    totals, counts = np.unique(valid, return_counts=True)
    gone = np.sort(np.asarray(outlived, dtype=np.float64))
    many = len(finished) + len(gone)
    survived, weights = 1.0, np.zeros(len(totals))
    before = 0
    for place, (total, count) in enumerate(zip(totals.tolist(), counts.tolist(), strict=True)):
        at_risk = many - before - int(np.searchsorted(gone, total, side="left"))
        weights[place] = survived * count / at_risk
        survived -= weights[place]
        before += count
    weights[-1] += max(survived, 0.0)  # the longest total gets the weight of jobs that outlived it
    number = len(finished)
    width = max(MIN_SPREAD, spread * math.sqrt(1.0 + 1.0 / number) * number**-0.2)
    return LengthDistribution(np.log(totals), weights / weights.sum(), width)


def pooled_spread(families: Sequence[Sequence[float]], prior: float, trust: float) -> float:
    """Return the standard deviation of log totals within a family, pooled over all families.

    `families` has the totals of each family's finished jobs, samples above 0. `prior` is assumed
    before any job has finished; `trust`, above 0, is its number of degrees of freedom.
    """
    squares, freedom = trust * prior**2, trust
    for totals in families:
        if len(totals) > 1:
            logs = np.log(np.maximum(np.asarray(totals, dtype=np.float64), MIN_SAMPLES))
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(totals) - 1
    return max(MIN_SPREAD, math.sqrt(squares / freedom))


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
