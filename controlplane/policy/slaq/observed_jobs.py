"""The losses, loss curves and speeds of jobs, in the form that SLAQ needs.

A curve is fitted to one loss per stretch of training, and fitted again after its job has reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.policy.options import SlaqOptions
from controlplane.policy.search.observed_jobs import StepTimesByFamily
from controlplane.prediction import FloatArray, IntArray
from controlplane.prediction.convergence_curves import (
    MIN_REPORTS,
    ConvergenceCurves,
    Form,
    fit_curves,
)
from controlplane.prediction.step_times import StepModel, steps_at
from schemas.ids import JobId, Seconds

EAGER_SIZES: Final = 16  # sizes of every job that are computed at once
# gain of a speed that is e times as high; slots that lower no loss go to the slowest job
SPEED_WEIGHT: Final = 1e-6
BEYOND_QUALITY_WEIGHT: Final = 1e-3  # weight of loss reduction beyond the target quality


@dataclass
class SizeGains:
    """Normalised loss reduction of J jobs within the next T seconds, by number of slots.

    All jobs have curves. The first sizes of every job are computed at once, larger sizes on demand.
    """

    curves: ConvergenceCurves
    at: FloatArray  # samples done, shape (J,)
    end: FloatArray  # samples at the stated end, shape (J,); infinite: not stated
    scale: FloatArray  # loss reduction that has the value 1, shape (J,)
    first: FloatArray  # first reported loss, shape (J,)
    speed: FloatArray  # measured speed over modelled speed, shape (J,)
    models: tuple[StepModel, ...]  # step times of all J jobs
    batches: IntArray  # global batches, samples per step, shape (J,)
    options: SlaqOptions

    def __post_init__(self) -> None:
        """Compute the gains of the first sizes."""
        coefficients = [model.coefficients for model in self.models]
        self._coefficients = np.array(coefficients).reshape(-1, 4)
        self.loss_now = self.curves.at(self.at)  # shape (J,)
        self.limit = self.curves.limit  # shape (J,)
        if self.options.target == "quality":
            wanted = self.first - self.options.quality * (self.first - self.limit)
            self._wanted_at = self.curves.reaches(wanted)
        rows = np.arange(len(self.at))
        self._gains = self._of(rows, np.arange(1, EAGER_SIZES + 1)).tolist()

    def of(self, row: int, size: int) -> float:
        """Return the gain of a job with `size` slots, at least 1, in units of `scale`."""
        known = self._gains[row]
        if size > len(known):
            further = np.arange(len(known) + 1, 2 * size + 1)
            known += self._of(np.array([row]), further)[0].tolist()
        gain: float = known[size - 1]
        return gain

    def step(self, row: int, size: int) -> float:
        """Return the gain of one more slot after `size` slots; `size` is at least 1."""
        known = self._gains[row]
        if size >= len(known):
            self.of(row, size + 1)  # extends `known`
        step: float = known[size] - known[size - 1]
        return step

    def losses_then(self, sizes: IntArray) -> FloatArray:
        """Return the losses expected after the next T seconds, shape (J,); no size may be 0."""
        rows = np.arange(len(sizes))
        reach = self._reach(rows, self._rates(rows, sizes[:, None]))
        return self.curves.at(reach)[:, 0]

    def shares(self, losses: FloatArray) -> FloatArray:
        """Return the share of the remaining reduction that is done at these losses, shape (J,)."""
        left = self.loss_now - self.limit
        fallen: FloatArray = np.where(
            left > 0.0, (self.loss_now - losses) / np.maximum(left, 1e-300), 0.0
        )
        return fallen

    def efficient(self, row: int, most: int) -> int:
        """Return the most slots at which the speed-up per slot is not below `efficiency_floor`."""
        rates = self._rates(np.array([row]), np.arange(1, most + 1))[0]
        share = rates / (np.arange(1, most + 1) * rates[0])
        below = np.flatnonzero(share < self.options.efficiency_floor)
        return int(below[0]) if len(below) else most

    def _of(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Return the gains of R jobs at S sizes, shape (R, S)."""
        rates = self._rates(rows, sizes)
        reach = self._reach(rows, rates)
        falls = self.loss_now[rows, None] - self.curves.rows(rows).at(reach)
        gains = np.maximum(falls, 0.0) / self.scale[rows, None]
        if self.options.target == "quality":
            way = self._wanted_at[rows, None] - self.at[rows, None]
            reached = np.minimum((reach - self.at[rows, None]) / np.maximum(way, 1e-12), 1.0)
            gains = np.where(
                way > 0.0,
                np.where(np.isinf(way), BEYOND_QUALITY_WEIGHT * gains, reached),
                BEYOND_QUALITY_WEIGHT * gains,
            )
        found: FloatArray = gains + SPEED_WEIGHT * np.log(rates)
        return found

    def _rates(self, rows: IntArray, sizes: IntArray) -> FloatArray:
        """Return the samples/s of R jobs, shape (R, S); `sizes` have shape (S,) or (R, S)."""
        batches = self.batches[rows, None]
        steps_s = steps_at(self._coefficients[rows], sizes, batches)
        rates: FloatArray = self.speed[rows, None] * batches / np.maximum(steps_s, 1e-12)
        return rates

    def _reach(self, rows: IntArray, rates: FloatArray) -> FloatArray:
        """Return the number of samples done after T seconds, shape (R, S)."""
        then = self.at[rows, None] + rates * self.options.interval_s
        return np.minimum(then, np.maximum(self.end, self.at)[rows, None])


