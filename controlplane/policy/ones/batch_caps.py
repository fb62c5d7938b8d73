"""Batches that lost on their slots are not tried again at once."""

from __future__ import annotations

from typing import Final, NamedTuple

from controlplane.policy.api import JobView
from controlplane.policy.ones.growth_trials import GrowthTrial, last_loss
from schemas.ids import JobId, Seconds

GROWN: Final = 2.0  # times the noise scale of then, from which on a larger batch may pay after all
KEPT_S: Final = 600.0  # at most: what was measured may have been somebody else's doing


class _Cap(NamedTuple):
    batch: int  # global, that the larger one lost against
    slots: int  # on which
    noise_scale: float  # phi, samples, then
    until: Seconds


class BatchCaps:
    """What batches of jobs stay within, because a larger one made less progress on the same slots.

    The model of speeds is linear in the batch; a device that is full, or swaps, is not.
    """

    def __init__(self) -> None:
        self._caps: dict[JobId, _Cap] = {}

    def observe(self, job: JobView, trial: GrowthTrial, noise_scale: float, now: Seconds) -> None:
        """Telemetry came.

        Args:
            trial: of the job, with that telemetry.
            now: seconds on the controller's clock.
        """
        loss = last_loss(trial, job, noise_scale)
        if loss is not None and loss.batch is not None:
            until = Seconds(now + KEPT_S)
            self._caps[job.job] = _Cap(loss.batch, len(job.running_on), noise_scale, until)

    def __contains__(self, job: JobId) -> bool:
        """Whether a batch of this job lost of late."""
        return job in self._caps

    def expire(self, now: Seconds) -> None:
        """Forget what lost long ago.

        Args:
            now: seconds on the controller's clock.
        """
        if self._caps:
            self._caps = {job: cap for job, cap in self._caps.items() if now < cap.until}

    def forget(self, job: JobId) -> None:
        """A job is over.

        Args:
            job: that may never have had a cap.
        """
        self._caps.pop(job, None)

    def capped(self, job: JobView, limit: int, noise_scale: float) -> int:
        """R, but no more than what a larger batch lost against.

        Args:
            limit: R, samples per step.
        """
        cap = self._caps.get(job.job)
        if cap is None or len(job.running_on) != cap.slots:
            return limit
        return limit if noise_scale >= GROWN * cap.noise_scale else min(limit, cap.batch)
