"""Losses with their gradients, and plain descents on them, one loss for each iteration.

Libraries tell the loss of a descent seldom, and only some iterations of it; these tell each one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

FloatArray = NDArray[np.float64]
ValueAndGradient = Callable[[FloatArray], tuple[float, FloatArray]]


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss over weights that begin at zero."""

    value_and_gradient: ValueAndGradient  # of weights of `shape`
    shape: tuple[int, int]  # features, outputs
    smoothness: float  # largest curvature; of a hinge: none, 1


def least_squares(features: FloatArray, targets: FloatArray, ridge: float = 0.0) -> Objective:
    """Mean squared error over two, and a ridge.

    Args:
        features: shape (n, d).
        targets: shape (n, k).
        ridge: weight of the squared norm over two.
    """
    count = len(features)

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        error = features @ weights - targets
        value = 0.5 * float(np.square(error).sum()) / count
        gradient = features.T @ error / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    shape = (features.shape[1], targets.shape[1])
    return Objective(value_and_gradient, shape, _curvature(features) + ridge)


def softmax(features: FloatArray, labels: FloatArray, ridge: float = 0.0) -> Objective:
    """Mean cross-entropy of a multinomial logistic regression, and a ridge.

    Args:
        features: shape (n, d).
        labels: one-hot, shape (n, k).
        ridge: weight of the squared norm over two.
    """
    count = len(features)

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        scores = features @ weights
        scores -= scores.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        value = -float(np.sum(labels * (scores - log_total))) / count
        gradient = features.T @ (np.exp(scores - log_total) - labels) / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    shape = (features.shape[1], labels.shape[1])
    return Objective(value_and_gradient, shape, 0.5 * _curvature(features) + ridge)


def hinge(features: FloatArray, labels: FloatArray, ridge: float = 0.0) -> Objective:
    """Mean hinge loss of linear machines, one against the rest, and a ridge; a subgradient.

    Args:
        features: shape (n, d).
        labels: one-hot, shape (n, k).
        ridge: weight of the squared norm over two.
    """
    count, signs = len(features), 2.0 * labels - 1.0

    def value_and_gradient(weights: FloatArray) -> tuple[float, FloatArray]:
        short = 1.0 - signs * (features @ weights)
        value = float(np.maximum(short, 0.0).sum()) / count
        gradient = -features.T @ (signs * (short > 0.0)) / count + ridge * weights
        return value + 0.5 * ridge * float(np.square(weights).sum()), gradient

    return Objective(value_and_gradient, (features.shape[1], labels.shape[1]), 1.0)


def descend(
    objective: Objective, iterations: int, step: float, decay: Literal["none", "root"] = "none"
) -> list[float]:
    """Losses of a gradient descent on all data, from weights of zero.

    Args:
        objective: to lower.
        iterations: how many.
        step: in units of one over its smoothness.
        decay: of the step: none, or by the root of the iteration, as Spark's MLlib has it.

    Returns:
        Before the first iteration, then after each one.
    """
    weights = np.zeros(objective.shape)
    losses = []
    for iteration in range(1, iterations + 2):
        value, gradient = objective.value_and_gradient(weights)
        losses.append(value)
        shrink = np.sqrt(iteration) if decay == "root" else 1.0
        weights = weights - step / objective.smoothness / shrink * gradient
    return losses


def minimise(objective: Objective, iterations: int) -> list[float]:
    """Losses of L-BFGS from weights of zero, until it has converged.

    Args:
        objective: to lower.
        iterations: at most.

    Returns:
        Before the first iteration, then after each one.
    """

    def flat(weights: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = objective.value_and_gradient(weights.reshape(objective.shape))
        return value, gradient.ravel()

    start = np.zeros(int(np.prod(objective.shape)))
    losses = [flat(start)[0]]
    limits = {"maxiter": iterations, "ftol": 1e-9, "gtol": 1e-6}
    minimize(
        flat,
        start,
        jac=True,
        method="L-BFGS-B",
        options=limits,
        callback=lambda weights: losses.append(flat(weights)[0]),
    )
    return losses


def _curvature(features: FloatArray) -> float:
    """Largest eigenvalue of the mean of x x'."""
    return float(np.linalg.norm(features, 2) ** 2) / len(features)
