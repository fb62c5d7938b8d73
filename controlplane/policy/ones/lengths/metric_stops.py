"""When a stop rule on a metric will be met, as the job's own reports tell it.

A target is met where the curve through the reports comes up to it, and held for some epochs from
there on; a plateau is met some epochs after the curve rises no further than its reports scatter.
What is certain whatever the curve does, such as the epochs for which a target has yet to be held,
bounds it from below.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from controlplane.prediction.convergence_curves import KEPT_REPORTS, ConvergenceCurves, job_curve
from schemas.jobs import StopRule

LEAST_EPOCHS: Final = 4  # reports before a curve is believed: one more than it has coefficients
FURTHEST: Final = 20.0  # times the epochs so far, that a curve is followed
FLAT_WITHIN: Final = 1.0  # of the scatter of reports, that a plateau may still rise
NO_DECAY: Final = 1.0  # of weights: early reports tell as much of the shape as late ones


@dataclass(slots=True)
class MetricLog:
    """What a job reported of the metric of its stop rule."""

    epochs: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    values: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    best: float = -math.inf
    since_best: int = 0  # epochs without an increase
    _fitted: tuple[int, float | None] = (0, None)  # epochs, and the end that they foretold

    @property
    def epoch(self) -> int:
        """The last one that was reported."""
        return self.epochs[-1] if self.epochs else 0

    def add(self, epoch: int, value: float) -> None:
        """One more epoch; one that is known already changes nothing.

        Args:
            epoch: finished, 1-based.
            value: of the metric; nan is no increase.
        """
        if epoch <= self.epoch:
            return
        self.epochs.append(epoch)
        self.values.append(value)
        if value > self.best:
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1

    def streak(self, target: float) -> int:
        """Epochs in a row, up to the last one, in which a target was met."""
        found = 0
        for value in reversed(self.values):
            if not value >= target:
                break
            found += 1
        return found

    def least_left(self, rule: StopRule) -> int:
        """Epochs that are certain to come, at least 0."""
        if rule.at_least is not None:
            return max(0, rule.consecutive - self.streak(rule.at_least))
        return max(0, (rule.plateau or 0) - self.since_best) if self.epochs else rule.plateau or 0

    def end(self, rule: StopRule) -> float | None:
        """The epoch after which the rule will be met, as the curve says; None: it does not."""
        if self._fitted[0] != self.epoch:
            self._fitted = (self.epoch, self._end(rule))
        return self._fitted[1]

    def _end(self, rule: StopRule) -> float | None:
        epoch, target = self.epoch, rule.at_least
        if target is not None and (streak := self.streak(target)):
            return float(epoch + max(1, rule.consecutive - streak))
        if len(self.epochs) < LEAST_EPOCHS:
            return None
        falling = [-value if math.isfinite(value) else None for value in self.values]
        curve = job_curve([float(at) for at in self.epochs], falling, decay=NO_DECAY)
        if target is not None:
            crosses = float(curve.reaches(np.array([-target]))[0])
            if not crosses <= FURTHEST * epoch:
                return None
            return max(math.ceil(crosses), epoch + 1) + rule.consecutive - 1.0
        return _plateau_end(curve, epoch, rule.plateau or 1, epoch - self.since_best)


def _plateau_end(curve: ConvergenceCurves, epoch: int, wait: int, best: int) -> float | None:
    """The first epoch from which on the curve rises less than reports scatter, and the wait."""
    ahead = np.arange(best, math.ceil(FURTHEST * epoch) + 1, dtype=np.float64)
    now, later = curve.at(ahead[None, :])[0], curve.at(ahead[None, :] + wait)[0]
    with np.errstate(invalid="ignore"):
        flat = now - later < FLAT_WITHIN * float(curve.error[0])
    if not flat.any():
        return None
    return max(float(ahead[int(flat.argmax())]) + wait, epoch + 1.0)
