"""X: how fast jobs are, as measured, and fitted for sizes that were never tried."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.prediction.mean_step_times import Size, StepTimes
from controlplane.prediction.throughput import Sample, SpeedModel, fit

NEWEST: Final = 0.3  # weight of the newest of many measurements of one slot


@dataclass(slots=True)
class Speeds:
    """Measured speeds of jobs of one script and model."""

    edition: int = 0  # of the model
    slot_rate: float = 0.0  # mean samples per second of one slot; 0: never measured
    _step_times: StepTimes[Size] = field(default_factory=StepTimes)
    _model: SpeedModel | None = None

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._step_times.means)

    def add(self, nodes: int, slots: int, batch: int, samples_per_s: float) -> None:
        """One more measurement, on so many slots with that global batch.

        Args:
            batch: global, samples per step.
            samples_per_s: X, mean of the group; what is not finite or above 0 does not count.
        """
        if slots < 1 or batch < 1 or not math.isfinite(samples_per_s) or samples_per_s <= 0:
            return
        step_s, each = batch / samples_per_s, samples_per_s / slots
        share = NEWEST if self.slot_rate else 1.0
        self.slot_rate += share * (each - self.slot_rate)
        size = (nodes, slots, max(1, round(batch / slots)))
        if self._step_times.add(size, step_s):
            self._model = None

    def model(self, first_batch: int) -> SpeedModel:
        """The model that fits best; in relative time before anything was measured.

        Args:
            first_batch: global batch that the job began with, samples per step.
        """
        if self._model is None:
            samples = [
                Sample(nodes, slots, local, mean.step_s, mean.weight)
                for (nodes, slots, local), mean in self._step_times.means.items()
            ]
            self._model = fit(samples, first_batch)
            self.edition += 1
            self._step_times.mark_fitted()
        return self._model
