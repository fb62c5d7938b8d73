"""A speed model in closed form, where workers tell how long they wait for reductions.

Computing and network are fitted each to its own times. What a worker waits for is not the network
but what is left of it beside computing; how much was hidden depends on the overlap g. So the
network is solved for at each g of a grid, and the g that explains whole passes best is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from controlplane.prediction.array_types import BoolArray, FloatArray
from controlplane.prediction.speed_model import FIXED_SHARE, Sample, SpeedModel
from controlplane.prediction.throughput_fit import (
    TRUST,
    USUAL_OVERLAP,
    place_of,
)

FAR_TIMES: Final = 1.1  # the network within a node, across nodes, until seen: so that jobs try
FURTHER_SHARE: Final = 0.01  # of the cost of two slots that each further one adds, until seen
FIXED_TRUST: Final = 0.1  # weight of the prior in `FIXED_SHARE`, in samples
HOP_TRUST: Final = 0.04  # of that in `FURTHER_SHARE`; decides only until two sizes were seen
LEAST_COMPUTE: Final = 0.01  # share of a pass: nobody waits all the time
LEAST_WAIT: Final = 1e-3  # share of a pass: a reduction that is hidden is not free
OVERLAPS: Final = np.array([1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.2, 4.5, 7.0, 10.0])
OVERLAP_COST: Final = (
    TRUST[4] * (np.array([place_of(g) for g in OVERLAPS]) - place_of(USUAL_OVERLAP))
) ** 2


def can_separate(samples: Sequence[Sample]) -> bool:
    """Whether every measurement on several slots tells what of it was a reduction."""
    return all(sample.sync_s is not None for sample in samples if sample.slots > 1)


def separated(samples: Sequence[Sample]) -> SpeedModel:
    """Computing and network each by non-negative least squares of relative errors.

    Args:
        samples: of one family, some of them of several slots, and these with `sync_s`.

    Returns:
        Without corrections.
    """
    steps = _Steps.of(samples)
    compute = computing(steps.compute_s, steps.local, steps.weight)
    reduced = _Reduced(steps, compute[0] + compute[1] * steps.local)
    several = steps.slots > 1
    near = reduced.network(several & (steps.nodes == 1))
    far = reduced.network(several & (steps.nodes > 1))
    if far is None and near is not None:
        far = FAR_TIMES * near
    elif near is None and far is not None:
        near = far / FAR_TIMES
    elif near is None or far is None:
        raise ValueError("no sample is of several slots")
    best = reduced.best(near, far)
    return SpeedModel(
        compute=compute,
        near=(float(near[0, best]), float(near[1, best])),
        far=(float(far[0, best]), float(far[1, best])),
        overlap=float(OVERLAPS[best]),
        known=True,
    )


def computing(time: FloatArray, batch: FloatArray, weight: FloatArray) -> tuple[float, float]:
    """A and b of computing, by relative least squares with both at least 0.

    Args:
        time: seconds of a pass without its reduction, shape (S,), above 0.
        batch: samples of each, shape (S,).
        weight: measurements that each stands for, shape (S,).
    """
    root = np.sqrt(weight)
    middle = float(np.exp(np.mean(np.log(time))))
    matrix = np.column_stack([root / time, root * batch / time])
    prior = np.array([[np.sqrt(FIXED_TRUST) / middle, 0.0]])
    target = np.append(root, np.sqrt(FIXED_TRUST) * FIXED_SHARE)
    found = _non_negative(np.vstack([matrix, prior]), target[:, None])
    return float(found[0, 0]), float(found[1, 0])


class _Steps(NamedTuple):
    """Columns of measurements, shape (S,) each."""

    nodes: FloatArray
    slots: FloatArray
    local: FloatArray
    pass_s: FloatArray
    compute_s: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Steps:
        nodes, slots, local, pass_s, sync_s, weight = np.array([
            (s.nodes, s.slots, s.local_batch, s.step_s, s.sync_s or 0.0, s.weight) for s in samples
        ], dtype=np.float64).T  # fmt: skip
        sync_s = np.where(slots > 1, np.maximum(sync_s, LEAST_WAIT * pass_s), 0.0)
        compute_s = np.maximum(pass_s - sync_s, LEAST_COMPUTE * pass_s)
        return cls(nodes, slots, local, pass_s, compute_s, weight)


class _Reduced:
    """The networks that explain the times of reductions, one for each of `OVERLAPS` (G)."""

    def __init__(self, steps: _Steps, compute_s: FloatArray) -> None:
        """Take measurements, and what is believed of their computing, seconds, shape (S,)."""
        self._steps, self._compute_s = steps, compute_s
        left = (steps.compute_s / steps.pass_s)[:, None]
        shares = np.power(np.maximum(1.0 - np.power(left, OVERLAPS), 0.0), 1.0 / OVERLAPS)
        self._shares: FloatArray = shares  # of a pass, that the network takes; (S, G)

    def network(self, chosen: BoolArray) -> FloatArray | None:
        """C and d, shape (2, G), of the chosen measurements, shape (S,); None: there are none."""
        if not chosen.any():
            return None
        steps = self._steps
        root, pass_s = np.sqrt(steps.weight[chosen]), steps.pass_s[chosen]
        further = steps.slots[chosen] - 2.0
        matrix = np.column_stack([root / pass_s, root * further / pass_s])
        middle = float(np.exp(np.mean(np.log(pass_s))))
        prior = np.sqrt(HOP_TRUST) / middle * np.array([[-FURTHER_SHARE, 1.0]])
        targets = np.vstack([root[:, None] * self._shares[chosen], np.zeros((1, len(OVERLAPS)))])
        return _non_negative(np.vstack([matrix, prior]), targets)

    def best(self, near: FloatArray, far: FloatArray) -> int:
        """Place in `OVERLAPS` of the least squares of logarithms of whole passes."""
        steps = self._steps
        several, further = steps.slots > 1, np.maximum(steps.slots - 2.0, 0.0)[:, None]
        talk = np.where(
            (steps.nodes > 1)[:, None], far[0] + far[1] * further, near[0] + near[1] * further
        )
        longer = np.maximum(self._compute_s[:, None], talk)
        ratio = np.minimum(self._compute_s[:, None], talk) / longer
        said = longer * np.power(1.0 + np.power(ratio, OVERLAPS), 1.0 / OVERLAPS)
        off = np.log(said[several] / steps.pass_s[several, None])
        return int((steps.weight[several] @ off**2 + OVERLAP_COST).argmin())


def _non_negative(matrix: FloatArray, targets: FloatArray) -> FloatArray:
    """Least squares in two unknowns, both at least 0; shapes (S, 2) and (S, G), to (2, G)."""
    free, *_ = np.linalg.lstsq(matrix, targets, rcond=None)
    wrong = (free < 0.0).any(axis=0)
    if not wrong.any():
        return np.asarray(free)
    options = np.zeros((3, 2, targets.shape[1]))  # neither of them, one, the other
    for column in range(2):
        only = matrix[:, column]
        size = float(only @ only)
        if size > 0.0:
            options[column + 1, column] = np.maximum(only @ targets / size, 0.0)
    errors = np.square(np.matmul(matrix, options) - targets).sum(axis=1)
    best = options[errors.argmin(axis=0), :, np.arange(targets.shape[1])].T
    return np.asarray(np.where(wrong, best, free))
