"""How much a job takes in all, as a distribution that knows how much it has done already.

Job lengths are positive, differ by orders of magnitude between families and by a share within one:
so logarithms of totals are what is averaged and spread here. Relatives that finished give one
log-normal bump each (a kernel estimate), and anything else that tells of the job's own end, such
as what its user expects or where its metric is heading, is evidence that is multiplied into them.

How much work a job has left, as its relatives suggest it.

How the training loss will go on falling: Optimus' convergence curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls
from scipy.special import log_ndtr, ndtr

from controlplane.prediction import FloatArray

LEAST_SPREAD: Final = 0.01  # of a logarithm: no length is known better than to a per cent
LEAST_TAIL: Final = 1e-12  # of the probability that a job goes on, below which all say it is over
LEAST: Final = 1e-9  # samples: keeps a logarithm finite
STEPS: Final = 60  # of a bisection, which leaves 2^-60 of the interval
FURTHEST: Final = 12.0  # standard deviations beyond the furthest bump, where a quantile may be


@dataclass(frozen=True, slots=True)
class Evidence:
    """The total of one job, as something tells it: log-normal."""

    log_total: float  # natural logarithm of samples
    spread: float  # standard deviation of that


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Totals of a job, as a mixture of log-normal bumps."""

    log_totals: FloatArray  # centres, natural logarithms of samples, shape (K,)
    weights: FloatArray  # shape (K,), above 0; their sum is 1
    spread: float  # standard deviation of each, in the logarithm

    def given(self, evidence: Evidence) -> LengthDistribution:
        """What remains likely in the light of `evidence`: the product, of the same form.

        Args:
            evidence: another judgement of the same job, taken to be independent.
        """
        own, other = self.spread**2, evidence.spread**2
        both = own + other
        apart = self.log_totals - evidence.log_total
        logs = np.log(self.weights) - 0.5 * apart**2 / both
        weights = np.exp(logs - logs.max())
        kept = weights > LEAST_TAIL
        centres = (self.log_totals * other + evidence.log_total * own) / both
        spread = max(LEAST_SPREAD, math.sqrt(own * other / both))
        return LengthDistribution(centres[kept], weights[kept] / weights[kept].sum(), spread)

    def mean_left(self, done: float) -> float:
        """The mean residual life: how much is to come on average, for who has done so much.

        Args:
            done: samples; 0: it has not begun.

        Returns:
            Samples, above 0. Where a job has outlived all that was thought possible, a share of
            what it did: that of the spread.
        """
        if done <= 0.0:
            means = np.exp(self.log_totals + 0.5 * self.spread**2)
            return float(self.weights @ means)
        total = math.exp(min(self._log_mean(done, 1.0), math.log(done) + FURTHEST))
        return max(total - done, LEAST)

    def _log_mean(self, done: float, power: float) -> float:
        """The logarithm of E[T^power; T > done] / P(T > done), bump by bump, without underflow."""
        above = (self.log_totals - math.log(done)) / self.spread
        logs = np.log(self.weights)
        moments = power * self.log_totals + 0.5 * (power * self.spread) ** 2
        alive = _log_sum(logs + log_ndtr(above))
        return _log_sum(logs + moments + log_ndtr(above + power * self.spread)) - alive

    def quantiles_left(self, done: float, shares: Sequence[float]) -> list[float]:
        """How much is to come with each of these probabilities at most.

        Args:
            done: samples.
            shares: probabilities, in (0, 1).

        Returns:
            Samples, one for each of `shares`.
        """
        at = math.log(max(done, LEAST))
        alive = float(self.weights @ ndtr((self.log_totals - at) / self.spread))
        if done > 0.0 and alive < LEAST_TAIL:  # beyond all: from there on, one spread further
            wide = self.spread
            return [done * (math.exp(-wide * math.log1p(-share)) - 1.0) for share in shares]
        low = at if done > 0.0 else float(self.log_totals.min()) - FURTHEST * self.spread
        high = max(low, float(self.log_totals.max())) + FURTHEST * self.spread
        over = (1.0 - np.asarray(shares)) * (alive if done > 0.0 else 1.0)
        totals = np.exp(self._where_survival_is(over, low, high))
        return [max(total - done, 0.0) for total in totals.tolist()]

    def _where_survival_is(self, wanted: FloatArray, low: float, high: float) -> FloatArray:
        """Logarithms of totals that are exceeded with these probabilities, shape of `wanted`."""
        lows, highs = np.full(len(wanted), low), np.full(len(wanted), high)
        for _ in range(STEPS):
            middle = 0.5 * (lows + highs)
            over = ndtr((self.log_totals - middle[:, None]) / self.spread) @ self.weights
            lows, highs = (
                np.where(over > wanted, middle, lows),
                np.where(over > wanted, highs, middle),
            )
        return highs