# shortest stretch, in epochs; the loss of a shorter one depends on its batches too much
MIN_STRETCH_EPOCHS: Final = 0.25
MAX_LOSS: Final = 1e30  # larger losses are not measurements


class LossReports:
    """The mean losses of the last `kept` stretches of training, each at the middle of its stretch.

    An epoch's report is the mean over the epoch. Telemetry has the mean over the running epoch so
    far. Two such means, multiplied by their samples and subtracted, give the mean over the stretch
    between them. So a job with long epochs has a curve before its first epoch ends, and no sample
    is used twice.
    """

    def __init__(self, kept: int) -> None:
        self.positions: deque[float] = deque(maxlen=kept)  # samples since the job started
        self.losses: deque[float] = deque(maxlen=kept)
        self.first: float | None = None  # first reported loss
        self.lowest = math.inf  # lowest reported loss
        self.largest_drop = 0.0  # largest reduction between two reports
        self.edition = 0  # number of reports
        self._epoch_at: int | None = None  # samples at the start of the running epoch
        self._epoch_length = 0  # number of samples of the last epoch
        self._reported = 0  # number of reported samples of the running epoch
        self._reported_mean = 0.0  # mean loss over the reported samples

    def take_epoch(self, epoch: int, samples_done: int, loss: float | None) -> None:
        """Record the end of an epoch; `loss` is the mean over the epoch."""
        if self._epoch_at is None:  # perhaps after a restart: assume epochs of equal length
            self._epoch_at = samples_done - samples_done // max(epoch, 1)
        self._take_mean(samples_done, loss)
        self._epoch_length = max(0, samples_done - self._epoch_at)
        self._epoch_at, self._reported, self._reported_mean = samples_done, 0, 0.0

    def take_steps(self, samples_done: int, loss: float | None) -> None:
        """Record telemetry of a running epoch; `loss` is the mean over the epoch so far."""
        if self._epoch_at is None:
            self._epoch_at = 0
        self._take_mean(samples_done, loss)

    def _take_mean(self, samples_done: int, mean: float | None) -> None:
        if mean is None or not abs(mean) < MAX_LOSS or self._epoch_at is None:
            return
        through = samples_done - self._epoch_at
        new = through - self._reported
        if new <= 0 or new < MIN_STRETCH_EPOCHS * max(self._epoch_length, through):
            return
        loss = (mean * through - self._reported_mean * self._reported) / new
        self._add(self._epoch_at + (through + self._reported) / 2.0, loss)
        self._reported, self._reported_mean = through, mean

    def _add(self, position: float, loss: float) -> None:
        if self.positions and position <= self.positions[-1]:
            return  # the job resumed from a checkpoint and repeats samples
        if self.first is None:
            self.first = loss
        else:  # a fall after a rise above the first loss is no progress
            drop = min(self.losses[-1], self.first) - loss
            self.largest_drop = max(self.largest_drop, drop)
        self.lowest = min(self.lowest, loss)
        self.positions.append(position)
        self.losses.append(loss)
        self.edition += 1


