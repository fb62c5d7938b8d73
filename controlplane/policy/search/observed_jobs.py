"""Observations of single jobs, and step times of jobs with fixed batches.

`StepTimesByFamily` models step times by family; the policies with fixed batches use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.policy.search.batch_limits import LimitBounds
from controlplane.prediction.step_times import StepModel, StepSample, fit_steps
from schemas.ids import JobId


@dataclass(slots=True)
class JobHistory:
    """History of an active job."""

    bounds: LimitBounds = LimitBounds(1, 1, 1)
    limit: int = 0  # R, samples per step; 0: not in a view yet
    steps: int = 0  # by telemetry
    samples: int = 0  # Y_processed, by telemetry


SMOOTHING: Final = 0.3  # weight of the newest sample at one size
MAX_SIZES: Final = 100  # latest sizes of each family; bounds memory and the time of a fit
MAX_STEP_S: Final = 1e7  # longer steps are implausible


@dataclass(slots=True)
class _Family:
    """Measurements of one family: jobs with the same script and model."""

    steps: dict[tuple[int, int], float] = field(default_factory=dict)  # (slots, batch) -> seconds
    fitted: dict[tuple[int, int], float] = field(default_factory=dict)  # what models are fitted to
    models: dict[int, StepModel] = field(default_factory=dict)  # by batch


class StepTimesByFamily:
    """Step times by number of slots and family; a job without a family is a family of its own.

    Args:
        drift: relative change of a measured step time at which models are fitted again.
    """

    def __init__(self, drift: float = 0.0) -> None:
        self._drift = drift
        self._families: dict[str, _Family] = {}

    def observe(self, event: EpochSeen | StepsSeen) -> None:
        """Record the step time of `event`; ignore implausible speeds.

        An epoch counts only if its group was the same throughout.
        """
        rate = event.samples_per_s
        if isinstance(event, EpochSeen) and not event.whole:
            return
        if not (math.isfinite(rate) and rate > 0 and event.slots and event.global_batch):
            return
        step_s = event.global_batch / rate
        if not 0.0 < step_s < MAX_STEP_S:
            return
        family = self._family(event.family, event.job)
        size = (event.slots, event.global_batch)
        known = family.steps.pop(size, step_s)
        now = family.steps[size] = known + SMOOTHING * (step_s - known)  # the newest entry is last
        if len(family.steps) > MAX_SIZES:
            del family.steps[next(iter(family.steps))]
        before = family.fitted.get(size)
        if before is None or abs(now / before - 1.0) >= self._drift:
            family.models.clear()
            family.fitted = dict(family.steps)

    def model(self, job: JobView) -> StepModel:
        """Return the model for the job's batch; times are relative if nothing was measured."""
        family = self._family(job.family, job.job)
        model = family.models.get(job.batch_size)
        if model is None:
            samples = [StepSample(w, batch, s) for (w, batch), s in family.steps.items()]
            model = family.models[job.batch_size] = fit_steps(samples, job.batch_size)
        return model

    def forget(self, job: JobId) -> None:
        """Remove a job that has ended; only measurements of families are kept."""
        self._families.pop(f"job {job}", None)

    def _family(self, name: str, job: JobId) -> _Family:
        return self._families.setdefault(name or f"job {job}", _Family())
