"""Convergence curves of many jobs at once (SLAQ section 2), fitted in closed form on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import partial
from itertools import combinations
from typing import Final, NamedTuple, TypeVar

import numpy as np

from controlplane.prediction import BoolArray, FloatArray, IntArray

FLOORS: Final = np.geomspace(1e-3, 30.0, 24)  # (lowest loss - d) / range of the losses
RATES: Final = np.geomspace(0.03, 300.0, 28)  # -log mu, for t from 0 to 1
BETWEEN: Final = np.geomspace(1 / 1.4, 1.4, 9)  # second pass: factors of the best rate of `RATES`
TINY: Final = 1e-12
BINOMIAL: Final = {3: (1, 3, 3, 1), 4: (1, 4, 6, 4, 1)}


class Fit(NamedTuple):
    """Coefficients and errors of one form, fitted to every job, in scaled coordinates."""

    coefficients: FloatArray  # shape (J, 4)
    error: FloatArray  # weighted sum of squared residuals of the loss, shape (J,)


def fit_sublinear(
    times: FloatArray, losses: FloatArray, weights: FloatArray, lowest: FloatArray
) -> Fit:
    """Fit 1 / (a t^2 + b t + c) + d with a, b, c at least 0 (SLAQ section 2, class I).

    The fit uses variable projection: for each d of a grid, 1 / (loss - d) is linear in a, b, c. The
    residuals of 1 / (loss - d) are weighted by (loss - d)^2, which turns them into residuals of the
    loss. Losses are scaled to start at 0, so that all moments about d are sums of positive terms.

    Args:
        times: t, shape (J, N), from 0 to 1.
        losses: shape (J, N), from 0 to 1.
        weights: weight of each report, shape (J, N); 0 if there is no report.
        lowest: smallest allowed d, shape (J,), at most 0.
    """
    gaps = np.minimum(FLOORS, np.maximum(-lowest, FLOORS[0])[:, None])  # (J, D); d = -gap
    powers_t = times[:, None, :] ** np.arange(5)[:, None]  # (J, 5, N)
    powers_l = losses[:, None, :] ** np.arange(5)[:, None] * weights[:, None, :]
    moments = powers_l @ powers_t.transpose(0, 2, 1)  # (J, m, p): sum of w loss^m t^p
    fourth = [_moments_about(moments, gaps, 4, power) for power in range(5)]
    third = [_moments_about(moments, gaps, 3, power) for power in range(3)]
    found = _non_negative(fourth, third)  # (J, D, 3): a, b, c
    inverse = np.maximum(found @ powers_t[:, 2::-1, :], TINY)
    np.reciprocal(inverse, out=inverse)
    inverse -= losses[:, None, :]
    inverse -= gaps[:, :, None]
    np.square(inverse, out=inverse)
    errors = (inverse @ weights[:, :, None])[..., 0]  # (J, D)
    best = errors.argmin(axis=1)
    rows = np.arange(len(best))
    coefficients = np.column_stack([found[rows, best], -gaps[rows, best]])
    return Fit(coefficients, errors[rows, best])


def fit_exponential(
    times: FloatArray, losses: FloatArray, weights: FloatArray, lowest: FloatArray
) -> Fit:
    """Fit A mu^t + c with A at least 0 (SLAQ section 2, class II: mu^(t - b) + c).

    For each mu of a grid, A and c have a closed form. The coefficients are A, -log mu, c, 0.
    """
    every = np.broadcast_to(RATES, (len(times), len(RATES)))
    coarse = _at_rates(times, losses, weights, lowest, every)
    return _at_rates(times, losses, weights, lowest, coarse.coefficients[:, 1, None] * BETWEEN)


def _at_rates(
    times: FloatArray,
    losses: FloatArray,
    weights: FloatArray,
    lowest: FloatArray,
    rates: FloatArray,
) -> Fit:
    """Return the fit of each job at the best of its candidate `rates`, shape (J, R)."""
    decays = np.exp(-rates[:, :, None] * times[:, None, :])  # (J, R, N)
    by_loss = weights * losses
    one, loss = weights.sum(axis=1)[:, None], by_loss.sum(axis=1)[:, None]
    square = (by_loss * losses).sum(axis=1)[:, None]
    both = np.stack([weights, by_loss], axis=2)
    decay, cross = np.moveaxis(decays @ both, 2, 0)
    decay2 = (np.square(decays) @ weights[:, :, None])[..., 0]
    determinant = np.maximum(one * decay2 - decay**2, TINY * one * decay2)
    amplitude = np.maximum((one * cross - decay * loss) / determinant, 0.0)
    limit = (loss - amplitude * decay) / one
    below = limit < lowest[:, None]
    limit = np.where(below, lowest[:, None], limit)
    to_limit = np.maximum((cross - limit * decay) / np.maximum(decay2, TINY), 0.0)
    amplitude = np.where(below, to_limit, amplitude)
    errors = (
        square
        - 2.0 * (limit * loss + amplitude * cross)
        + one * limit**2
        + 2.0 * limit * amplitude * decay
        + amplitude**2 * decay2
    )
    best = errors.argmin(axis=1)
    rows = np.arange(len(best))
    found = [amplitude[rows, best], rates[rows, best], limit[rows, best], np.zeros(len(best))]
    return Fit(np.column_stack(found), np.maximum(errors[rows, best], 0.0))


def _moments_about(moments: FloatArray, gaps: FloatArray, order: int, power: int) -> FloatArray:
    """Return the sum of w (loss + gap)^order t^power for each gap; shape (J, D)."""
    total = np.zeros_like(gaps)
    for exponent, many in enumerate(BINOMIAL[order]):  # Horner, from the highest power of the gap
        total *= gaps
        total += many * moments[:, exponent, power, None]
    return total


def _non_negative(fourth: list[FloatArray], third: list[FloatArray]) -> FloatArray:
    """Solve non-negative least squares for three unknowns by trying all active sets; (J, D, 3).

    `fourth` and `third` are the moments S0 to S4 and R0 to R2 of the normal equations, (J, D) each.
    """
    gram = [[fourth[4 - row - column] for column in range(3)] for row in range(3)]
    right = [third[2 - row] for row in range(3)]
    best = np.zeros((*right[0].shape, 3))
    gain = np.zeros(right[0].shape)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            part = [[gram[i][j] for j in chosen] for i in chosen]
            solved = _solve(part, [right[i] for i in chosen])
            explains = sum((x * right[i] for i, x in zip(chosen, solved, strict=True)), np.zeros(1))
            allowed = explains > gain
            for x in solved:
                allowed &= x >= 0.0
            gain = np.where(allowed, explains, gain)
            best[allowed] = 0.0
            for place, value in zip(chosen, solved, strict=True):
                best[..., place] = np.where(allowed, value, best[..., place])
    return best


def _solve(gram: list[list[FloatArray]], right: list[FloatArray]) -> list[FloatArray]:
    """Solve equations with one to three unknowns by Cramer's rule; nan where they are singular."""
    whole = _determinant(gram)
    diagonal = np.prod([gram[i][i] for i in range(len(gram))], axis=0)
    whole = np.where(whole > TINY * diagonal, whole, np.nan)
    replaced = (
        [[*row[:place], value, *row[place + 1 :]] for row, value in zip(gram, right, strict=True)]
        for place in range(len(gram))
    )
    return [_determinant(matrix) / whole for matrix in replaced]


