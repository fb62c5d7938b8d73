"""Expected effect of each number of slots on a job's loss in the next scheduling epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.options import SlaqOptions
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.convergence_curves import ConvergenceCurves
from controlplane.prediction.step_times import StepModel, steps_at

EAGER_SIZES: Final = 16  # sizes of every job computed at once
SPEED_WEIGHT: Final = (
    1e-6  # gain of e times the speed: slots that lower no loss go to the slowest job
)
BEYOND_QUALITY_WEIGHT: Final = 1e-3  # weight of loss reduction beyond the target quality


@dataclass(frozen=True, slots=True)
class Outlook:
    """Progress of J jobs that have curves."""

    curves: ConvergenceCurves
    at: FloatArray  # samples done, shape (J,)
    end: FloatArray  # samples at the end, shape (J,); infinite: not stated
    scale: FloatArray  # loss reduction that counts as 1, shape (J,)
    first: FloatArray  # first reported loss, shape (J,)
    speed: FloatArray  # measured over modelled, shape (J,)
    models: tuple[StepModel, ...]  # step times of all J jobs
    batches: IntArray  # global, samples per step, shape (J,)


class SizeGains:
    """Normalised loss reduction of each job within the next T seconds, by its number of slots.

    The first sizes of every job are computed at once, larger ones on demand.
    """

    def __init__(self, outlook: Outlook, options: SlaqOptions) -> None:
        self._outlook, self._options = outlook, options
        self._coefficients = np.array([model.coefficients for model in outlook.models]).reshape(
            -1, 4
        )
        self.loss_now = outlook.curves.at(outlook.at)  # shape (J,)
        self.limit = outlook.curves.limit  # shape (J,)
        if options.target == "quality":
            wanted = outlook.first - options.quality * (outlook.first - self.limit)
            self._wanted_at = outlook.curves.reaches(wanted)
        rows = np.arange(len(outlook.at))
        self._gains = self._of(rows, np.arange(1, EAGER_SIZES + 1)).tolist()

    def of(self, row: int, size: int) -> float:
        """Return the gain of a job with `size` slots, at least 1.

        In units of `Outlook.scale`; for target "quality" the share of the way to the quality.
        """
        known = self._gains[row]
        if size > len(known):
            further = np.arange(len(known) + 1, 2 * size + 1)
            known += self._of(np.array([row]), further)[0].tolist()
        gain: float = known[size - 1]
        return gain

    def step(self, row: int, size: int) -> float:
        """Return the gain of one more slot beyond `size`, which is at least 1."""
        known = self._gains[row]
        if size >= len(known):
            self.of(row, size + 1)  # extends `known`
        step: float = known[size] - known[size - 1]
        return step

    def losses_then(self, sizes: IntArray) -> FloatArray:
        """Return the losses expected after the next T seconds, shape (J,); sizes are at least 1."""
        rows = np.arange(len(sizes))
        reach = self._reach(rows, self._rates(rows, sizes[:, None]))
        return self._outlook.curves.at(reach)[:, 0]

    def shares(self, losses: FloatArray) -> FloatArray:
        """Return the share of the remaining reduction that these losses make, shape (J,)."""
        left = self.loss_now - self.limit
        fallen: FloatArray = np.where(
            left > 0.0, (self.loss_now - losses) / np.maximum(left, 1e-300), 0.0
        )
        return fallen

    def efficient(self, row: int, most: int) -> int:
        """Return the most slots at which the speed-up per slot is not below the floor."""
        rates = self._rates(np.array([row]), np.arange(1, most + 1))[0]
        share = rates / (np.arange(1, most + 1) * rates[0])
        below = np.flatnonzero(share < self._options.efficiency_floor)
        return int(below[0]) if len(below) else most

    def _of(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Return the gains of some jobs at some sizes, shape (R, S)."""
        outlook = self._outlook
        rates = self._rates(rows, sizes)
        reach = self._reach(rows, rates)
        falls = self.loss_now[rows, None] - outlook.curves.rows(rows).at(reach)
        gains = np.maximum(falls, 0.0) / outlook.scale[rows, None]
        if self._options.target == "quality":
            way = self._wanted_at[rows, None] - outlook.at[rows, None]
            reached = np.minimum((reach - outlook.at[rows, None]) / np.maximum(way, 1e-12), 1.0)
            gains = np.where(
                way > 0.0,
                np.where(np.isinf(way), BEYOND_QUALITY_WEIGHT * gains, reached),
                BEYOND_QUALITY_WEIGHT * gains,
            )
        found: FloatArray = gains + SPEED_WEIGHT * np.log(rates)
        return found

    def _rates(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Return the samples/s of some jobs, shape (R, S); sizes of shape (S,) or (R, S)."""
        batches = self._outlook.batches[rows, None]
        steps_s = steps_at(self._coefficients[rows], sizes, batches)
        rates: FloatArray = self._outlook.speed[rows, None] * batches / np.maximum(steps_s, 1e-12)
        return rates

    def _reach(self, rows: IntArray, rates: FloatArray) -> FloatArray:
        """Return the samples done after T seconds, shape (R, S)."""
        outlook = self._outlook
        then = outlook.at[rows, None] + rates * self._options.interval_s
        return np.minimum(then, np.maximum(outlook.end, outlook.at)[rows, None])
