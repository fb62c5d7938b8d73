"""X: how fast jobs are, as measured, and fitted for sizes that were never tried."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.prediction.throughput import Sample, SpeedModel, fit

NEWEST: Final = 0.3  # weight of the newest of many measurements at one size
REFIT: Final = 0.15  # relative change of a mean that makes the fit stale
FULL_WEIGHT: Final = 10.0
Size = tuple[int, int, int]  # nodes, slots, local batch


@dataclass(slots=True)
class _Mean:
    step_s: float
    fitted: float = 0.0  # what the model was last told; 0: nothing
    weight: float = 0.0


@dataclass(slots=True)
class Speeds:
    """Measured speeds of jobs of one script and model."""

    edition: int = 0  # of the model
    slot_rate: float = 0.0  # mean samples per second of one slot; 0: never measured
    _means: dict[Size, _Mean] = field(default_factory=dict)
    _model: SpeedModel | None = None

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._means)

    def take(self, nodes: int, slots: int, batch: int, samples_per_s: float) -> None:
        """One more measurement, on so many slots with that global batch."""
        if slots < 1 or not math.isfinite(samples_per_s) or samples_per_s <= 0:
            return
        step_s, each = batch / samples_per_s, samples_per_s / slots
        share = NEWEST if self.slot_rate else 1.0
        self.slot_rate += share * (each - self.slot_rate)
        size = (nodes, slots, max(1, round(batch / slots)))
        mean = self._means.setdefault(size, _Mean(step_s))
        mean.step_s += NEWEST * (step_s - mean.step_s)
        mean.weight = min(FULL_WEIGHT, mean.weight + 1.0)
        if abs(mean.step_s - mean.fitted) > REFIT * mean.fitted:
            self._model = None

    def model(self, first_batch: int) -> SpeedModel:
        """The model that fits best; in relative time before anything was measured."""
        if self._model is None:
            samples = [
                Sample(nodes, slots, local, mean.step_s, mean.weight)
                for (nodes, slots, local), mean in self._means.items()
            ]
            self._model = fit(samples, first_batch)
            self.edition += 1
            for mean in self._means.values():
                mean.fitted = mean.step_s
        return self._model
