"""What each number of slots is expected to do to a job's loss in the next scheduling epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.options import SlaqOptions
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.convergence_curves import ConvergenceCurves
from controlplane.prediction.step_times import StepModel, steps_at

FIRST_SIZES: Final = 16  # of every job; further ones are looked at where they are asked for
SPEED_UP: Final = 1e-6  # worth of e times the speed: slots that no loss wants serve the slowest
PAST: Final = 1e-3  # worth of a fall of the loss beyond the quality that is wanted


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where J jobs with curves stand."""

    curves: ConvergenceCurves
    at: FloatArray  # samples done, shape (J,)
    end: FloatArray  # samples at which they will be over, shape (J,); infinite: not stated
    scale: FloatArray  # fall of the loss that counts as 1, shape (J,)
    first: FloatArray  # loss that was ever reported, shape (J,)
    speed: FloatArray  # measured over modelled, shape (J,)
    models: tuple[StepModel, ...]  # of step times, of all J
    batches: IntArray  # global, samples per step, shape (J,)


class SizeGains:
    """The normalised fall of each job's loss within the next T seconds, by its number of slots."""

    def __init__(self, outlook: Outlook, options: SlaqOptions) -> None:
        """Look at the first sizes of every job."""
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
        self._gains = self._of(rows, np.arange(1, FIRST_SIZES + 1)).tolist()

    def of(self, row: int, size: int) -> float:
        """What the job gains by so many slots.

        Args:
            size: slots, at least 1.

        Returns:
            In units of `Outlook.scale`; for target "quality" the share of the way to there.
        """
        known = self._gains[row]
        if size > len(known):
            further = np.arange(len(known) + 1, 2 * size + 1)
            known += self._of(np.array([row]), further)[0].tolist()
        gain: float = known[size - 1]
        return gain

    def step(self, row: int, size: int) -> float:
        """What one more slot gains.

        Args:
            size: slots that it has without, at least 1.
        """
        known = self._gains[row]
        if size >= len(known):
            self.of(row, size + 1)  # further sizes are known from now on
        step: float = known[size] - known[size - 1]
        return step

    def losses_then(self, sizes: IntArray) -> FloatArray:
        """The losses that are expected when the next T seconds are over.

        Args:
            sizes: slots of each job, shape (J,), at least 1.

        Returns:
            Shape (J,).
        """
        rows = np.arange(len(sizes))
        reach = self._reach(rows, self._rates(rows, sizes[:, None]))
        return self._outlook.curves.at(reach)[:, 0]

    def shares(self, losses: FloatArray) -> FloatArray:
        """Of what each loss can still fall, the share that it has fallen when it is such.

        Args:
            losses: shape (J,).

        Returns:
            Shape (J,), 0 to 1.
        """
        left = self.loss_now - self.limit
        fallen: FloatArray = np.where(
            left > 0.0, (self.loss_now - losses) / np.maximum(left, 1e-300), 0.0
        )
        return fallen

    def efficient(self, row: int, most: int) -> int:
        """The most slots at which the speed-up per slot is not below the floor."""
        rates = self._rates(np.array([row]), np.arange(1, most + 1))[0]
        share = rates / (np.arange(1, most + 1) * rates[0])
        below = np.flatnonzero(share < self._options.efficiency_floor)
        return int(below[0]) if len(below) else most

    def _of(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Gains of some jobs at some sizes, shape (R, S)."""
        outlook = self._outlook
        rates = self._rates(rows, sizes)
        reach = self._reach(rows, rates)
        falls = self.loss_now[rows, None] - outlook.curves.rows(rows).at(reach)
        gains = np.maximum(falls, 0.0) / outlook.scale[rows, None]
        if self._options.target == "quality":
            way = self._wanted_at[rows, None] - outlook.at[rows, None]
            there = np.minimum((reach - outlook.at[rows, None]) / np.maximum(way, 1e-12), 1.0)
            gains = np.where(way > 0.0, np.where(np.isinf(way), PAST * gains, there), PAST * gains)
        found: FloatArray = gains + SPEED_UP * np.log(rates)
        return found

    def _rates(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Samples per second of some jobs, shape (R, S); sizes of shape (S,) or (R, S)."""
        batches = self._outlook.batches[rows, None]
        steps_s = steps_at(self._coefficients[rows], sizes, batches)
        rates: FloatArray = self._outlook.speed[rows, None] * batches / np.maximum(steps_s, 1e-12)
        return rates

    def _reach(self, rows: IntArray, rates: FloatArray) -> FloatArray:
        """Samples done when T is over, shape (R, S)."""
        outlook = self._outlook
        then = outlook.at[rows, None] + rates * self._options.interval_s
        return np.minimum(then, np.maximum(outlook.end, outlook.at)[rows, None])
