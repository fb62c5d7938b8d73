"""Convergence curves fitted to the losses of many jobs at once, in closed form on two grids."""

from __future__ import annotations

from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from controlplane.prediction.array_types import FloatArray

FLOORS: Final = np.geomspace(1e-3, 30.0, 24)  # d below the lowest loss, in ranges of the losses
RATES: Final = np.geomspace(0.03, 300.0, 28)  # -log mu, per span of the reports
BETWEEN: Final = np.geomspace(1 / 1.4, 1.4, 9)  # times the best of these, in a second look
TINY: Final = 1e-12
BINOMIAL: Final = {3: (1, 3, 3, 1), 4: (1, 4, 6, 4, 1)}


class Fit(NamedTuple):
    """One form, fitted to every job, in the scaled coordinates of its reports."""

    coefficients: FloatArray  # shape (J, 4)
    error: FloatArray  # weighted sum of squared residuals of the loss, shape (J,)


def fit_sublinear(
    times: FloatArray, losses: FloatArray, weights: FloatArray, lowest: FloatArray
) -> Fit:
    """The closest 1 / (a t^2 + b t + c) + d with a, b, c at least 0 (SLAQ section 2, class I).

    By variable projection: for each d of a grid, 1 / (loss - d) is linear in a, b, c. Residuals
    there are weighted by (loss - d)^2, so that they count as they do in the loss itself. Losses are
    scaled to begin at 0, so that all moments about d are sums of positive terms.

    Args:
        times: t, shape (J, N), from 0 to 1.
        losses: shape (J, N), from 0 to 1.
        weights: of each report, shape (J, N); 0: there is none.
        lowest: that d may be, shape (J,), at most 0.

    Returns:
        Coefficients a, b, c, d.
    """
    gaps = np.minimum(FLOORS, np.maximum(-lowest, FLOORS[0])[:, None])  # (J, D); d = -gap
    powers_t = times[:, None, :] ** np.arange(5)[:, None]  # (J, 5, N)
    powers_l = losses[:, None, :] ** np.arange(5)[:, None] * weights[:, None, :]
    moments = powers_l @ powers_t.transpose(0, 2, 1)  # (J, m, p): sum of w loss^m t^p
    fourth = [_about(moments, gaps, 4, power) for power in range(5)]
    third = [_about(moments, gaps, 3, power) for power in range(3)]
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
    """The closest A mu^t + c with A at least 0 (SLAQ section 2, class II; there mu^(t - b) + c).

    For each mu of a grid, A and c have a closed form.

    Args:
        times: t, shape (J, N), from 0 to 1.
        losses: shape (J, N), from 0 to 1.
        weights: of each report, shape (J, N); 0: there is none.
        lowest: that c may be, shape (J,), at most 0.

    Returns:
        Coefficients A, -log mu, c, 0.
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
    """The best of some rates for each job, shape (J, R)."""
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


def _about(moments: FloatArray, gaps: FloatArray, order: int, power: int) -> FloatArray:
    """Sum of w (loss + gap)^order t^power for each gap; shape (J, D)."""
    total = np.zeros_like(gaps)
    for exponent, many in enumerate(BINOMIAL[order]):  # Horner, from the highest power of the gap
        total *= gaps
        total += many * moments[:, exponent, power, None]
    return total


def _non_negative(fourth: list[FloatArray], third: list[FloatArray]) -> FloatArray:
    """Non-negative least squares of three unknowns: the best of all its active sets.

    Args:
        fourth: moments S0 to S4 of the normal equations, each of shape (J, D).
        third: their right sides R0 to R2.

    Returns:
        a, b, c, shape (J, D, 3).
    """
    gram = [[fourth[4 - row - column] for column in range(3)] for row in range(3)]
    right = [third[2 - row] for row in range(3)]
    best = np.zeros((*right[0].shape, 3))
    gain = np.zeros(right[0].shape)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            solved = _solve(
                [[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
            )
            explains = sum((x * right[i] for i, x in zip(chosen, solved, strict=True)), np.zeros(1))
            allowed = explains > gain
            for x in solved:
                allowed &= x >= 0.0
            gain = np.where(allowed, explains, gain)
            for place in range(3):
                value = solved[chosen.index(place)] if place in chosen else 0.0
                best[..., place] = np.where(allowed, value, best[..., place])
    return best


def _solve(gram: list[list[FloatArray]], right: list[FloatArray]) -> list[FloatArray]:
    """Cramer's rule for one to three unknowns; not a number where the equations tell nothing."""
    whole = _determinant(gram)
    diagonal = np.prod([gram[i][i] for i in range(len(gram))], axis=0)
    whole = np.where(whole > TINY * diagonal, whole, np.nan)
    return [
        _determinant(
            [
                [right[i] if j == place else entry for j, entry in enumerate(row)]
                for i, row in enumerate(gram)
            ]
        )
        / whole
        for place in range(len(gram))
    ]


def _determinant(matrix: list[list[FloatArray]]) -> FloatArray:
    if len(matrix) == 1:
        return matrix[0][0]
    first, *rest = matrix
    total = np.zeros_like(first[0])
    for place, entry in enumerate(first):
        minor = _determinant([[e for j, e in enumerate(row) if j != place] for row in rest])
        total = total + entry * minor if place % 2 == 0 else total - entry * minor
    return total
