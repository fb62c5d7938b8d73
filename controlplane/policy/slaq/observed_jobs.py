"""What SLAQ knows of jobs: losses with their curves, and speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.policy.search.observed_ring_speeds import RingSpeeds
from controlplane.policy.slaq.fitted_losses import FittedLosses
from controlplane.policy.slaq.options import SlaqOptions
from controlplane.policy.slaq.size_gains import Outlook
from controlplane.prediction.convergence_curves import LEAST_REPORTS, Form
from schemas.ids import JobId, Seconds

DRIFT = 0.05  # relative change of a step time that is worth another fit


@dataclass(slots=True)
class _Pace:
    """The latest report of a job."""

    at: Seconds
    samples_done: int = 0
    samples_per_s: float = 0.0  # 0: not measured
    slots: int = 0


class ObservedJobs:
    """Learns from epochs and telemetry; says where jobs stand, and whose losses tell a curve."""

    def __init__(self, options: SlaqOptions) -> None:
        """Begin with nothing learnt."""
        self._options = options
        self._losses = FittedLosses(options.history, options.decay)
        self._speeds = RingSpeeds(DRIFT)
        self._paces: dict[JobId, _Pace] = {}

    def observe(self, event: EpochSeen | StepsSeen, now: Seconds) -> None:
        """Learn a loss and a speed.

        Args:
            event: an epoch that does not say how many samples were done teaches speed only.
            now: seconds on the controller's clock.
        """
        self._speeds.observe(event)
        pace = self._paces.setdefault(event.job, _Pace(now))
        rate = event.samples_per_s
        whole = isinstance(event, StepsSeen) or event.whole
        if whole and event.slots and math.isfinite(rate) and rate > 0.0:
            pace.samples_per_s, pace.slots = rate, event.slots
        if event.samples_done:
            pace.at, pace.samples_done = now, event.samples_done
            reports = self._losses.reports(event.job)
            if isinstance(event, EpochSeen):
                reports.take_epoch(event.epoch, event.samples_done, event.train_loss)
            else:
                reports.take_steps(event.samples_done, event.train_loss)

    def forget(self, job: JobId) -> None:
        """It has ended."""
        self._losses.forget(job)
        self._paces.pop(job, None)
        self._speeds.forget(job)

    def no_curve(self, jobs: Sequence[JobView]) -> dict[JobId, str]:
        """Why the losses of some of them tell nothing, in words; those of the others do."""
        curves = self._losses.curves([job.job for job in jobs])
        facts = zip(
            curves.forms.tolist(), curves.limit.tolist(), curves.error.tolist(), strict=True
        )
        words = (self._without(job.job, *fact) for job, fact in zip(jobs, facts, strict=True))
        return {job.job: why for job, why in zip(jobs, words, strict=True) if why}

    def is_new(self, job: JobView) -> bool:
        """Whether it has only begun to report losses: they fall most at first."""
        told = len(self._losses.reports(job.job).losses)
        return job.epoch <= told < LEAST_REPORTS

    def _without(self, job: JobId, form: int, limit: float, error: float) -> str:
        reports = self._losses.reports(job)
        if form == Form.NONE:
            if not reports.losses:
                return "it has reported no loss"
            return f"{len(reports.losses)} of its losses are known, {LEAST_REPORTS} tell a curve"
        first = reports.first if reports.first is not None else math.nan
        fell = first - reports.lowest
        if not fell > 0.0 or reports.largest_drop <= 0.0:
            return "its loss has not fallen"
        if form == Form.FLAT and limit > first - fell / 2.0:
            return "its loss does not fall"
        if error > self._options.worst_fit * fell:
            return "its losses follow no curve"
        return ""

    def outlook(self, jobs: Sequence[JobView], now: Seconds) -> Outlook:
        """Where jobs stand that have curves.

        Args:
            now: seconds on the controller's clock.
        """
        curves = self._losses.curves([job.job for job in jobs])
        reports = [self._losses.reports(job.job) for job in jobs]
        first = np.array([float(report.first or 0.0) for report in reports])
        if self._options.normalise == "drop":
            scale = np.array([report.largest_drop for report in reports])
        else:
            scale = first - curves.limit
        return Outlook(
            curves=curves,
            at=np.array([self._samples_done(job, now) for job in jobs]),
            end=np.array(
                [math.inf if job.stop_samples is None else job.stop_samples for job in jobs]
            ),
            scale=np.maximum(scale, 1e-12 * curves.range),
            first=first,
            speed=np.array([self._own_speed(job) for job in jobs]),
            models=tuple(self._speeds.model(job) for job in jobs),
            batches=np.array([job.batch_size for job in jobs], dtype=np.int64),
        )

    def reported(self, job: JobId) -> int:
        """Losses of it that its curve is fitted to."""
        return len(self._losses.reports(job).losses)

    def _samples_done(self, job: JobView, now: Seconds) -> float:
        """By its latest report and its speed since then, for one scheduling epoch at most."""
        pace = self._paces.get(job.job)
        if pace is None:
            return float(job.samples_done)
        since_s = min(max(0.0, now - max(pace.at, job.moved_at)), self._options.interval_s)
        further = pace.samples_per_s * since_s if job.running_on else 0.0
        return max(job.samples_done, pace.samples_done) + further

    def _own_speed(self, job: JobView) -> float:
        """How much faster it was measured to be than its family's model says."""
        pace = self._paces.get(job.job)
        if pace is None or not pace.slots:
            return 1.0
        modelled_s = self._speeds.model(job).step_s(pace.slots, job.batch_size)
        return pace.samples_per_s * modelled_s / job.batch_size
