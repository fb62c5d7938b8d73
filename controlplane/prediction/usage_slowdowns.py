"""How far jobs are slowed down by what their neighbours use of a node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Literal

import numpy as np

from controlplane.prediction.array_types import FloatArray

CORES: Final = 4.0  # one unit of processor use
BYTES_PER_S: Final = 1e9  # one unit of bandwidth
BELIEVED: Final = 0.15  # logarithm of the slow-down by one unit of either, beforehand
MOST: Final = 2.0  # logarithm of the largest slow-down that is predicted
Form = Literal["linear", "quadratic"]


def usage_features(form: Form, cores: float, bytes_per_s: float) -> tuple[float, ...]:
    """What a slow-down is a linear function of.

    Args:
        form: linear: both uses; quadratic: their squares and their product, too.
        cores: that neighbours use.
        bytes_per_s: that neighbours send.
    """
    cpu, sent = cores / CORES, bytes_per_s / BYTES_PER_S
    return (cpu, sent) if form == "linear" else (cpu, sent, cpu * cpu, sent * sent, cpu * sent)


def believed_weights(form: Form) -> FloatArray:
    """Weights before anything was measured: neighbours that use more cost more.

    Returns:
        Shape (features,).
    """
    many = len(usage_features(form, 0.0, 0.0))
    return np.array([BELIEVED, BELIEVED] + [0.0] * (many - 2))


def fit_usage_slowdowns(
    form: Form, sizes: Sequence[Hashable], features: FloatArray, log_steps: FloatArray, ridge: float
) -> FloatArray:
    """Weights of log(step) = base[size] + weights . features, by ridge regression.

    Every size of a family has a base of its own, which takes no part in the ridge; the weights are
    the same for all, as in the interference model of LIF (Harmony, evaluation: "task slowdown is a
    function of CPU and bandwidth usage").

    Args:
        sizes: what each measurement was taken of, length O.
        features: shape (O, features).
        log_steps: shape (O,), logarithms of seconds.
        ridge: weight of what is believed beforehand, in measurements; above 0.

    Returns:
        Shape (features,).
    """
    believed = believed_weights(form)
    if not len(sizes):
        return believed
    numbers = {size: number for number, size in enumerate(dict.fromkeys(sizes))}
    group = np.array([numbers[size] for size in sizes])
    counts = np.bincount(group)[:, None]
    table = np.column_stack([features, log_steps])
    means = np.stack([np.bincount(group, column) for column in table.T], axis=1) / counts
    centred = table - means[group]
    x, y = centred[:, :-1], centred[:, -1]
    normal = x.T @ x + ridge * np.eye(x.shape[1])
    found: FloatArray = np.linalg.solve(normal, x.T @ y + ridge * believed)
    return found


def predicted_slowdown(form: Form, weights: FloatArray, cores: float, bytes_per_s: float) -> float:
    """Logarithm of the factor on a step, from 0 to `MOST`.

    Args:
        cores: that neighbours use.
        bytes_per_s: that neighbours send.
    """
    features = usage_features(form, cores, bytes_per_s)
    return min(MOST, max(0.0, float(np.dot(weights, features))))