def _log_sum(values: FloatArray) -> float:
    most = float(values.max())
    return most + math.log(float(np.exp(values - most).sum()))


def one_length(evidence: Evidence) -> LengthDistribution:
    """A distribution of one bump.

    Args:
        evidence: all that is known.
    """
    return LengthDistribution(
        np.array([evidence.log_total]), np.ones(1), max(evidence.spread, LEAST_SPREAD)
    )


def of_relatives(
    finished: Sequence[float], outlived: Sequence[float], spread: float
) -> LengthDistribution:
    """Totals as relatives suggest them: a bump where each one finished.

    Relatives that were given up, or that are still at work, did not finish by where they are:
    those that finished later stand for them, too (Kaplan and Meier 1958), so that the first to
    finish, which are the short ones, do not speak for all.

    Args:
        finished: totals of those that finished, samples, at least one.
        outlived: what those that were given up, or still run, had done; samples.
        spread: of the logarithm of totals within a family; bumps are narrower the more there are
            of them (Silverman 1986: by the fifth root of their number), and wider while few of
            them have to stand for the middle of all, too.
    """
    sane = np.maximum(np.asarray(finished, dtype=np.float64), LEAST)
    totals, counts = np.unique(sane, return_counts=True)
    gone = np.sort(np.asarray(outlived, dtype=np.float64))
    many = len(finished) + len(gone)
    survived, weights = 1.0, np.zeros(len(totals))
    before = 0
    for place, (total, count) in enumerate(zip(totals.tolist(), counts.tolist(), strict=True)):
        at_risk = many - before - int(np.searchsorted(gone, total, side="left"))
        weights[place] = survived * count / at_risk
        survived -= weights[place]
        before += count
    weights[-1] += max(survived, 0.0)  # of those that outlived all: as the longest that finished
    number = len(finished)
    width = max(LEAST_SPREAD, spread * math.sqrt(1.0 + 1.0 / number) * number**-0.2)
    return LengthDistribution(np.log(totals), weights / weights.sum(), width)


def pooled_spread(families: Sequence[Sequence[float]], prior: float, trust: float) -> float:
    """How much totals differ within a family, as all families together say.

    Args:
        families: totals of the finished jobs of each, samples, above 0.
        prior: standard deviation of the logarithm, before there are any.
        trust: degrees of freedom that the prior counts for, above 0.
    """
    squares, freedom = trust * prior**2, trust
    for totals in families:
        if len(totals) > 1:
            logs = np.log(np.maximum(np.asarray(totals, dtype=np.float64), LEAST))
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(totals) - 1
    return max(LEAST_SPREAD, math.sqrt(squares / freedom))


def remaining_samples(
    done: float, stated: float | None, finished: Sequence[float], largest: float
) -> float:
    """Samples that a job will still process.

    Mean residual life of finished relatives; before one has finished, as much as was done already
    or what the furthest relative did. In a live cluster a stated number of epochs or samples *is*
    when a job ends, so nothing is averaged into it.

    Args:
        done: Y_processed, samples.
        stated: total that the user stated, samples; None if it depends on a metric.
        finished: totals of relatives that finished, samples.
        largest: furthest that any relative has come, samples.
    """
    if stated is not None:
        return max(0.0, stated - done)
    longer = [total for total in finished if total > done]
    if longer:
        return sum(longer) / len(longer) - done
    return max(2.0 * done, largest) - done


FLOORS: Final = 40  # that are tried for the loss that is never gone below
LEAST_POINTS: Final = 3  # the curve has three coefficients
MAX_LOSS_EPOCHS: Final = 10_000  # epochs that are looked at for convergence


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
        low, high = 0, MAX_LOSS_EPOCHS  # the share falls from epoch to epoch
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
