"""What every search remembers of jobs: R and what moves it, and how often jobs are submitted.

Step times of jobs of fixed batches, as their relatives were measured, and models of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.policy.search.batch_limits import LimitBounds, ScaleDown, after_epoch
from controlplane.prediction.step_times import StepModel, StepSample, fit_steps
from schemas.ids import JobId, Seconds

KEPT_ARRIVALS: Final = 200  # lambda of the latest submissions, not of last week's


@dataclass(slots=True)
class JobHistory:
    """What is remembered of an active job."""

    bounds: LimitBounds = LimitBounds(1, 1, 1)
    limit: int = 0  # R, samples per step; 0: never seen in a view
    steps: int = 0  # that telemetry reported
    samples: int = 0  # Y_processed, by telemetry
    epoch_due: bool = False  # an epoch ended since R was last looked at
    counted_at: Seconds = Seconds(0.0)  # when the last epoch, or piece of a long one, was counted

    def count_epoch(
        self,
        job: JobView,
        now: Seconds,
        reading: ScaleDown,
        arrivals_per_s: float,
        *,
        contended: bool,
        gradual: bool,
    ) -> None:
        """Move R as after an epoch; the next one is not due yet.

        Args:
            now: seconds on the controller's clock.
        """
        self.epoch_due = False
        self.limit = after_epoch(
            self.limit,
            self.bounds,
            reading,
            ran_s=job.ran_s + max(0.0, now - job.moved_at),
            arrivals_per_s=arrivals_per_s,
            contended=contended,
            gradual=gradual,
        )


class ArrivalRate:
    """Lambda: the mean rate of submissions, over the latest of them."""

    def __init__(self) -> None:
        self._submitted: deque[Seconds] = deque(maxlen=KEPT_ARRIVALS)

    def add(self, submitted_at: Seconds) -> None:
        """One more job came.

        Args:
            submitted_at: seconds on the controller's clock.
        """
        self._submitted.append(submitted_at)

    @property
    def per_s(self) -> float:
        """Jobs per second; 0 until two came at different times."""
        if len(self._submitted) < 2:  # noqa: PLR2004 - an interval has two ends
            return 0.0
        first, last = min(self._submitted), max(self._submitted)
        return (len(self._submitted) - 1) / (last - first) if last > first else 0.0


SMOOTHING: Final = 0.3  # weight of the newest of several samples at one size
KEPT_SIZES: Final = 100  # the latest of each family: a bound on memory and the time of a fit
LONGEST_S: Final = 1e7  # of a step that anybody waits for


@dataclass(slots=True)
class _Family:
    """Jobs of one script and model."""

    steps: dict[tuple[int, int], float] = field(default_factory=dict)  # (slots, batch) -> seconds
    fitted: dict[tuple[int, int], float] = field(default_factory=dict)  # as the models know them
    models: dict[int, StepModel] = field(default_factory=dict)  # by batch


class RingSpeeds:
    """How long steps take on so many slots, by family; a job without one is a family of its own."""

    def __init__(self, drift: float = 0.0) -> None:
        """Begin with nothing measured.

        Args:
            drift: relative change of a measured time that makes models be fitted again.
        """
        self._drift = drift
        self._families: dict[str, _Family] = {}

    def observe(self, event: EpochSeen | StepsSeen) -> None:
        """Learn how long steps took; a speed that makes no sense is passed over.

        Args:
            event: an epoch counts if its group was the same through all of it.
        """
        rate = event.samples_per_s
        if isinstance(event, EpochSeen) and not event.whole:
            return
        if not (math.isfinite(rate) and rate > 0 and event.slots and event.global_batch):
            return
        step_s = event.global_batch / rate
        if not 0.0 < step_s < LONGEST_S:
            return
        family = self._family(event.family, event.job)
        size = (event.slots, event.global_batch)
        known = family.steps.pop(size, step_s)
        now = family.steps[size] = known + SMOOTHING * (step_s - known)  # the newest is the last
        if len(family.steps) > KEPT_SIZES:
            del family.steps[next(iter(family.steps))]
        before = family.fitted.get(size)
        if before is None or abs(now / before - 1.0) >= self._drift:
            family.models.clear()
            family.fitted = dict(family.steps)

    def model(self, job: JobView) -> StepModel:
        """Of its user's batch; relative times before anything was measured."""
        family = self._family(job.family, job.job)
        model = family.models.get(job.batch_size)
        if model is None:
            samples = [StepSample(w, batch, s) for (w, batch), s in family.steps.items()]
            model = family.models[job.batch_size] = fit_steps(samples, job.batch_size)
        return model

    def forget(self, job: JobId) -> None:
        """It has ended: nobody else learns from it, unless it has relatives."""
        self._families.pop(f"job {job}", None)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())