def _determinant(matrix: list[list[FloatArray]]) -> FloatArray:
    if len(matrix) == 1:
        return matrix[0][0]
    first, *rest = matrix
    total = np.zeros_like(first[0])
    for place, entry in enumerate(first):
        minor = _determinant([[e for j, e in enumerate(row) if j != place] for row in rest])
        total = total + entry * minor if place % 2 == 0 else total - entry * minor
    return total


Values = TypeVar("Values", FloatArray, IntArray)

MAX_REPORTS: Final = 40  # latest reports that a curve is fitted to
DECAY: Final = 0.85  # weight of a report relative to the next one; paper: 0.8 to 0.9
MIN_REPORTS: Final = 3
MAX_LOSS: Final = 1e30  # larger losses are ignored
FLAT: Final = 1e-9  # losses with a smaller relative range are treated as constant
JOBS_PER_BATCH: Final = 64  # jobs per batch, so that their arrays stay in the cache


class Form(IntEnum):
    """Type of a job's convergence curve."""

    NONE = 0  # fewer than three finite reports
    FLAT = 1  # losses do not fall: constant, rising, or only noise
    SUBLINEAR = 2  # 1 / (a t^2 + b t + c) + d
    EXPONENTIAL = 3  # A mu^t + c: linear and superlinear convergence


