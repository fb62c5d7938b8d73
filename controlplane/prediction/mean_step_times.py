"""How long steps took: smoothed means, and whether a model of them is out of date."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Size = tuple[int, int, int]  # nodes, slots, local batch
K = TypeVar("K", bound=Hashable)

SMOOTHING: Final = 0.3  # weight of the newest of several measurements at one size; a judgement
DRIFT: Final = 0.15  # relative change of a mean that makes the model be fitted again; a judgement
FULL_WEIGHT: Final = 10.0  # measurements after which one size counts no more


@dataclass(slots=True)
class MeanStepTime:
    """The mean of what was measured at one size."""

    step_s: float
    fitted: float  # its value when the model was last fitted
    weight: float = 1.0  # measurements that it stands for


@dataclass(slots=True)
class StepTimes(Generic[K]):
    """Smoothed means, by whatever the time of a step depends on; for `Size` see above."""

    kept: int | None = None  # that are remembered, the latest of them; None: all
    means: dict[K, MeanStepTime] = field(default_factory=dict)

    def add(self, key: K, step_s: float) -> bool:
        """One more measurement.

        Args:
            key: where it was measured.
            step_s: seconds of a step, above 0.

        Returns:
            Whether it tells a model something new: a size that was never measured, or a mean that
            has drifted since the model was fitted.
        """
        mean = self.means.get(key)
        if mean is None:
            if self.kept is not None and len(self.means) >= self.kept:
                del self.means[next(iter(self.means))]
            self.means[key] = MeanStepTime(step_s, step_s)
            return True
        mean.step_s += SMOOTHING * (step_s - mean.step_s)
        mean.weight = min(FULL_WEIGHT, mean.weight + 1.0)
        return abs(mean.step_s / mean.fitted - 1.0) > DRIFT

    def mark_fitted(self) -> None:
        """A model was fitted to the means as they are."""
        for mean in self.means.values():
            mean.fitted = mean.step_s
