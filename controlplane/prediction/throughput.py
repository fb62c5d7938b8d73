"""How long a step takes on so many slots: a closed form per job family, fitted to what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

OVERLAPS: Final = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.5, 7.0, 10.0)  # exponents g
FIXED_SHARE: Final = 0.3  # of a step that does not depend on the batch, until two batches were seen
FIXED_TRUST: Final = 0.1  # weight of that belief, in samples
SCALING: Final = 0.9  # speed-up r^0.9 on r slots, until several slots were seen
HOP_SHARE: Final = 0.3  # of the cost of two slots that each further one adds, until seen
HOP_TRUST: Final = 0.1
FAR: Final = 1.1  # a step over several nodes takes at least so many times that within one


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean time of a step that was measured at one size."""

    nodes: int
    slots: int
    local_batch: float  # samples per slot and step
    step_s: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """step = (compute^g + network^g)^(1/g), times what was measured over that at the same size.

    compute = a + b l for a local batch of l; network = c + d (r - 2) on r >= 2 slots, with
    coefficients of its own within a node and across nodes. Where the network was never seen,
    compute r^(1 - 0.9) stands for all of it.
    """

    compute: tuple[float, float] = (FIXED_SHARE, 1.0 - FIXED_SHARE)
    near: tuple[float, float] | None = None  # network within a node, seconds
    far: tuple[float, float] | None = None
    overlap: float = 1.0  # g
    correction: dict[tuple[int, int], float] = field(default_factory=dict)  # (nodes, slots)
    known: bool = False  # whether its seconds are seconds

    def step_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Seconds of a step.

        Args:
            nodes: shape (...), nodes that the group spans.
            slots: shape (...), workers.
            local_batch: shape (...), samples of one slot in a step.

        Returns:
            Shape (...), seconds; relative to one step at the first batch where `known` is False.
        """
        compute = self.compute[0] + self.compute[1] * local_batch
        several = slots > 1
        plain = compute * np.power(np.maximum(slots, 1), 1.0 - SCALING)
        near = self._with(self.near, compute, slots, plain)
        far = np.maximum(self._with(self.far, compute, slots, plain), FAR * near)
        step = np.where(several, np.where(nodes > 1, far, near), compute)
        if self.correction:
            step = step * self._corrections(np.asarray(nodes), np.asarray(slots))
        return np.asarray(step, dtype=np.float64)

    def _with(
        self,
        network: tuple[float, float] | None,
        compute: FloatArray,
        slots: IntArray,
        plain: FloatArray,
    ) -> FloatArray:
        if network is None:
            return plain
        cost = network[0] + network[1] * np.maximum(slots - 2, 0)
        g = self.overlap
        return np.asarray(np.power(np.power(compute, g) + np.power(cost, g), 1.0 / g))

    def _corrections(self, nodes: IntArray, slots: IntArray) -> FloatArray:
        sizes = zip(nodes.ravel().tolist(), slots.ravel().tolist(), strict=True)
        return np.array([self.correction.get(size, 1.0) for size in sizes]).reshape(slots.shape)


def fit(samples: Sequence[Sample], first_batch: int) -> SpeedModel:
    """The model that explains `samples` best; without any, a prior in relative time.

    Args:
        samples: of one family.
        first_batch: a usual batch of one slot, for the belief about what it does not depend on.
    """
    if not samples:
        return SpeedModel(compute=(FIXED_SHARE, (1.0 - FIXED_SHARE) / max(first_batch, 1)))
    compute = _compute(samples)
    best = SpeedModel(compute=compute, known=True)
    if any(sample.slots > 1 for sample in samples):
        models = [_model(samples, compute, g) for g in OVERLAPS]
        best = min(models, key=lambda model: _error(model, samples))
    return _corrected(best, samples)


def _compute(samples: Sequence[Sample]) -> tuple[float, float]:
    """A and b, by relative least squares with both at least 0, and a belief about a's share."""
    single = [sample for sample in samples if sample.slots == 1]
    rows = single or [
        Sample(1, 1, s.local_batch, s.step_s * s.slots ** (SCALING - 1.0) / _far(s), s.weight)
        for s in samples
    ]
    time = np.array([row.step_s for row in rows])
    batch = np.array([row.local_batch for row in rows])
    weight = np.sqrt(np.array([row.weight for row in rows]))
    middle = float(np.exp(np.mean(np.log(time))))
    matrix = np.column_stack([weight / time, weight * batch / time])
    belief = np.array([[np.sqrt(FIXED_TRUST) / middle, 0.0]])
    target = np.append(weight, np.sqrt(FIXED_TRUST) * FIXED_SHARE)
    return _non_negative(np.vstack([matrix, belief]), target)