@dataclass(frozen=True, slots=True)
class ConvergenceCurves:
    """Curve of each of J jobs; t is 0 at the first kept report and 1 at the last."""

    forms: IntArray  # values of `Form`, shape (J,)
    coefficients: FloatArray  # coefficients of the form, shape (J, 4)
    first: FloatArray  # position of the first report, shape (J,)
    span: FloatArray  # from the first report to the last, shape (J,)
    lowest: FloatArray  # lowest reported loss, shape (J,)
    range: FloatArray  # range of the reported losses, shape (J,)
    error: FloatArray  # weighted root mean square of the residuals, shape (J,); in units of loss

    def at(self, positions: FloatArray) -> FloatArray:
        """Return the losses at positions of shape (J,) or (J, M), on the axis of the reports.

        The loss is constant before the first report, and nan for a job without a curve.
        """
        extra = (1,) * (positions.ndim - 1)

        def each(values: Values) -> Values:
            return values.reshape(len(values), *extra)

        times = np.maximum((positions - each(self.first)) / each(self.span), 0.0)
        a, b, c, d = (each(column) for column in self.coefficients.T)
        with np.errstate(over="ignore"):
            sublinear = 1.0 / np.maximum((a * times + b) * times + c, 1e-12) + d
            exponential = a * np.exp(-b * times) + c
        forms = each(self.forms)
        scaled = np.where(forms == Form.SUBLINEAR, sublinear, exponential)
        return np.where(forms == Form.NONE, np.nan, each(self.lowest) + each(self.range) * scaled)

    @property
    def limit(self) -> FloatArray:
        """Lower bound that the loss approaches, shape (J,)."""
        sublinear = self.forms == Form.SUBLINEAR
        scaled = np.where(sublinear, self.coefficients[:, 3], self.coefficients[:, 2])
        return np.where(self.forms == Form.NONE, np.nan, self.lowest + self.range * scaled)

    def reaches(self, losses: FloatArray) -> FloatArray:
        """Return the positions, shape (J,), where the curves reach `losses`, or infinity."""
        above = (losses - self.lowest) / self.range
        a, b, c, d = self.coefficients.T
        with np.errstate(all="ignore"):
            q = 1.0 / (above - d) - c  # a t^2 + b t = q
            root = 2.0 * q / (b + np.sqrt(b * b + 4.0 * a * np.maximum(q, 0.0)))
            sublinear = np.where(above > d, np.where(q > 0.0, root, 0.0), np.inf)
            exponential = np.where(above > c, np.maximum(np.log(a / (above - c)) / b, 0.0), np.inf)
        times = np.where(self.forms == Form.SUBLINEAR, sublinear, exponential)
        falls = (self.forms == Form.SUBLINEAR) | (self.forms == Form.EXPONENTIAL)
        return np.where(falls, self.first + self.span * times, np.inf)

    def rows(self, chosen: IntArray) -> ConvergenceCurves:
        """Return the curves of the jobs at the indices `chosen`, shape (K,)."""
        return ConvergenceCurves(*(getattr(self, name)[chosen] for name in _FIELDS))

    def followed_by(self, others: ConvergenceCurves) -> ConvergenceCurves:
        """Return the curves of this object, followed by those of `others`."""
        both = ((getattr(self, name), getattr(others, name)) for name in _FIELDS)
        return ConvergenceCurves(*map(np.concatenate, both))


_FIELDS: Final = tuple(field.name for field in fields(ConvergenceCurves))


def fit_curves(
    positions: FloatArray, losses: FloatArray, *, decay: float = DECAY
) -> ConvergenceCurves:
    """Return J curves closest to the latest reports, sublinear or exponential.

    Weights fall by the factor `decay` from each report to the one before it (SLAQ section 2).
    Losses never raise an error: losses that are not finite are ignored, and `forms` shows if the
    remaining losses do not determine a curve. A single report above both its neighbours is
    lowered to the higher neighbour, which leaves falling losses unchanged. If all losses of a job
    are at least 0, its curve stays at least 0.

    Args:
        positions: positions of the reports in samples, iterations or epochs, rising; shape (J, N).
        losses: shape (J, N); nan where there is no report.
        decay: weight of a report relative to the next one, in (0, 1].
    """
    if losses.shape[1] < MIN_REPORTS:  # no job has enough reports
        pad = partial(np.pad, pad_width=((0, 0), (0, MIN_REPORTS)), constant_values=np.nan)
        positions, losses = pad(positions), pad(losses)
    curves = _fit(positions[:JOBS_PER_BATCH], losses[:JOBS_PER_BATCH], decay)
    for begin in range(JOBS_PER_BATCH, len(losses), JOBS_PER_BATCH):
        chosen = slice(begin, begin + JOBS_PER_BATCH)
        curves = curves.followed_by(_fit(positions[chosen], losses[chosen], decay))
    return curves