class FittedLosses:
    """The loss reports of all jobs, and the curves fitted to them."""

    def __init__(self, kept: int, decay: float) -> None:
        self._kept, self._decay = kept, decay
        self._reports: dict[JobId, LossReports] = {}
        self._fitted: dict[JobId, tuple[int, int]] = {}  # job -> (edition, row)
        self._curves = self._fit([])

    def reports(self, job: JobId) -> LossReports:
        """Return the reports of a job; a new job has none."""
        if job not in self._reports:
            self._reports[job] = LossReports(self._kept)
        return self._reports[job]

    def forget(self, job: JobId) -> None:
        """Forget a job that ended."""
        self._reports.pop(job, None)
        self._fitted.pop(job, None)

    def curves(self, jobs: Sequence[JobId]) -> ConvergenceCurves:
        """Return the curves of these jobs, in their order."""
        stale = [
            name for name in jobs if self._fitted.get(name, (-1,))[0] != self.reports(name).edition
        ]
        if stale:
            kept = [name for name in self._fitted if name not in set(stale)]
            old = self._curves.rows(
                np.array([self._fitted[name][1] for name in kept], dtype=np.int64)
            )
            self._curves = old.followed_by(self._fit([self.reports(name) for name in stale]))
            self._fitted = {
                name: (self.reports(name).edition, row) for row, name in enumerate((*kept, *stale))
            }
        return self._curves.rows(np.array([self._fitted[name][1] for name in jobs], dtype=np.int64))

    def _fit(self, reports: Sequence[LossReports]) -> ConvergenceCurves:
        positions = np.full((len(reports), self._kept), np.nan)
        losses = positions.copy()
        for row, one in enumerate(reports):
            if one.losses:
                positions[row, -len(one.positions) :] = one.positions
                losses[row, -len(one.losses) :] = one.losses
        return fit_curves(positions, losses, decay=self._decay)


DRIFT = 0.05  # relative change of a step time that triggers another fit


@dataclass(slots=True)
class _Pace:
    at: Seconds
    samples_done: int = 0
    samples_per_s: float = 0.0  # 0: not measured
    slots: int = 0


class ObservedJobs:
    """The progress, speeds and loss curves of jobs, learnt from epochs and telemetry."""

    def __init__(self, options: SlaqOptions) -> None:
        self._options = options
        self._losses = FittedLosses(options.history, options.decay)
        self._speeds = StepTimesByFamily(DRIFT)
        self._paces: dict[JobId, _Pace] = {}

    def observe(self, event: EpochSeen | StepsSeen, now: Seconds) -> None:
        """Learn a loss and a speed; from an epoch without a number of samples, learn the speed."""
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
        """Forget a job that ended."""
        self._losses.forget(job)
        self._paces.pop(job, None)
        self._speeds.forget(job)

    def no_curve(self, jobs: Sequence[JobView]) -> dict[JobId, str]:
        """Return the jobs with losses that follow no curve, each with the reason in words."""
        curves = self._losses.curves([job.job for job in jobs])
        facts = zip(
            curves.forms.tolist(), curves.limit.tolist(), curves.error.tolist(), strict=True
        )
        words = (self._why_no_curve(job.job, *fact) for job, fact in zip(jobs, facts, strict=True))
        return {job.job: why for job, why in zip(jobs, words, strict=True) if why}

    def is_new(self, job: JobView) -> bool:
        """True if the job has just started to report losses, which is when losses fall most."""
        count = len(self._losses.reports(job.job).losses)
        return job.epoch <= count < MIN_REPORTS

    def _why_no_curve(self, job: JobId, form: int, limit: float, error: float) -> str:
        reports = self._losses.reports(job)
        if form == Form.NONE:
            if not reports.losses:
                return "it has reported no loss"
            return f"{len(reports.losses)} of its losses are known, a curve needs {MIN_REPORTS}"
        first = reports.first if reports.first is not None else math.nan
        fell = first - reports.lowest
        if not fell > 0.0 or reports.largest_drop <= 0.0:
            return "its loss has not fallen"
        if form == Form.FLAT and limit > first - fell / 2.0:
            return "its loss does not fall"
        if error > self._options.worst_fit * fell:
            return "its losses follow no curve"
        return ""

    def gains(self, jobs: Sequence[JobView], now: Seconds) -> SizeGains:
        """Return the gains of jobs, which must have curves."""
        curves = self._losses.curves([job.job for job in jobs])
        reports = [self._losses.reports(job.job) for job in jobs]
        first = np.array([float(report.first or 0.0) for report in reports])
        if self._options.normalise == "drop":
            scale = np.array([report.largest_drop for report in reports])
        else:
            scale = first - curves.limit
        return SizeGains(
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
            options=self._options,
        )

    def _samples_done(self, job: JobView, now: Seconds) -> float:
        """Return the samples done now, extrapolated for at most one scheduling epoch."""
        pace = self._paces.get(job.job)
        if pace is None:
            return float(job.samples_done)
        since_s = min(max(0.0, now - max(pace.at, job.moved_at)), self._options.interval_s)
        further = pace.samples_per_s * since_s if job.running_on else 0.0
        return max(job.samples_done, pace.samples_done) + further

    def _own_speed(self, job: JobView) -> float:
        pace = self._paces.get(job.job)
        if pace is None or not pace.slots:
            return 1.0
        modelled_s = self._speeds.model(job).step_s(pace.slots, job.batch_size)
        return pace.samples_per_s * modelled_s / job.batch_size
