"""What a job's speed owes to its size, to the type of its GPUs, and to who shares its nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TYPE_TRUST: Final = 0.5  # weight of the belief about a type, in samples
COMPANY_TRUST: Final = 0.5  # the same about a neighbour
MOST_COMPANY: Final = 2.0  # logarithm of the largest slow-down that is believed
ROUNDS: Final = 4  # in which slow-downs below zero are taken out


@dataclass(frozen=True, slots=True)
class Observation:
    """The mean time of a step at one size, on one type of GPU, beside one neighbour."""

    size: Hashable
    kind: str  # of GPU
    company: Hashable  # class of the worst neighbour; None: alone
    log_step_s: float
    weight: float


@dataclass(frozen=True, slots=True)
class Parts:
    """log(step) = base[size] + kinds[kind] + company[class of the worst neighbour]."""

    base: Mapping[Hashable, float]
    kinds: Mapping[str, float]
    company: Mapping[Any, float]  # at least 0


def separate(
    seen: Sequence[Observation],
    kinds: Mapping[str, float],
    company: Mapping[Any, float],
) -> Parts:
    """Tell apart what makes steps long, by ridge regression; slow-downs are not negative.

    The model of Harmony's placement in closed form: one additive term for each pair of a job and
    a class of neighbours, learnt from what is reported (Bao et al., INFOCOM 2019, learn it with a
    network).

    Args:
        seen: of one family.
        kinds: what is believed of each GPU type, logarithms.
        company: what is believed of each class of neighbours.
    """
    sizes = {size: n for n, size in enumerate(dict.fromkeys(o.size for o in seen))}
    types = {kind: n + len(sizes) for n, kind in enumerate(dict.fromkeys(o.kind for o in seen))}
    others = dict.fromkeys(o.company for o in seen if o.company is not None)
    classes = {one: n + len(sizes) + len(types) for n, one in enumerate(others)}
    believed = np.zeros(len(sizes) + len(types) + len(classes))
    trust = np.full(len(believed), 1e-6)
    for kind, at in types.items():
        believed[at], trust[at] = kinds.get(kind, 0.0), TYPE_TRUST
    for one, at in classes.items():
        believed[at], trust[at] = company.get(one, 0.0), COMPANY_TRUST
    matrix = np.zeros((len(seen), len(believed)))
    rows = np.arange(len(seen))
    matrix[rows, [sizes[o.size] for o in seen]] = 1.0
    matrix[rows, [types[o.kind] for o in seen]] = 1.0
    for row, one in enumerate(seen):
        if one.company is not None:
            matrix[row, classes[one.company]] = 1.0
    weight = np.array([o.weight for o in seen])
    target = np.array([o.log_step_s for o in seen])
    signed = len(sizes) + len(types)
    found = _ridge(matrix, target, weight, believed=believed, trust=trust, signed=signed)
    return Parts(
        base={size: float(found[at]) for size, at in sizes.items()},
        kinds={kind: float(found[at]) for kind, at in types.items()},
        company={one: min(float(found[at]), MOST_COMPANY) for one, at in classes.items()},
    )


def _ridge(
    matrix: FloatArray,
    target: FloatArray,
    weight: FloatArray,
    *,
    believed: FloatArray,
    trust: FloatArray,
    signed: int,
) -> FloatArray:
    """Weighted least squares towards beliefs; unknowns from `signed` on are at least 0."""
    free = np.ones(len(believed), dtype=np.bool_)
    found = believed.copy()
    for _ in range(ROUNDS):
        part = matrix[:, free]
        normal = part.T @ (weight[:, None] * part) + np.diag(trust[free])
        right = part.T @ (weight * target) + trust[free] * believed[free]
        found[:] = 0.0
        found[free] = np.linalg.solve(normal, right)
        below = found < 0.0
        below[:signed] = False
        if not below.any():
            break
        free &= ~below
    return np.where(np.arange(len(found)) < signed, found, np.maximum(found, 0.0))