def _far(sample: Sample) -> float:
    return FAR if sample.nodes > 1 else 1.0


def _model(samples: Sequence[Sample], compute: tuple[float, float], g: float) -> SpeedModel:
    near = _network([s for s in samples if s.slots > 1 and s.nodes == 1], compute, g)
    far = _network([s for s in samples if s.nodes > 1], compute, g)
    return SpeedModel(compute=compute, near=near, far=far, overlap=g, known=True)


def _network(
    samples: Sequence[Sample], compute: tuple[float, float], g: float
) -> tuple[float, float] | None:
    """C and d, from what the steps took beyond computing."""
    if not samples:
        return None
    time = np.array([sample.step_s for sample in samples])
    alone = np.array([compute[0] + compute[1] * sample.local_batch for sample in samples])
    cost = np.power(np.maximum(np.power(time, g) - np.power(alone, g), 0.0), 1.0 / g)
    weight = np.sqrt(np.array([sample.weight for sample in samples])) / time
    further = np.array([float(sample.slots - 2) for sample in samples])
    matrix = np.column_stack([weight, weight * further])
    middle = float(np.mean(time))
    belief = np.array([[-HOP_SHARE, 1.0]]) * np.sqrt(HOP_TRUST) / middle
    return _non_negative(np.vstack([matrix, belief]), np.append(weight * cost, 0.0))


def _non_negative(matrix: FloatArray, target: FloatArray) -> tuple[float, float]:
    """Least squares in two unknowns, both at least 0."""
    options = [np.zeros(2)]
    free, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    if (free >= 0).all():
        return float(free[0]), float(free[1])
    for column in range(2):
        only = matrix[:, column]
        size = float(only @ only)
        point = np.zeros(2)
        point[column] = max(0.0, float(only @ target) / size) if size else 0.0
        options.append(point)
    best = min(options, key=lambda point: float(np.sum((matrix @ point - target) ** 2)))
    return float(best[0]), float(best[1])


def _error(model: SpeedModel, samples: Sequence[Sample]) -> float:
    return float(np.sum(_residuals(model, samples) ** 2))


def _residuals(model: SpeedModel, samples: Sequence[Sample]) -> FloatArray:
    seen = np.array([sample.step_s for sample in samples])
    said = model.step_s(
        np.array([sample.nodes for sample in samples]),
        np.array([sample.slots for sample in samples]),
        np.array([sample.local_batch for sample in samples]),
    )
    return np.asarray(np.log(seen) - np.log(np.maximum(said, 1e-12)))


def _corrected(model: SpeedModel, samples: Sequence[Sample]) -> SpeedModel:
    """The mean of what the model is wrong by at each size that was seen."""
    residuals = _residuals(model, samples)
    at: dict[tuple[int, int], list[float]] = {}
    for sample, residual in zip(samples, residuals, strict=True):
        at.setdefault((sample.nodes, sample.slots), []).append(float(residual))
    correction = {size: float(np.exp(np.mean(values))) for size, values in at.items()}
    return SpeedModel(
        compute=model.compute,
        near=model.near,
        far=model.far,
        overlap=model.overlap,
        correction=correction,
        known=True,
    )
