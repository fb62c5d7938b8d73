"""How long a step takes on so many slots: a closed form, and what it was seen to be wrong by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray

FIXED_SHARE: Final = 0.3  # of a step that does not depend on the batch, until two batches were seen
SCALING: Final = 0.9  # speed-up r^0.9 on r slots, until several slots were seen; a prior
FAR: Final = 1.1  # times a step within a node, until several slots were seen; a prior
TINIEST: Final = 1e-300  # divisor where nothing takes any time


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean time of a step that was measured at one size."""

    nodes: int
    slots: int
    local_batch: float  # samples per slot and step
    step_s: float
    weight: float = 1.0  # how many measurements it stands for


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """step = (compute^g + network^g)^(1/g), times what was measured over that at the same size.

    compute = a + b l for a local batch of l; network = c + d (r - 2) on r >= 2 slots, with
    coefficients of its own within a node and across nodes. Where no network was ever seen,
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
        far = FAR * near if self.far is None else self._with(self.far, compute, slots, plain)
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
        longer = np.maximum(np.maximum(compute, cost), TINIEST)
        ratio = np.minimum(compute, cost) / longer  # powers of it neither over- nor underflow
        return np.asarray(longer * np.power(1.0 + np.power(ratio, self.overlap), 1 / self.overlap))

    def _corrections(self, nodes: IntArray, slots: IntArray) -> FloatArray:
        sizes = zip(nodes.ravel().tolist(), slots.ravel().tolist(), strict=True)
        return np.array([self.correction.get(size, 1.0) for size in sizes]).reshape(slots.shape)
