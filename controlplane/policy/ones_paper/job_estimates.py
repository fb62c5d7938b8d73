"""The estimates from events: speeds and lengths by family, R and progress by job, arrival rate.

X, the speed of a job, is measured. For sizes that were not tried, a fitted model predicts X. The
start rule needs no formula: until a few warm-up steps are done, a job has its least slots and at
most the samples that fit on them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.random import Generator

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PlanTaken, PolicyEvent, StepsSeen
from controlplane.policy.options import OnesPaperOptions, ScaleDown
from controlplane.policy.search.observed_jobs import JobHistory, LimitBounds, resumed
from controlplane.prediction import FloatArray
from controlplane.prediction.progress_distribution import (
    FEATURES,
    Points,
    ProgressModel,
    Reservoir,
    features,
    fit,
    points_of,
    prior,
)
from controlplane.prediction.step_times import Size, StepTimes
from controlplane.prediction.throughput import Sample, SpeedModel
from controlplane.prediction.throughput import fit as fit_speeds
from schemas.ids import JobId, Seconds

NEWEST_WEIGHT: Final = 0.3  # weight of the newest measurement of one slot


@dataclass(slots=True)
class FamilyHistory:
    """Measurements of one family, i.e. of jobs with the same script and model."""

    edition: int = 0  # edition of the model
    slot_rate: float = 0.0  # mean speed of one slot, samples/s; 0: not measured
    epoch_samples: int = 0  # ||D||, as last reported
    _step_times: StepTimes[Size] = field(default_factory=StepTimes)
    _model: SpeedModel | None = None

    @property
    def known(self) -> bool:
        """True if any speed was measured."""
        return bool(self._step_times.means)

    def add(self, nodes: int, slots: int, batch: int, samples_per_s: float) -> None:
        """Record X, the samples/s of a group, at a global batch; ignore X if it is not above 0."""
        if slots < 1 or batch < 1 or not math.isfinite(samples_per_s) or samples_per_s <= 0:
            return
        step_s, each = batch / samples_per_s, samples_per_s / slots
        share = NEWEST_WEIGHT if self.slot_rate else 1.0
        self.slot_rate += share * (each - self.slot_rate)
        size = (nodes, slots, max(1, round(batch / slots)))
        if self._step_times.add(size, step_s):
            self._model = None

    def model(self, first_batch: int) -> SpeedModel:
        """Return the fitted model; before the first measurement, its times are relative."""
        if self._model is None:
            samples = [
                Sample(nodes, slots, local, mean.step_s, mean.weight)
                for (nodes, slots, local), mean in self._step_times.means.items()
            ]
            self._model = fit_speeds(samples, first_batch)
            self.edition += 1
            self._step_times.mark_fitted()
        return self._model


SAMPLE: Final = 500  # points of finished jobs' logs for the fit of the progress model
PRIOR_EPOCHS: Final = 10.0  # assumed length of a job before any has finished
MAX_ARRIVALS: Final = 200  # kept submissions, which determine lambda
MAX_LOG_EPOCHS: Final = 1000  # most entries of one log; bounds memory
DEFAULT_EPOCH_BATCHES: Final = 100  # assumed epoch, as a number of first batches


def arrival_rate(submitted: Collection[Seconds]) -> float:
    """Return lambda, jobs/s; 0 until two jobs were submitted at different times."""
    first, last = min(submitted, default=0.0), max(submitted, default=0.0)
    return (len(submitted) - 1) / (last - first) if last > first else 0.0


@dataclass(slots=True)
class PaperJobHistory(JobHistory):
    """History of an active job, with its losses and its log of epochs."""

    epoch_due: bool = False  # True if an epoch ended since R was last updated
    counted_at: Seconds = Seconds(0.0)  # when an epoch or a report interval last ended
    first_loss: float | None = None
    loss: float | None = None
    accuracy: float | None = None  # the metric of the stop rule, as last reported
    epoch_samples: int = 0  # ||D||
    log: list[tuple[int, FloatArray]] = field(default_factory=list)  # (epoch, x)

    def features(self, samples_done: float) -> FloatArray:
        """Return the feature vector x of the job after `samples_done` samples."""
        size = float(self.epoch_samples)
        return features(size, self.first_loss, samples_done, self.loss, self.accuracy)


AUTHORS_CAP: Final = 4  # multiple of the first batch, as in the authors' published code


def after_epoch(
    limit: int,
    bounds: LimitBounds,
    reading: ScaleDown,
    *,
    ran_s: float,
    arrivals_per_s: float,
    contended: bool,
) -> int:
    """Return R of a running job after an epoch, or after a report interval of a long epoch.

    Scale-up is R' = 2R. Scale-down is R' = ceil(2R / ceil(sigma T + 1)) for a job "with long
    elapsed time", with sigma = lambda, "to penalize jobs that are longer than" 1 / lambda. The
    paper does not say whether such a job is also scaled up; `reading` does:

    - `literal`: scale-down for jobs that ran longer than 1 / lambda, otherwise scale-up.
    - `contended`: the same, but scale-down only while other jobs wait, and at most to a half.
    - `authors`: scale-up to four times the first batch, as in the authors' published code.
    - `off`: scale-up.

    Args:
        limit: R, samples per step.
        ran_s: T_processed, seconds.
        arrivals_per_s: lambda, jobs per second.
        contended: True if other jobs wait.
    """
    if reading == "off":
        return bounds.clip(2 * limit)
    if reading == "authors":
        return bounds.clip(min(2 * limit, AUTHORS_CAP * bounds.first))
    elapsed = arrivals_per_s * ran_s
    if elapsed <= 1.0 or (reading == "contended" and not contended):
        return bounds.clip(2 * limit)
    reduced = 2 * limit / math.ceil(elapsed + 1.0)
    return bounds.clip(max(reduced, limit / 2) if reading == "contended" else reduced)


class PaperEstimates:
    """The estimates of speeds, lengths, progress and limits, updated by policy events and views."""

    def __init__(self, options: OnesPaperOptions) -> None:
        self._options = options
        self.families: defaultdict[str, FamilyHistory] = defaultdict(FamilyHistory)
        self.histories: defaultdict[JobId, PaperJobHistory] = defaultdict(PaperJobHistory)
        self._submitted: deque[Seconds] = deque(maxlen=MAX_ARRIVALS)
        self._sample = Reservoir(SAMPLE)
        self._finished: list[Points] = []  # logs that were not offered to the sample yet
        self.progress: ProgressModel = prior(PRIOR_EPOCHS)
        self.changed_at = Seconds(0.0)  # when the last plan was put in force

    # --- events and views

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from `event`: an epoch, telemetry, the end of a job, or a plan put in force."""
        match event:
            case EpochSeen():
                self._epoch(event, now)
            case StepsSeen():
                history = self.histories[event.job]
                history.steps = max(history.steps, event.step)
                history.samples = max(history.samples, event.samples_done)
                family = self.families[event.family]
                family.add(event.nodes, event.slots, event.global_batch, event.samples_per_s)
            case JobEnded():
                self._end(event)
            case PlanTaken(waiting=waiting):
                self.changed_at = now
                for name in waiting:
                    history = self.histories[name]
                    if history.limit:
                        history.limit = resumed(history.limit, history.bounds)

    def _epoch(self, event: EpochSeen, now: Seconds) -> None:
        history = self.histories[event.job]
        history.epoch_due, history.counted_at = True, now
        if event.whole:
            family = self.families[event.family]
            family.add(event.nodes, event.slots, event.global_batch, event.samples_per_s)
        if event.train_loss is not None:
            history.loss = event.train_loss
            if history.first_loss is None:
                history.first_loss = event.train_loss
        if event.stop_metric is not None:
            history.accuracy = event.stop_metric
        if history.epoch_samples and len(history.log) < MAX_LOG_EPOCHS:
            done = event.samples_done or event.epoch * history.epoch_samples
            row = history.features(float(done))
            history.log.append((event.epoch, row))

    def _end(self, event: JobEnded) -> None:
        """Record the log of a job that ended, unless the job was killed or failed."""
        history = self.histories.pop(event.job, None)
        if not event.succeeded or not event.samples_done:
            return
        if history is None or not history.log:
            return
        log = dict(history.log)  # keeps the last entry of a repeated epoch
        epochs = np.array(sorted(log), dtype=np.float64)
        rows = np.array([log[int(epoch)] for epoch in epochs]).reshape(-1, FEATURES)
        self._finished.append(points_of(rows, epochs))

    def update(self, jobs: Iterable[JobView], now: Seconds, *, contended: bool) -> None:
        """Record new jobs, and update R of running jobs that finished an epoch."""
        jobs = list(jobs)
        if len(self.histories) > 2 * len(jobs) + 100:  # late events of ended jobs create entries
            active = {job.job for job in jobs}
            for name in self.histories.keys() - active:
                del self.histories[name]
        for job in jobs:
            history = self.histories[job.job]
            if not history.limit:
                history.limit = job.batch_size
                self._submitted.append(job.submitted_at)
            history.bounds = self._bounds(job)
            if job.epoch_samples:
                history.epoch_samples = job.epoch_samples
                self.families[job.family].epoch_samples = job.epoch_samples
            if job.running_on:
                self._count(job, history, now, contended=contended)

    def _count(
        self, job: JobView, history: PaperJobHistory, now: Seconds, *, contended: bool
    ) -> None:
        """Update R after an epoch (paper), or after a report interval of a long epoch (here)."""
        piece = self._options.report_interval_s
        since = max(history.counted_at, job.moved_at)
        if piece and now - since > piece and self.warm(job):
            history.epoch_due, history.counted_at = True, now
        if not history.epoch_due:
            return
        history.epoch_due = False
        history.limit = after_epoch(
            history.limit,
            history.bounds,
            self._options.scale_down,
            ran_s=job.ran_s + max(0.0, now - job.moved_at),
            arrivals_per_s=arrival_rate(self._submitted),
            contended=contended,
        )

    def learn(self, rng: Generator) -> None:
        """Fit the progress model again if jobs have finished; this is too slow for `plan`."""
        if not self._finished:
            return
        for points in self._finished:
            self._sample.offer(points, rng)
        self._finished = []
        self.progress = fit(self._sample.points, self.progress) or self.progress

    # --- estimates

    def warm(self, job: JobView) -> bool:
        """True if the warm-up steps are done (Start) and the job's speed is known."""
        if job.epoch:
            return True
        measured = self.families[job.family].known
        return measured and self.histories[job.job].steps >= self._options.warmup_steps

    def gate(self, job: JobView) -> Seconds:
        """Return when a running job may be changed again if it finishes no epoch earlier."""
        options = self._options
        since = job.moved_at
        if options.gate == "all":
            since = max(since, self.changed_at)
        if job.epoch_at > since:
            return Seconds(since + options.settle_s)
        if not options.report_interval_s:
            return Seconds(np.inf)
        return Seconds(since + max(options.report_interval_s, options.settle_s))

    def epoch_samples(self, job: JobView) -> float:
        """Return ||D|| as reported by the job or its relatives, else a default."""
        known = job.epoch_samples or self.families[job.family].epoch_samples
        return float(known or DEFAULT_EPOCH_BATCHES * job.batch_size)

    def _bounds(self, job: JobView) -> LimitBounds:
        least = job.batch_size if self._options.limit_floor == "first" else 1
        return LimitBounds(first=job.batch_size, least=least, most=job.batch_limit)
