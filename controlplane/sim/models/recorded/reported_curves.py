"""What a recorded job reported of itself, over its progress."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.prediction.statistical_efficiency import statistical_efficiency
from controlplane.sim.models.recorded.recording import Submission


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight between its points, level beyond them; None everywhere if it has none."""

    shares: Sequence[float] = ()  # of the job's progress, growing
    values: Sequence[float] = ()

    def at(self, share: float) -> float | None:
        """The value there.

        Args:
            share: of the job's progress, in [0, 1].
        """
        if not self.shares:
            return None
        place = bisect_left(self.shares, share)
        if place in {0, len(self.shares)}:
            return self.values[min(place, len(self.shares) - 1)]
        low, high = self.shares[place - 1], self.shares[place]
        part = (share - low) / (high - low)
        return self.values[place - 1] * (1.0 - part) + self.values[place] * part


class ReportedCurves:
    """What a job reported, over its progress; a job without a noise scale has its family's mean.

    Where nobody in the family ever reported one, every sample is worth the same at every batch.
    """

    def __init__(self, job: Submission, usual: float | None) -> None:
        """Place the job's epochs on its progress.

        Args:
            usual: mean logarithm of the family's noise scales; None if there are none.
        """
        self.first = job.spec.batch_size
        epochs = sorted(
            {epoch.number: epoch for epoch in job.epochs}.values(), key=lambda e: e.number
        )
        measured = [epoch for epoch in epochs if epoch.noise_scale]
        by_number = Curve(
            [float(epoch.number) for epoch in measured],
            [math.log(epoch.noise_scale or 1.0) for epoch in measured],
        )
        levels = [by_number.at(float(epoch.number)) for epoch in epochs]
        levels = [usual if level is None else level for level in levels]
        efficiencies = [
            1.0 if level is None else efficiency(epoch.batch, self.first, math.exp(level))
            for epoch, level in zip(epochs, levels, strict=True)
        ]
        self.mean_efficiency = float(np.mean(efficiencies)) if efficiencies else 1.0
        ends = (np.cumsum(efficiencies) / sum(efficiencies)).tolist() if efficiencies else []
        known = [place for place, epoch in enumerate(epochs) if epoch.noise_scale]
        self.noise = Curve([ends[at] for at in known], [levels[at] or 0.0 for at in known])
        if not known and usual is not None:
            self.noise = Curve([1.0], [usual])
        losses = [(end, e.train_loss) for end, e in zip(ends, epochs, strict=True)]
        losses_known = [(end, loss) for end, loss in losses if loss is not None]
        self.loss = Curve([end for end, _ in losses_known], [loss for _, loss in losses_known])


def efficiency(batch: int, first: int, phi: float) -> float:
    """Progress per sample, relative to the first batch.

    Args:
        batch: global, samples.
        phi: noise scale of the gradients, samples.
    """
    return float(statistical_efficiency(np.array(float(batch)), float(first), phi))
