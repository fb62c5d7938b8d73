"""Closed form of step times, with corrections; passes per step; statistical efficiency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.prediction import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Maximum samples of a worker's pass; infinite if one pass was always enough.

    A worker alone may take more passes than one of several, to measure gradient noise.
    """

    alone: float = math.inf
    several: float = math.inf

    def passes(self, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the passes of a step, whose gradients are accumulated before the reduction.

        As few as the limit allows, of nearly equal size, as in the training library. Shapes (...).
        """
        most = np.where(np.asarray(slots) > 1, self.several, self.alone)
        return np.asarray(np.maximum(np.ceil(local_batch / most), 1.0))

    def one_is_enough(self, slots: int, local_batch: float) -> bool:
        """True if a share of `local_batch` samples is expected to take one pass."""
        return local_batch <= (self.several if slots > 1 else self.alone)


NO_LIMITS = PassLimits()


@dataclass(slots=True)
class SeenPasses:
    """Largest measured pass, and whether steps had several passes; alone and in groups."""

    alone: int = 0  # samples
    several: int = 0
    alone_splits: bool = False
    several_splits: bool = False

    def add(self, slots: int, local_batch: int, passes: int) -> None:
        """Record a step; `local_batch` is that of one pass of one worker."""
        if slots > 1:
            self.several = max(self.several, local_batch)
            self.several_splits |= passes > 1
        else:
            self.alone = max(self.alone, local_batch)
            self.alone_splits |= passes > 1

    @property
    def limits(self) -> PassLimits:
        """Assumed limits: larger shares than those measured are split into such passes."""
        return PassLimits(
            alone=float(self.alone) if self.alone_splits else math.inf,
            several=float(self.several) if self.several_splits else math.inf,
        )


FIXED_SHARE: Final = 0.3  # prior share of a step that does not depend on the batch
FAR: Final = 1.1  # prior factor of a step across nodes
# Corrections above this extend to other sizes; 1.25 cost 1.5% on two measured workloads.
MIN_MISFIT: Final = 2.0
TINY: Final = 1e-300  # avoids a division by 0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Exponents of the assumed speed-up of a family until several slots were measured."""

    to_two: float = 0.9  # prior: 2^0.9 times as fast on two slots
    beyond: float = 0.5  # and (r / 2)^0.5 times that on more: cautious until measured


PRIOR_SCALING: Final = Scaling()  # of a cluster without measurements


@dataclass(frozen=True, slots=True)
class Sample:
    """Mean step time measured at one size."""

    nodes: int
    slots: int
    local_batch: float  # samples per slot and step
    step_s: float
    weight: float = 1.0  # number of measurements
    sync_s: float | None = None  # part of `step_s` in the reduction; None: not reported


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """step = (compute^g + network^g)^(1/g), times a measured correction at the same size.

    compute = a + b l for a local batch of l; network = c + d (r - 2) on r >= 2 slots, with separate
    coefficients within a node and across nodes. Without a measured network, the whole step is
    compute r^(1 - exponent), with one exponent up to two slots and another beyond them. An
    unmeasured size is assumed to be no better than the nearest measured one, if that was much
    slower than the form predicts.
    """

    compute: tuple[float, float] = (FIXED_SHARE, 1.0 - FIXED_SHARE)
    near: tuple[float, float] | None = None  # network within a node, seconds
    far: tuple[float, float] | None = None
    overlap: float = 1.0  # g
    correction: dict[tuple[int, int], float] = field(default_factory=dict)  # (nodes, slots)
    known: bool = False  # False: times are relative, not seconds
    scaling: Scaling = PRIOR_SCALING  # used without a measured network
    limits: PassLimits = NO_LIMITS  # of a pass; a larger share takes several passes

    def step_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a step: all its passes, of which the last one has the reduction.

        Args:
            nodes: shape (...), nodes that the group spans.
            slots: shape (...), workers.
            local_batch: shape (...), samples of one slot in a step.

        Returns:
            Shape (...), seconds; relative to a step at the first batch if `known` is False.
        """
        if self.limits == NO_LIMITS:
            return self.pass_s(nodes, slots, local_batch)
        passes = self.limits.passes(slots, local_batch)
        each = np.where(passes > 1, np.ceil(local_batch / passes), local_batch)
        before = (passes - 1) * (self.compute[0] + self.compute[1] * each)
        return np.asarray(self.pass_s(nodes, slots, each) + before)

    def pass_s(self, nodes: IntArray, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Return the seconds of a pass with its reduction; shapes as for `step_s`."""
        compute = self.compute[0] + self.compute[1] * local_batch
        several = slots > 1
        to_two = np.power(np.clip(slots, 1, 2), 1.0 - self.scaling.to_two)
        further = np.power(np.maximum(slots / 2, 1.0), 1.0 - self.scaling.beyond)
        plain = compute * to_two * further
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
        longer = np.maximum(np.maximum(compute, cost), TINY)
        ratio = np.minimum(compute, cost) / longer  # its powers neither overflow nor underflow
        return np.asarray(longer * np.power(1.0 + np.power(ratio, self.overlap), 1 / self.overlap))

    def _corrections(self, nodes: IntArray, slots: IntArray) -> FloatArray:
        sizes = zip(nodes.ravel().tolist(), slots.ravel().tolist(), strict=True)
        return np.array([self._correction(*size) for size in sizes]).reshape(slots.shape)

    def _correction(self, nodes: int, slots: int) -> float:
        known = self.correction.get((nodes, slots))
        if known is not None:
            return known
        alike = [(n, s) for n, s in self.correction if s > 1 and (n > 1) == (nodes > 1)]
        if not alike or slots == 1:
            return 1.0
        nearest = min(alike, key=lambda size: (abs(math.log(size[1] / slots)), size))
        off = self.correction[nearest]
        return off if off > MIN_MISFIT else 1.0


def statistical_efficiency(batch: FloatArray, first_batch: float, noise_scale: float) -> FloatArray:
    """Return the progress per sample, relative to the job's first batch.

    (phi + m0) / (phi + m), with the gradient noise scale phi (McCandlish et al. 2018; Pollux
    eq. 7).

    Args:
        batch: m, shape (...), global, samples per step.
        first_batch: m0, samples per step.
        noise_scale: phi, samples.

    Returns:
        Shape (...), 1 at the first batch, falling towards 0.
    """
    return np.asarray((noise_scale + first_batch) / (noise_scale + batch))
