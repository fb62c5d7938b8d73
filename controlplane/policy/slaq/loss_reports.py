"""Losses of a job as a curve is fitted to them: one for each stretch of training."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

PART: Final = 0.25  # of an epoch: shorter stretches tell more of their batches than of the job
LARGEST: Final = 1e30  # a loss beyond is no measurement


class LossReports:
    """Stretches of training, each at its middle, with its mean loss.

    An epoch's report is the mean over the epoch. Telemetry has the mean over the running epoch so
    far; the difference of two such sums is the mean over the stretch between them. So a job with
    long epochs is known before its first one ends, and nothing is counted twice.
    """

    def __init__(self, kept: int) -> None:
        """Begin without reports.

        Args:
            kept: the latest, that a curve is fitted to.
        """
        self.positions: deque[float] = deque(maxlen=kept)  # samples since the job began
        self.losses: deque[float] = deque(maxlen=kept)
        self.first: float | None = None  # loss that was ever reported
        self.lowest = math.inf  # that was ever reported
        self.largest_drop = 0.0  # from one report to the next, that was ever seen
        self.edition = 0  # rises with each report
        self._epoch_at: int | None = None  # samples, where the running epoch began
        self._epoch_length = 0  # samples of the last one
        self._told = 0  # samples of the running epoch that were reported
        self._told_mean = 0.0  # loss over them

    def take_epoch(self, epoch: int, samples_done: int, loss: float | None) -> None:
        """An epoch ended.

        Args:
            loss: mean over the epoch; None: not seen.
        """
        if self._epoch_at is None:  # of an earlier life, maybe: epochs were about equally long
            self._epoch_at = samples_done - samples_done // max(epoch, 1)
        self._take_mean(samples_done, loss)
        self._epoch_length = max(0, samples_done - self._epoch_at)
        self._epoch_at, self._told, self._told_mean = samples_done, 0, 0.0

    def take_steps(self, samples_done: int, loss: float | None) -> None:
        """Telemetry of a running epoch.

        Args:
            loss: mean over the running epoch so far; None: not seen.
        """
        if self._epoch_at is None:
            self._epoch_at = 0
        self._take_mean(samples_done, loss)

    def _take_mean(self, samples_done: int, mean: float | None) -> None:
        if mean is None or not abs(mean) < LARGEST or self._epoch_at is None:
            return
        through = samples_done - self._epoch_at
        new = through - self._told
        if new <= 0 or new < PART * max(self._epoch_length, through):
            return
        loss = (mean * through - self._told_mean * self._told) / new
        self._add(self._epoch_at + (through + self._told) / 2.0, loss)
        self._told, self._told_mean = through, mean

    def _add(self, position: float, loss: float) -> None:
        if self.positions and position <= self.positions[-1]:
            return  # it went back to a checkpoint: the same samples once more
        if self.first is None:
            self.first = loss
        else:  # what rose above the first loss and came back is no progress
            drop = min(self.losses[-1], self.first) - loss
            self.largest_drop = max(self.largest_drop, drop)
        self.lowest = min(self.lowest, loss)
        self.positions.append(position)
        self.losses.append(loss)
        self.edition += 1
