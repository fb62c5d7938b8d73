"""What a job's speed owes to its size, to the type of its GPUs, and to who shares its nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from controlplane.prediction.array_types import FloatArray

TYPE_TRUST: Final = 0.5  # weight of the prior about a type, in samples
COLOCATION_TRUST: Final = 0.5  # the same about a neighbour
MOST_SLOWDOWN: Final = 2.0  # logarithm of the largest slow-down that is believed
ROUNDS: Final = 4  # in which slow-downs below zero are taken out


@dataclass(frozen=True, slots=True)
class Observation:
    """The mean time of a step at one size, on one type of GPU, beside some neighbours."""

    size: Hashable
    gpu_type: str
    beside: tuple[Hashable, ...]  # classes of the neighbours that count, each of which adds
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
    """Tell apart what makes steps long, by ridge regression; slow-downs are not negative.

    The model of Harmony's placement in closed form: one additive term for each pair of a job and
    a class of neighbours, learnt from what is reported (Bao et al., INFOCOM 2019, learn it with a
    network).

    Args:
        gpu_types: what is believed of each GPU type, logarithms.
        colocations: what is believed of each class of neighbours.
        colocation_trust: weight of that belief, in samples.
    """
    sizes = {size: n for n, size in enumerate(dict.fromkeys(o.size for o in seen))}
    types = {
        gpu_type: n + len(sizes)
        for n, gpu_type in enumerate(dict.fromkeys(o.gpu_type for o in seen))
    }
    others = dict.fromkeys(one for o in seen for one in o.beside)
    classes = {one: n + len(sizes) + len(types) for n, one in enumerate(others)}
    prior = np.zeros(len(sizes) + len(types) + len(classes))
    trust = np.full(len(prior), 1e-6)
    for gpu_type, at in types.items():
        prior[at], trust[at] = gpu_types.get(gpu_type, 0.0), TYPE_TRUST
    for one, at in classes.items():
        prior[at], trust[at] = colocations.get(one, 0.0), colocation_trust
    matrix = _design(seen, [sizes, types, classes])
    weight = np.array([o.weight for o in seen])
    target = np.array([o.log_step_s for o in seen])
    signed = len(sizes) + len(types)
    found = _ridge(matrix, target, weight, prior=prior, trust=trust, signed=signed)
    return Parts(
        base={size: float(found[at]) for size, at in sizes.items()},
        gpu_types={gpu_type: float(found[at]) for gpu_type, at in types.items()},
        colocations={one: min(float(found[at]), MOST_SLOWDOWN) for one, at in classes.items()},
    )


def _design(seen: Sequence[Observation], columns: Sequence[Mapping[Any, int]]) -> FloatArray:
    """Counts of the size, the type and the neighbours of each observation, (O, unknowns)."""
    matrix = np.zeros((len(seen), sum(map(len, columns))))
    for row, one in enumerate(seen):
        parts = ((one.size,), (one.gpu_type,), one.beside)
        for found, column in zip(parts, columns, strict=True):
            for part in found:
                matrix[row, column[part]] += 1.0
    return matrix


def _ridge(
    matrix: FloatArray,
    target: FloatArray,
    weight: FloatArray,
    *,
    prior: FloatArray,
    trust: FloatArray,
    signed: int,
) -> FloatArray:
    """Weighted least squares towards priors; unknowns from `signed` on are at least 0."""
    free = np.ones(len(prior), dtype=np.bool_)
    found = prior.copy()
    for _ in range(ROUNDS):
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