def job_curve(
    positions: Sequence[float], losses: Sequence[float | None], *, decay: float = DECAY
) -> ConvergenceCurves:
    """Return the curve of one job (J = 1) from all its reports; see `fit_curves`.

    Positions are rising. A loss is None if no loss was reported.
    """
    known = [(at, loss) for at, loss in zip(positions, losses, strict=True) if loss is not None]
    rows = np.array(known[-MAX_REPORTS:], dtype=float).reshape(-1, 2).T
    return fit_curves(rows[:1], rows[1:], decay=decay)


def _fit(positions: FloatArray, losses: FloatArray, decay: float) -> ConvergenceCurves:
    known = np.isfinite(losses) & np.isfinite(positions) & (np.abs(losses) < MAX_LOSS)
    calm = _without_spikes(np.where(known, losses, 0.0), known)
    first, span = _extent(positions, known)
    enough = (known.sum(axis=1) >= MIN_REPORTS) & (span > 0.0)
    known &= enough[:, None]
    first, span = np.where(enough, first, 0.0), np.where(enough, span, 1.0)
    lowest, height = (np.where(enough, values, 0.0) for values in _extent(calm, known))
    varies = height > FLAT * (np.abs(lowest) + height)
    height = np.where(varies, height, 1.0)
    younger = known[:, ::-1].cumsum(axis=1)[:, ::-1] - 1.0  # number of later reports
    weights = np.where(known, decay**younger, 0.0)
    weights[~enough] = 1.0  # avoids a division by 0
    times = np.where(known, (positions - first[:, None]) / span[:, None], 0.0)
    scaled = np.where(known, (calm - lowest[:, None]) / height[:, None], 0.0)
    least = np.where(lowest >= 0.0, -lowest / height, -np.inf)
    scaled_reports = (times, scaled, weights, least)
    sublinear, exponential = fit_sublinear(*scaled_reports), fit_exponential(*scaled_reports)
    better = sublinear.error < exponential.error
    found = np.where(better[:, None], sublinear.coefficients, exponential.coefficients)
    falls = np.where(better, (found[:, :2] > 0.0).any(axis=1), found[:, 0] > 0.0)
    forms = np.where(better, Form.SUBLINEAR, Form.EXPONENTIAL)
    forms = np.where(falls & varies, forms, Form.FLAT)
    forms = np.where(enough, forms, Form.NONE)
    total = weights.sum(axis=1)
    level = np.zeros_like(found)
    level[:, 2] = (weights * scaled).sum(axis=1) / total
    error = np.sqrt(np.where(better, sublinear.error, exponential.error) / total)
    return ConvergenceCurves(
        forms=forms,
        coefficients=np.where((forms == Form.FLAT)[:, None], level, found),
        first=first,
        span=span,
        lowest=lowest,
        range=height,
        error=np.where(enough, error * height, np.nan),
    )


def _extent(values: FloatArray, known: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return the smallest known value of each row, and the range of the known values."""
    least = np.min(values, axis=1, where=known, initial=np.inf)
    largest = np.max(values, axis=1, where=known, initial=-np.inf)
    top = np.where(known.any(axis=1), largest, least)
    return least, top - np.where(np.isinf(least), 0.0, least)


def _without_spikes(losses: FloatArray, known: BoolArray) -> FloatArray:
    """Lower each report that is above both its neighbours to the higher neighbour."""
    calm = losses.copy()
    ceiling = np.maximum(losses[:, :-2], losses[:, 2:])
    between = known[:, :-2] & known[:, 1:-1] & known[:, 2:]
    calm[:, 1:-1] = np.where(between, np.minimum(losses[:, 1:-1], ceiling), losses[:, 1:-1])
    return calm
