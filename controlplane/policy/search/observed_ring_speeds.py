"""Step times of jobs of fixed batches, as their relatives were measured, and models of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.prediction.ring_step_time import StepModel, StepSample, fit_steps
from schemas.ids import JobId

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
