"""Slow-downs of training steps by GPU type, by neighbours on the node, and by shared cores."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Literal

import numpy as np

from controlplane.prediction import FloatArray, IntArray

TYPE_TRUST: Final = 0.5  # weight of the prior of a GPU type, in samples
COLOCATION_TRUST: Final = 0.5  # weight of the prior of a neighbour, in samples
MAX_COLOCATION_LOG: Final = 2.0  # logarithm of the largest slow-down by a neighbour
ITERATIONS: Final = 4  # rounds of the fit; each fixes negative slow-downs at 0


@dataclass(frozen=True, slots=True)
class Observation:
    """A job's mean step time at one size, on one GPU type, next to a given set of neighbours."""

    size: Hashable
    gpu_type: str
    beside: tuple[Hashable, ...]  # class of each neighbour; repeated classes add up
    log_step_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class Parts:
    """log(step) = base[size] + gpu_types[gpu_type] + the sum of colocations[class of neighbour]."""

    base: Mapping[Hashable, float]
    gpu_types: Mapping[str, float]
    colocations: Mapping[Any, float]  # at least 0


def separate(
    seen: Sequence[Observation],
    gpu_types: Mapping[str, float],
    colocations: Mapping[Any, float],
    colocation_trust: float = COLOCATION_TRUST,
) -> Parts:
    """Attribute step times to sizes, GPU types and neighbours, by ridge regression.

    Slow-downs by neighbours are at least 0. The model is that of Harmony's placement in closed
    form: it has one additive term for each class of neighbours and learns the terms from reports
    (Bao et al., INFOCOM 2019, use a neural network instead).

    Args:
        gpu_types: prior of each GPU type, a logarithm.
        colocations: prior of each class of neighbours, a logarithm.
        colocation_trust: weight of each prior in `colocations`, in samples.
    """
    # An unknown is (kind, name), and the columns of the unknowns are in order of their kinds.
    parts: list[list[tuple[int, Any]]] = [
        [(0, o.size), (1, o.gpu_type), *((2, one) for one in o.beside)] for o in seen
    ]
    unknowns = sorted(dict.fromkeys(chain.from_iterable(parts)), key=itemgetter(0))
    columns = {unknown: at for at, unknown in enumerate(unknowns)}
    matrix = np.zeros((len(seen), len(columns)))  # occurrences of each unknown
    for row, some in enumerate(parts):
        for unknown in some:
            matrix[row, columns[unknown]] += 1.0
    priors: Sequence[Mapping[Any, float]] = ({}, gpu_types, colocations)
    trusts = (1e-6, TYPE_TRUST, colocation_trust)
    found = _ridge(
        matrix,
        np.array([o.log_step_s for o in seen]),
        np.array([o.weight for o in seen]),
        prior=np.array([priors[kind].get(name, 0.0) for kind, name in unknowns]),
        trust=np.array([trusts[kind] for kind, _ in unknowns]),
        signed=len({o.size for o in seen}) + len({o.gpu_type for o in seen}),
    ).tolist()
    base, types, others = (
        {name: value for (kind, name), value in zip(unknowns, found, strict=True) if kind == number}
        for number in range(3)
    )
    return Parts(base, types, {one: min(log, MAX_COLOCATION_LOG) for one, log in others.items()})


def _ridge(
    matrix: FloatArray,
    target: FloatArray,
    weight: FloatArray,
    *,
    prior: FloatArray,
    trust: FloatArray,
    signed: int,
) -> FloatArray:
    """Solve weighted least squares with priors; unknowns from index `signed` on are at least 0."""
    free = np.ones(len(prior), dtype=np.bool_)
    found = prior.copy()
    for _ in range(ITERATIONS):
        part = matrix[:, free]
        normal = part.T @ (weight[:, None] * part) + np.diag(trust[free])
        right = part.T @ (weight * target) + trust[free] * prior[free]
        found[:] = 0.0
        found[free] = np.linalg.solve(normal, right)
        below = found < 0.0
        below[:signed] = False
        if not below.any():
            break
        free &= ~below
    return np.where(np.arange(len(found)) < signed, found, np.maximum(found, 0.0))


CORES: Final = 4.0  # cores that are one unit of processor use
BYTES_PER_S: Final = 1e9  # bytes per second that are one unit of bandwidth
PRIOR_LOG_SLOWDOWN: Final = 0.15  # prior log slow-down by a unit of cores or bandwidth
MAX_LOG_SLOWDOWN: Final = 2.0  # logarithm of the largest predicted slow-down
Form = Literal["linear", "quadratic"]


def usage_features(form: Form, cores: float, bytes_per_s: float) -> tuple[float, ...]:
    """Return the neighbours' use of cores and bandwidth; quadratic: also squares and product."""
    cpu, sent = cores / CORES, bytes_per_s / BYTES_PER_S
    return (cpu, sent) if form == "linear" else (cpu, sent, cpu * cpu, sent * sent, cpu * sent)


def prior_weights(form: Form) -> FloatArray:
    """Return the prior weights, shape (features,): neighbours that use more cause longer steps."""
    many = len(usage_features(form, 0.0, 0.0))
    return np.array([PRIOR_LOG_SLOWDOWN, PRIOR_LOG_SLOWDOWN] + [0.0] * (many - 2))


def fit_usage_slowdowns(
    form: Form, sizes: Sequence[Hashable], features: FloatArray, log_steps: FloatArray, ridge: float
) -> FloatArray:
    """Return the weights, shape (features,), of log(step) = base[size] + weights . features.

    Ridge regression; every size has a separate base, which is not penalised. All sizes share the
    weights, as in the interference model of LIF (Harmony, evaluation: "task slowdown is a function
    of CPU and bandwidth usage").

    Args:
        sizes: size of each measurement, length O.
        features: shape (O, features).
        log_steps: shape (O,), logarithms of seconds.
        ridge: weight of the prior, in measurements; above 0.
    """
    believed = prior_weights(form)
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
    """Return the logarithm (0 to 2) of the slow-down that the neighbours' usage causes."""
    features = usage_features(form, cores, bytes_per_s)
    return min(MAX_LOG_SLOWDOWN, max(0.0, float(np.dot(weights, features))))


def stretch(busy: int, cores: float) -> float:
    """Return the factor by which a step is longer if `busy` workers share the `cores` of a node.

    Workers are single-threaded. Infinite `cores` mean that each worker has a separate device.
    """
    return max(1.0, busy / cores) if math.isfinite(cores) else 1.0


def stretch_alone(slots: IntArray, nodes: IntArray, cores: float) -> FloatArray:
    """Return the `stretch` of a job that is evenly spread and has no neighbours; shape (L,)."""
    if not math.isfinite(cores):
        return np.ones(len(slots))
    return np.maximum(1.0, np.ceil(slots / nodes) / cores)
