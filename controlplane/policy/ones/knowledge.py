"""What the search has learnt: speeds and lengths per family, batch limits per job."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobEnded, JobView, News, PlanTaken, StepsSeen
from controlplane.policy.ones.batch_limits import Bounds, after_epoch, resumed
from controlplane.policy.ones.options import OnesOptions
from controlplane.prediction.throughput import Sample, SpeedModel, fit
from controlplane.prediction.work import remaining_samples
from schemas.ids import JobId, Seconds

SMOOTHING: Final = 0.3  # weight of the newest of several samples at one size
LONGEST_S: Final = 1e7  # of a step that anybody waits for
DRIFT: Final = 0.15  # change of a mean that makes the model be fitted again
FULL_WEIGHT: Final = 10.0  # samples after which one size counts no more
KEPT_RELATIVES: Final = 200
KEPT_ARRIVALS: Final = 200


@dataclass(slots=True)
class _Mean:
    step_s: float
    fitted: float  # its value when the model was last fitted
    weight: float = 1.0


@dataclass(slots=True)
class Family:
    """Jobs of one script and model."""

    means: dict[tuple[int, int, int], _Mean] = field(default_factory=dict)
    finished: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RELATIVES))
    reached: int = 0  # samples, by the job that came furthest
    largest: int = 1  # slots that any of them ran on
    edition: int = 0  # of the model
    model: SpeedModel | None = None

    def take(self, nodes: int, slots: int, local_batch: int, step_s: float) -> None:
        """One more measurement; the model is fitted again when it tells something new."""
        if not 0.0 < step_s < LONGEST_S:
            return
        self.largest = max(self.largest, slots)
        mean = self.means.get((nodes, slots, local_batch))
        if mean is None:
            self.means[nodes, slots, local_batch] = _Mean(step_s, step_s)
            self.model = None
            return
        mean.step_s += SMOOTHING * (step_s - mean.step_s)
        mean.weight = min(FULL_WEIGHT, mean.weight + 1.0)
        if abs(mean.step_s / mean.fitted - 1.0) > DRIFT:
            self.model = None

    def speed(self, first_batch: int) -> SpeedModel:
        """How long its steps take."""
        if self.model is None:
            samples = [
                Sample(nodes, slots, local_batch, mean.step_s, mean.weight)
                for (nodes, slots, local_batch), mean in self.means.items()
            ]
            self.model = fit(samples, first_batch)
            self.edition += 1
            for mean in self.means.values():
                mean.fitted = mean.step_s
        return self.model


@dataclass(slots=True)
class _Progress:
    """What is remembered of one job."""

    bounds: Bounds = Bounds(1, 1)
    limit: int = 0  # R
    group: tuple[int, int] = (-1, 0)  # version and global batch of the last telemetry
    samples: int = 0
    step: int = 0
    reported_at: Seconds = Seconds(0.0)  # the last epoch or report interval that ended
    slots: int = 0  # that it was seen on last
    gave_back: int = 0  # slots that it had when it gave some up for nobody
    gave_back_at: Seconds = Seconds(-1e9)
    epoch_due: bool = False  # an epoch ended since the limit was last looked at


class Knowledge:
    """Takes news in; answers what is known of a job."""

    def __init__(self, options: OnesOptions) -> None:
        self._options = options
        self._families: dict[str, Family] = {}
        self._jobs: dict[JobId, _Progress] = {}
        self._known: set[JobId] = set()
        self._arrivals: deque[Seconds] = deque(maxlen=KEPT_ARRIVALS)

    # --- news

    def observe(self, news: News, now: Seconds) -> None:
        """Learn from `news`."""
        match news:
            case EpochSeen():
                self._epoch(news, now)
            case StepsSeen():
                self._steps(news, now)
            case JobEnded():
                family = self.family(news.family)
                if news.succeeded and news.samples_done:
                    family.finished.append(news.samples_done)
                family.reached = max(family.reached, news.samples_done)
                self._jobs.pop(news.job, None)
                self._known.discard(news.job)
            case PlanTaken(waiting=waiting):
                for name in waiting:
                    progress = self._jobs.get(name)
                    if progress is not None:
                        progress.limit = resumed(progress.limit, progress.bounds)

    def _epoch(self, news: EpochSeen, now: Seconds) -> None:
        progress = self._job(news.job)
        progress.epoch_due, progress.reported_at = True, now
        progress.limit = max(progress.limit, news.global_batch)
        sane = math.isfinite(news.samples_per_s) and news.samples_per_s > 0
        if news.whole and news.slots and sane:
            local = max(1, round(news.global_batch / news.slots))
            step_s = news.global_batch / news.samples_per_s
            self.family(news.family).take(news.nodes, news.slots, local, step_s)

    def _steps(self, news: StepsSeen, now: Seconds) -> None:
        progress = self._job(news.job)
        family = self.family(news.family)
        family.reached = max(family.reached, news.samples_done)
        progress.step = news.step
        group = (news.group, news.global_batch)
        trained = news.samples_done - progress.samples
        again = progress.group == group
        progress.group, progress.samples = group, news.samples_done
        # By the worker's clock: reports that were held up arrive all at once. The first of a group
        # may have been sent before all its members were there.
        speed = news.samples_per_s
        if not again or trained <= 0 or not math.isfinite(speed) or speed <= 0:
            return
        local = max(1, round(news.global_batch / max(1, news.slots)))
        family.take(news.nodes, news.slots, local, news.global_batch / speed)

    def meet(self, jobs: Iterable[JobView], *, contended: bool, now: Seconds) -> None:
        """Take note of arrivals, and move the limits of jobs that reported an epoch."""
        jobs = list(jobs)
        for job in jobs:
            if job.job not in self._known:
                self._known.add(job.job)
                self._arrivals.append(job.submitted_at)
        for job in jobs:
            progress = self._job(job.job)
            progress.bounds = _bounds(job)
            progress.limit = max(progress.limit, job.batch_size)
            if not job.running_on:
                progress.slots = 0
                continue
            slots = len(job.running_on)
            if slots < progress.slots and not contended:
                progress.gave_back, progress.gave_back_at = progress.slots, now
            progress.slots = slots
            long = now - max(progress.reported_at, job.moved_at) > self._options.report_interval_s
            if long and self.warm(job):
                progress.epoch_due, progress.reported_at = True, now
            if progress.epoch_due:
                progress.epoch_due = False
                ran_s = job.ran_s + max(0.0, now - job.moved_at)
                progress.limit = after_epoch(
                    progress.limit,
                    _bounds(job),
                    ran_s,
                    self.arrivals_per_s,
                    self._options.scale_down,
                    contended=contended,
                )

    # --- answers

    @property
    def arrivals_per_s(self) -> float:
        """Lambda: the mean rate of submissions, over the latest of them."""
        times = sorted(self._arrivals)
        if len(times) < 2 or times[-1] <= times[0]:  # noqa: PLR2004 - an interval has two ends
            return 0.0
        return (len(times) - 1) / (times[-1] - times[0])

    def family(self, name: str) -> Family:
        """What is known of a family."""
        return self._families.setdefault(name, Family())

    def limit(self, job: JobView) -> int:
        """R of a job, samples per step."""
        known = self._jobs.get(job.job)
        limit = known.limit if known else job.batch_size
        return _bounds(job).clip(limit)

    def warm(self, job: JobView) -> bool:
        """Whether a job may have more than its least slots.

        It has done its first steps, and how fast they are is known: of it or of a relative.
        """
        progress = self._jobs.get(job.job)
        steps = progress.step if progress else 0
        measured = bool(self.family(job.family).means)
        return job.epoch > 0 or (measured and steps >= self._options.warmup_steps)

    def gated(self, job: JobView, now: Seconds) -> bool:
        """Whether a job has not finished an epoch or report interval since it was last moved.

        Paper: the schedule changes when *all* running jobs have finished an epoch. Here: each job
        by itself, because one slow epoch would hold all others back.
        """
        since = now - job.moved_at
        if job.epoch_at > job.moved_at:
            return since < self._options.settle_s
        return since < self._options.report_interval_s

    def gate(self, job: JobView) -> Seconds:
        """When a gated job may be moved again, if no epoch ends before."""
        wait_s = self._options.report_interval_s
        if job.epoch_at > job.moved_at:
            wait_s = self._options.settle_s
        return Seconds(job.moved_at + wait_s)

    def may_have(self, job: JobView, now: Seconds) -> int | None:
        """Slots that a job should stay below for a while, because it gave them back; None: any."""
        progress = self._jobs.get(job.job)
        if progress is None or now - progress.gave_back_at > self._options.report_interval_s:
            return None
        return progress.gave_back - 1

    def remaining(self, job: JobView) -> float | None:
        """Samples that a job has left; None if nothing at all is known."""
        family = self.family(job.family)
        progress = self._jobs.get(job.job)
        done = max(job.samples_done, progress.samples if progress else 0)
        if job.stop_samples is None and not family.finished and not max(done, family.reached):
            return None
        return remaining_samples(done, job.stop_samples, family.finished, family.reached)

    def _job(self, name: JobId) -> _Progress:
        return self._jobs.setdefault(name, _Progress())


def _bounds(job: JobView) -> Bounds:
    return Bounds(job.batch_size, job.batch_limit)
