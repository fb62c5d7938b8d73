"""Remaining work of every job by the chosen model, and the calibration of the model.

Predictions are kept until their jobs have finished, and are then compared with the actual lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PolicyEvent, StepsSeen
from controlplane.policy.ones.length_evidence import FamilyLengths, JobEvidence, WorkLeft, exactly
from controlplane.policy.ones.length_models import (
    BetaProgress,
    LengthMixture,
    LengthModel,
    ResidualLife,
)
from controlplane.policy.options import LengthModelName
from schemas.ids import JobId

KEEP_RATIO: Final = 1.25  # factor of work done between kept predictions
MAX_KEPT: Final = 60  # kept predictions of one job
MAX_OUTCOMES: Final = 2000  # kept outcomes
MIN_LEFT: Final = 0.02  # share of the total; shorter remainders do not count


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prediction compared with the actual length."""

    error: float  # absolute, as a share of the remaining work
    ratio: float  # predicted over actual
    in_wide: bool  # inside the 90% interval
    in_narrow: bool  # inside the 80% interval


@dataclass(frozen=True, slots=True)
class Calibration:
    """Accuracy of the predictions of remaining work."""

    predictions: int
    median_error: float  # absolute, as a share of the remaining work
    wide: float  # share inside the 90% interval
    narrow: float  # share inside the 80% interval


@dataclass(slots=True)
class _Predictions:
    next_at: float = 0.0  # samples done at which the next prediction is kept
    made: list[tuple[float, WorkLeft]] = field(default_factory=list)  # with the samples done


class LengthCalibration:
    """Predictions of active jobs, and outcomes of the latest finished ones."""

    def __init__(self) -> None:
        self._predictions: dict[JobId, _Predictions] = {}
        self.outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)

    def due(self, job: JobId, done: float) -> bool:
        """True if a prediction would be kept now."""
        known = self._predictions.get(job)
        return known is None or (done >= known.next_at and len(known.made) < MAX_KEPT)

    def add(self, job: JobId, done: float, left: WorkLeft) -> None:
        """Keep a prediction."""
        known = self._predictions.setdefault(job, _Predictions())
        known.made.append((done, left))
        known.next_at = max(done, 1.0) * KEEP_RATIO

    def ended(self, job: JobId, total: float, *, succeeded: bool) -> None:
        """Compare a job's predictions with its total, if it succeeded."""
        known = self._predictions.pop(job, None)
        if known is None or not succeeded:
            return
        for done, predicted in known.made:
            left = total - done
            if left > MIN_LEFT * total:
                wide, narrow = predicted.within(left)
                error = abs(predicted.mean - left) / left
                self.outcomes.append(Outcome(error, predicted.mean / left, wide, narrow))

    def forget(self, active: set[JobId]) -> None:
        """Drop the predictions of jobs that are not active."""
        self._predictions = {job: own for job, own in self._predictions.items() if job in active}

    def summary(self) -> Calibration | None:
        """Return the accuracy of the latest predictions; None before the first job has finished."""
        seen = self.outcomes
        if not seen:
            return None
        return Calibration(
            predictions=len(seen),
            median_error=median(outcome.error for outcome in seen),
            wide=sum(outcome.in_wide for outcome in seen) / len(seen),
            narrow=sum(outcome.in_narrow for outcome in seen) / len(seen),
        )


MODELS: Final[dict[LengthModelName, Callable[[], LengthModel]]] = {
    "residual": ResidualLife,
    "beta": BetaProgress,
    "mixture": LengthMixture,
}

MAX_INACTIVE: Final = 100  # ended jobs whose state may be kept


class _Cached(NamedTuple):
    """Cached prediction, valid while the job and its inputs stay the same."""

    view: JobView
    key: tuple[float, int, int]
    left: WorkLeft | None


class JobLengths:
    """Remaining work of jobs, updated by policy events."""

    def __init__(self, model: LengthModelName) -> None:
        self._model = MODELS[model]()
        self._families: dict[str, FamilyLengths] = {}
        self._own = JobEvidence()
        self._calibration = LengthCalibration()
        self._cache: dict[JobId, _Cached] = {}  # last prediction of each job
        self._edition = 0  # ended jobs, which change predictions

    def observe(self, event: PolicyEvent) -> None:
        """Learn from an epoch, telemetry or the end of a job; ignore other events."""
        match event:
            case EpochSeen():
                family = self.family(event.family)
                self._own.epoch(event)
                self._model.epoch(event, family)
                family.progressed(event.job, event.samples_done)
            case StepsSeen():
                self.family(event.family).progressed(event.job, event.samples_done)
            case JobEnded():
                family, total = self.family(event.family), event.samples_done
                family.ended(event.job, total, succeeded=event.succeeded)
                self._own.ended(event.job, event.family, total, succeeded=event.succeeded)
                self._model.ended(event, family)
                self._cache.pop(event.job, None)
                self._edition += 1
                self._calibration.ended(event.job, total, succeeded=event.succeeded)
            case _:
                return

    def forget(self, active: Collection[JobId]) -> None:
        """Drop the state of jobs that are not active, if there are many of them."""
        if self._own.known <= 2 * len(active) + MAX_INACTIVE:
            return
        there = set(active)
        self._own.forget(there)
        self._model.forget(there)
        self._calibration.forget(there)
        self._cache = {job: cached for job, cached in self._cache.items() if job in there}
        for family in self._families.values():
            family.at_work = {job: done for job, done in family.at_work.items() if job in there}

    def family(self, name: str) -> FamilyLengths:
        """Return the lengths of a family; create empty ones if there are none."""
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = FamilyLengths()
        return found

    def left(self, job: JobView, *, bounds: bool = True) -> WorkLeft | None:
        """Return the work that a job has left; None if nothing is known.

        Args:
            bounds: compute quantiles too.
        """
        family = self.family(job.family)
        if job.epoch_samples:
            family.epoch_samples = job.epoch_samples
        done = float(max(job.samples_done, family.at_work.get(job.job, 0)))
        certain = self._own.certain(job, done)
        if certain is not None:
            return exactly(certain)
        key = (done, self._edition, 0 if family.finished else family.reached)
        cached = self._cache.get(job.job)
        if cached is not None and cached.view is job and cached.key == key and not bounds:
            return cached.left
        due = self._calibration.due(job.job, done)
        found = self._model.left(job, family, done, self._own, bounds=bounds or due)
        self._cache[job.job] = _Cached(job, key, found)
        if found is not None and due:
            self._calibration.add(job.job, done, found)
        return found

    def remaining(self, job: JobView) -> float | None:
        """Return the mean of the remaining work, samples; None if nothing is known."""
        found = self.left(job, bounds=False)
        return None if found is None else found.mean

    def is_settled(self, job: JobView) -> bool:
        """True if the remaining work depends on the job's progress alone until some job ends."""
        if job.stop_samples is not None and not self._own.leaves_early(job.family):
            return True
        return isinstance(self._model, ResidualLife) and bool(self.family(job.family).finished)

    def informed(self, job: JobId) -> bool:
        """True if the last prediction rests on more than the job's age."""
        cached = self._cache.get(job)
        return cached is not None and cached.left is not None and cached.left.informed

    @property
    def calibration(self) -> Calibration | None:
        """Accuracy of the model on finished jobs; None before the first."""
        return self._calibration.summary()
