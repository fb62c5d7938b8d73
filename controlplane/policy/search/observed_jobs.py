"""Observations of single jobs: batch limit R, step times and lengths."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.prediction.lengths import remaining_samples
from controlplane.prediction.step_times import StepModel, StepSample, fit_steps
from schemas.ids import JobId


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """The bounds, in samples per step, of R, the largest batch that a job may have now."""

    first: int  # first batch of the job
    least: int  # lower bound of R
    most: int  # upper limit by the user

    def clip(self, limit: float) -> int:
        """Return `limit`, rounded up and clamped to the bounds."""
        return max(self.least, min(math.ceil(limit), self.most))


def resumed(limit: int, bounds: LimitBounds) -> int:
    """Return half of R, for a job that the next schedule leaves waiting (the Resume rule)."""
    return bounds.clip(limit // 2)


@dataclass(slots=True)
class JobHistory:
    """History of an active job."""

    bounds: LimitBounds = LimitBounds(1, 1, 1)
    limit: int = 0  # R, samples per step; 0: the job was in no view yet
    steps: int = 0  # steps done, by telemetry
    samples: int = 0  # Y_processed, by telemetry


SMOOTHING: Final = 0.3  # weight of the newest sample at one size
MAX_SIZES: Final = 100  # latest sizes of each family; bounds memory and the time of a fit
MAX_STEP_S: Final = 1e7  # longer steps are implausible
MAX_RELATIVES: Final = 200  # kept totals of finished jobs; bounds memory
DEFAULT_STEPS: Final = 1000  # assumed steps of a job without any information


@dataclass(slots=True)
class _Family:
    """Measurements of jobs with one script and model; lengths are in samples."""

    steps: dict[tuple[int, int], float] = field(default_factory=dict)  # (slots, batch) -> seconds
    fitted: dict[tuple[int, int], float] = field(default_factory=dict)  # steps at the last fit
    models: dict[int, StepModel] = field(default_factory=dict)  # models by batch
    finished: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    reached: int = 0  # samples done by the job furthest ahead
    left: dict[int, float] = field(default_factory=dict)  # done -> left, cleared by events


class StepTimesByFamily:
    """The step times by number of slots and family; a job without a family is its own family.

    Args:
        drift: relative change of a measured step time at which models are fitted again.
    """

    def __init__(self, drift: float = 0.0) -> None:
        self._drift = drift
        self._families: dict[str, _Family] = {}

    def observe(self, event: PolicyEvent) -> None:
        """Record the step time of an epoch of one group, or of telemetry, if it is plausible."""
        if not isinstance(event, EpochSeen | StepsSeen):
            return
        if isinstance(event, EpochSeen) and not event.whole:
            return
        rate = event.samples_per_s
        if not (math.isfinite(rate) and rate > 0 and event.slots and event.global_batch):
            return
        step_s = event.global_batch / rate
        if not 0.0 < step_s < MAX_STEP_S:
            return
        family = self._family(event.family, event.job)
        size = (event.slots, event.global_batch)
        known = family.steps.pop(size, step_s)
        now = family.steps[size] = known + SMOOTHING * (step_s - known)  # newest entry last
        if len(family.steps) > MAX_SIZES:
            del family.steps[next(iter(family.steps))]
        before = family.fitted.get(size)
        if before is None or abs(now / before - 1.0) >= self._drift:
            family.models.clear()
            family.fitted = dict(family.steps)

    def model(self, job: JobView) -> StepModel:
        """Return the model for the job's batch; its times are relative if nothing was measured."""
        family = self._family(job.family, job.job)
        model = family.models.get(job.batch_size)
        if model is None:
            samples = [StepSample(w, batch, s) for (w, batch), s in family.steps.items()]
            model = family.models[job.batch_size] = fit_steps(samples, job.batch_size)
        return model

    def forget(self, job: JobId) -> None:
        """Remove the measurements of an ended job without a family."""
        self._families.pop(f"job {job}", None)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())


class ObservedJobs(StepTimesByFamily):
    """Speeds and lengths by family; a job without a family is its own family.

    Args:
        count_epochs: True if epochs update lengths, as telemetry and ends of jobs do.
    """

    def __init__(self, drift: float = 0.0, *, count_epochs: bool = False) -> None:
        super().__init__(drift)
        self._count_epochs = count_epochs

    def observe(self, event: PolicyEvent) -> None:
        """Learn speeds and lengths from `event`."""
        super().observe(event)
        if isinstance(event, StepsSeen | JobEnded) or (
            isinstance(event, EpochSeen) and self._count_epochs
        ):
            family = self._family(event.family, event.job)
            family.reached = max(family.reached, event.samples_done)
            family.left.clear()
        if isinstance(event, JobEnded):
            if event.succeeded and event.samples_done:
                family.finished.append(event.samples_done)
            self.forget(event.job)

    def step_s(self, job: JobView, slots: int) -> float:
        """Return the seconds of a step with the user's batch, or a relative time if unmeasured."""
        return self.model(job).step_s(slots, job.batch_size)

    def remaining_steps(self, job: JobView) -> float:
        """Return the number of remaining steps with the user's batch.

        The stated work is used if there is any, else the lengths of the family's finished jobs.
        Without these, a job is expected to do as many steps again as it has done, or else an epoch.
        """
        family, done = self._family(job.family, job.job), job.samples_done
        if job.stop_samples is not None:
            stated = float(job.stop_samples)
            left = remaining_samples(done, stated, family.finished, family.reached)
            return left / job.batch_size
        if done not in family.left:
            family.left[done] = remaining_samples(done, None, family.finished, family.reached)
        left = family.left[done]
        if left <= 0:
            left = float(job.epoch_samples or DEFAULT_STEPS * job.batch_size)
        return left / job.batch_size

    def length_known(self, job: JobView) -> bool:
        """True if the length was stated or a job of the family has finished."""
        return job.stop_samples is not None or bool(self._family(job.family, job.job).finished)
