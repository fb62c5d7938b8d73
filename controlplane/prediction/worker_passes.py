"""In how many passes a worker takes its share of a step, as far as was seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from controlplane.prediction.array_types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Samples that a worker takes in one pass at most; infinite where one was always enough.

    A worker by itself may take more passes than one of several: it measures gradient noise so.
    """

    alone: float = math.inf
    several: float = math.inf

    def passes(self, slots: IntArray, local_batch: FloatArray) -> FloatArray:
        """Passes of a step, whose gradients are added up before they are reduced.

        As few as the limit allows, of nearly equal size, as the training library deals them out.

        Args:
            slots: workers, shape (...).
            local_batch: samples of one slot in a step, shape (...).

        Returns:
            Shape (...), 1 or more.
        """
        most = np.where(np.asarray(slots) > 1, self.several, self.alone)
        return np.asarray(np.maximum(np.ceil(local_batch / most), 1.0))

    def one_is_enough(self, slots: int, local_batch: float) -> bool:
        """Whether a share is believed to be taken in one pass.

        Args:
            slots: workers.
            local_batch: samples of one slot in a step.
        """
        return local_batch <= (self.several if slots > 1 else self.alone)


NO_LIMITS = PassLimits()


@dataclass(slots=True)
class SeenPasses:
    """The largest pass that was seen, and whether there ever were several, alone and not."""

    alone: int = 0  # samples
    several: int = 0
    alone_splits: bool = False
    several_splits: bool = False

    def add(self, slots: int, local_batch: int, passes: int) -> None:
        """A step was seen.

        Args:
            slots: workers.
            local_batch: samples of one pass of one worker.
        """
        if slots > 1:
            self.several = max(self.several, local_batch)
            self.several_splits |= passes > 1
        else:
            self.alone = max(self.alone, local_batch)
            self.alone_splits |= passes > 1

    @property
    def limits(self) -> PassLimits:
        """What is believed of shares that were never seen: they are cut into such passes."""
        return PassLimits(
            alone=float(self.alone) if self.alone_splits else math.inf,
            several=float(self.several) if self.several_splits else math.inf,
        )
