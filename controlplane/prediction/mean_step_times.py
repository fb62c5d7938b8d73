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
    sync_share: float | None = None  # of its seconds, in the reduction; None: never told
    fitted_share: float | None = None  # its value when the model was last fitted

    def drifted(self) -> bool:
        """Whether a model of it is out of date."""
        if abs(self.step_s / self.fitted - 1.0) > DRIFT:
            return True
        if self.sync_share is None or self.fitted_share is None:
            return self.sync_share is not None
        return abs(self.sync_share - self.fitted_share) > DRIFT


@dataclass(slots=True)
class StepTimes(Generic[K]):
    """Smoothed means, by whatever the time of a step depends on; for `Size` see above."""

    kept: int | None = None  # that are remembered, the latest of them; None: all
    means: dict[K, MeanStepTime] = field(default_factory=dict)

    def add(self, key: K, step_s: float, sync_share: float | None = None) -> bool:
        """One more measurement.

        Args:
            key: where it was measured.
            step_s: seconds of a step, above 0.
            sync_share: of these, in the reduction, 0 to 1; None: not told.

        Returns:
            Whether it tells a model something new: a size that was never measured, or a mean that
            has drifted since the model was fitted.
        """
        mean = self.means.get(key)
        if mean is None:
            if self.kept is not None and len(self.means) >= self.kept:
                del self.means[next(iter(self.means))]
            self.means[key] = MeanStepTime(step_s, step_s, 1.0, sync_share, sync_share)
            return True
        mean.step_s += SMOOTHING * (step_s - mean.step_s)
        mean.weight = min(FULL_WEIGHT, mean.weight + 1.0)
        if sync_share is not None:
            before = sync_share if mean.sync_share is None else mean.sync_share
            mean.sync_share = before + SMOOTHING * (sync_share - before)
        return mean.drifted()

    def mark_fitted(self) -> None:
        """A model was fitted to the means as they are."""
        for mean in self.means.values():
            mean.fitted, mean.fitted_share = mean.step_s, mean.sync_share
