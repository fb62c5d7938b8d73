"""Remaining work of every job: the models of option `length_model`, and their calibration.

`BetaProgress` is the paper's Beta distribution of progress (ONES section 3.2.1). The paper fits one
regression to all jobs. Here each family has its own once one of its jobs has finished, because the
lengths of families differ by orders of magnitude, which the five features do not explain.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from scipy.special import betaincinv

from controlplane.policy.api import (
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    SearchStats,
    StepsSeen,
)
from controlplane.policy.ones.length_evidence import (
    SHARES,
    FamilyLengths,
    JobEvidence,
    SpreadOfLengths,
    WorkLeft,
)
from controlplane.policy.options import LengthModelName
from controlplane.policy.search.observed_families import MAX_RELATIVES
from controlplane.prediction import FloatArray
from controlplane.prediction.lengths import (
    LengthDistribution,
    of_relatives,
    one_length,
    remaining_samples,
)
from controlplane.prediction.progress_distribution import (
    FEATURES,
    Points,
    ProgressModel,
    features,
    fit,
    points_of,
)
from schemas.ids import JobId

MIN_OTHER_JOBS: Final = 3  # finished jobs needed before other families are used
MIN_OTHER_SPREAD: Final = 0.3  # lower bound of the spread of log epochs over these jobs


class ResidualLife:
    """The mean residual life of finished relatives; base class of the other models."""

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """Record a finished epoch."""

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Record the end of a job; `family` already contains the job's length."""

    def forget(self, active: set[JobId]) -> None:
        """Drop the state of jobs that are not active."""

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: JobEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """Return the remaining work of a job without a certain end, or None if nothing is known.

        With `bounds`, the result has quantiles, which take up to ten times as long.
        """
        if not family.finished and not max(done, family.reached):
            return None
        mean = remaining_samples(done, None, family.finished, family.reached)
        informed = bool(family.finished)
        if not bounds:
            return WorkLeft(mean, informed=informed)
        longer = [total - done for total in family.finished if total > done]
        if longer:
            return WorkLeft(mean, tuple(np.quantile(longer, SHARES).tolist()), informed=informed)
        # No relative trained for longer. Assume that half of such jobs last twice as long.
        reached = max(done, family.reached)
        as_old = tuple(reached / (1.0 - share) - done for share in SHARES)
        return WorkLeft(mean, as_old, informed=informed)


class LengthMixture(ResidualLife):
    """Mixture of the relatives' lengths, weighted by the evidence on the job's own length."""

    def __init__(self) -> None:
        self._spread = SpreadOfLengths()
        self._epochs: dict[JobId, int] = {}  # finished epochs of active jobs
        self._other_epochs: deque[int] = deque(maxlen=MAX_RELATIVES)  # epochs of finished jobs
        self._families: dict[str, FamilyLengths] = {}

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """Record the job's epochs, which later predict jobs of families without a finished job."""
        self._epochs[event.job] = max(self._epochs.get(event.job, 0), event.epoch)

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Update the spread of lengths, and the epochs of finished jobs."""
        self._families[event.family] = family
        epochs = self._epochs.pop(event.job, 0)
        if event.succeeded:
            self._spread.update(self._families.values())
            if epochs:
                self._other_epochs.append(epochs)

    def forget(self, active: set[JobId]) -> None:
        """Drop the epochs of jobs that are not active."""
        self._epochs = {job: many for job, many in self._epochs.items() if job in active}

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: JobEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """Return the mean residual life by the mixture, clamped to the bounds that are certain."""
        likely = self._from_other_families(job)
        if family.finished:
            spread = self._spread.of(job.family, family)
            likely = of_relatives(family.finished, family.censored(job.job), spread)
        for evidence in own.evidence(job, done):
            likely = likely.given(evidence) if likely is not None else one_length(evidence)
        if likely is None:
            left = super().left(job, family, done, own, bounds=bounds)
        else:
            quantiles = likely.quantiles_left(done, SHARES) if bounds else []
            left = WorkLeft(likely.mean_left(done), tuple(quantiles))
        if left is None:
            return None
        least, most = own.bounds(job, done)
        return left.between(least, most)

    def _from_other_families(self, job: JobView) -> LengthDistribution | None:
        """Return the lengths by the epochs of other families' jobs, or None if too few finished."""
        if not job.epoch_samples or len(self._other_epochs) < MIN_OTHER_JOBS:
            return None
        totals = [float(epochs * job.epoch_samples) for epochs in self._other_epochs]
        return of_relatives(totals, [], max(MIN_OTHER_SPREAD, float(np.std(np.log(totals)))))


MAX_LOGS: Final = 20  # logs of one family
MAX_LOG_EPOCHS: Final = 100  # entries of one log
MAX_COMMON_LOGS: Final = 40  # logs of all families, used for new families
MIN_PROGRESS: Final = 1e-6  # lower bound of a divisor
MIN_LEFT: Final = 1e-3  # least remaining work, as a share of the work done


@dataclass(slots=True)
class _Log:
    first_loss: float | None = None
    rows: dict[int, FloatArray] = field(default_factory=dict)  # features after each epoch

    def points(self) -> Points:
        epochs = np.array(sorted(self.rows), dtype=np.float64)
        rows = np.array([self.rows[int(epoch)] for epoch in epochs]).reshape(-1, FEATURES)
        return points_of(rows, epochs)


@dataclass(slots=True)
class _Regression:
    logs: deque[Points]
    due: bool = False
    model: ProgressModel | None = None

    def add(self, points: Points) -> None:
        if len(points):
            self.logs.append(points)
            self.due = True

    def fitted(self) -> ProgressModel | None:
        if self.due:
            self.due = False
            every = Points(
                np.concatenate([log.features for log in self.logs]),
                np.concatenate([log.epochs for log in self.logs]),
                np.concatenate([log.progress for log in self.logs]),
            )
            self.model = fit(every, self.model) or self.model
        return self.model


class BetaProgress(ResidualLife):
    """A model in which the progress after some epochs is distributed as Be(epochs, A x + b)."""

    def __init__(self) -> None:
        self._logs: dict[JobId, _Log] = {}
        self._families: dict[str, _Regression] = {}
        self._common = _Regression(deque(maxlen=MAX_COMMON_LOGS))

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """Add an entry for the epoch to the job's log."""
        log = self._logs.setdefault(event.job, _Log())
        if log.first_loss is None:
            log.first_loss = event.train_loss
        if len(log.rows) < MAX_LOG_EPOCHS and event.epoch > 0:
            log.rows[event.epoch] = features(
                float(family.epoch_samples),
                log.first_loss,
                event.samples_done,
                event.train_loss,
                event.stop_metric,
            )

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Add the job's log to the regressions if the job succeeded."""
        log = self._logs.pop(event.job, None)
        if log is None or not event.succeeded:
            return
        own = self._families.setdefault(event.family, _Regression(deque(maxlen=MAX_LOGS)))
        points = log.points()
        own.add(points)
        self._common.add(points)

    def forget(self, active: set[JobId]) -> None:
        """Drop the logs of jobs that are not active."""
        self._logs = {job: log for job, log in self._logs.items() if job in active}

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: JobEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """Return the remaining work that the mean progress implies, or else the residual life."""
        log, relatives = self._logs.get(job.job, _Log()), self._families.get(job.family)
        model = (relatives.fitted() if relatives is not None else None) or self._common.fitted()
        epoch_samples = job.epoch_samples or family.epoch_samples
        if model is None or not epoch_samples:
            return super().left(job, family, done, own, bounds=bounds)
        last = max(log.rows, default=0)
        unseen = features(float(family.epoch_samples), log.first_loss, 0.0, None)
        row = log.rows.get(last, unseen)
        epochs = np.array([float(max(last, 1))])
        alpha, beta = model.shapes(row[None, :], epochs)
        came = float(epochs[0]) * epoch_samples
        least = MIN_LEFT * max(done, 1.0)
        mean = max(came * float((alpha + beta)[0] / alpha[0]) - done, least)
        if not bounds:
            return WorkLeft(mean)
        progress = np.maximum(betaincinv(alpha, beta, 1.0 - np.array(SHARES)), MIN_PROGRESS)
        return WorkLeft(mean, tuple(np.maximum(came / progress - done, least).tolist()))


# --- calibration

KEEP_RATIO: Final = 1.25  # work done grows by this factor between kept predictions
MAX_KEPT: Final = 60  # kept predictions of one job
MAX_OUTCOMES: Final = 2000  # kept outcomes
MIN_REMAINDER: Final = 0.02  # share of the total; shorter remainders are not compared


class _Outcome(NamedTuple):
    """Comparison of a prediction with the actual length."""

    error: float  # absolute, as a share of the remaining work
    in_wide: bool  # inside the 90% interval
    in_narrow: bool  # inside the 80% interval


@dataclass(slots=True)
class _Predictions:
    next_at: float = 0.0  # samples done at which the next prediction is kept
    made: list[tuple[float, WorkLeft]] = field(default_factory=list)  # (samples done, prediction)


class LengthCalibration:
    """The predictions for active jobs, and their outcomes for the jobs that finished last."""

    def __init__(self) -> None:
        self._predictions: dict[JobId, _Predictions] = {}
        self._outcomes: deque[_Outcome] = deque(maxlen=MAX_OUTCOMES)

    def due(self, job: JobId, done: float) -> bool:
        """True if a prediction made now would be kept."""
        known = self._predictions.get(job)
        return known is None or (done >= known.next_at and len(known.made) < MAX_KEPT)

    def add(self, job: JobId, done: float, left: WorkLeft) -> None:
        """Keep a prediction that was made after `done` samples."""
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
            if left > MIN_REMAINDER * total:
                low, lower, upper, high = predicted.quantiles
                error = abs(predicted.mean - left) / left
                inside = low <= left <= high, lower <= left <= upper
                self._outcomes.append(_Outcome(error, *inside))

    def forget(self, active: set[JobId]) -> None:
        """Drop the predictions of jobs that are not active."""
        self._predictions = {job: own for job, own in self._predictions.items() if job in active}

    def added_to(self, stats: SearchStats) -> SearchStats:
        """Return `stats` with the accuracy of predictions, or unchanged if none has an outcome."""
        seen = self._outcomes
        if not seen:
            return stats
        return replace(
            stats,
            length_predictions=len(seen),
            length_error=median(outcome.error for outcome in seen),
            length_coverage_80=sum(outcome.in_narrow for outcome in seen) / len(seen),
            length_coverage_90=sum(outcome.in_wide for outcome in seen) / len(seen),
        )


MODELS: Final[dict[LengthModelName, type[ResidualLife]]] = {
    "residual": ResidualLife,
    "beta": BetaProgress,
    "mixture": LengthMixture,
}

MAX_INACTIVE: Final = 100  # number of ended jobs with kept state


class _Cached(NamedTuple):
    """Cached prediction, valid while the job's view and the model's inputs stay the same."""

    view: JobView
    key: tuple[float, int, int]
    left: WorkLeft | None


class JobLengths:
    """The predictions of the remaining work of jobs, updated by policy events."""

    def __init__(self, model: LengthModelName) -> None:
        self._model = MODELS[model]()
        self.families: defaultdict[str, FamilyLengths] = defaultdict(FamilyLengths)
        self._own = JobEvidence()
        self.calibration = LengthCalibration()
        self._cache: dict[JobId, _Cached] = {}  # last prediction of each job
        self._edition = 0  # number of ended jobs; each end changes predictions

    def observe(self, event: PolicyEvent) -> None:
        """Learn from an epoch, telemetry or the end of a job; ignore other events."""
        match event:
            case EpochSeen():
                family = self.families[event.family]
                self._own.epoch(event)
                self._model.epoch(event, family)
                family.progressed(event.job, event.samples_done)
            case StepsSeen():
                self.families[event.family].progressed(event.job, event.samples_done)
            case JobEnded():
                family, total = self.families[event.family], event.samples_done
                family.ended(event.job, total, succeeded=event.succeeded)
                self._own.ended(event.job, event.family, total, succeeded=event.succeeded)
                self._model.ended(event, family)
                self._cache.pop(event.job, None)
                self._edition += 1
                self.calibration.ended(event.job, total, succeeded=event.succeeded)

    def forget(self, active: Collection[JobId]) -> None:
        """Drop the state of jobs that are not active, if many such jobs have accumulated."""
        if self._own.known <= 2 * len(active) + MAX_INACTIVE:
            return
        there = set(active)
        self._own.forget(there)
        self._model.forget(there)
        self.calibration.forget(there)
        self._cache = {job: cached for job, cached in self._cache.items() if job in there}
        for family in self.families.values():
            family.at_work = {job: done for job, done in family.at_work.items() if job in there}

    def _left(self, job: JobView) -> WorkLeft | None:
        """Return the remaining work of a job, or None if nothing is known."""
        family = self.families[job.family]
        if job.epoch_samples:
            family.epoch_samples = job.epoch_samples
        done = float(max(job.samples_done, family.at_work.get(job.job, 0)))
        certain = self._own.certain(job, done)
        if certain is not None:
            return WorkLeft(certain)
        key = (done, self._edition, 0 if family.finished else family.reached)
        cached = self._cache.get(job.job)
        if cached is not None and cached.view is job and cached.key == key:
            return cached.left
        due = self.calibration.due(job.job, done)
        found = self._model.left(job, family, done, self._own, bounds=due)
        self._cache[job.job] = _Cached(job, key, found)
        if found is not None and due:
            self.calibration.add(job.job, done, found)
        return found

    def remaining(self, job: JobView) -> float | None:
        """Return the mean of the remaining work, in samples, or None if nothing is known."""
        found = self._left(job)
        return None if found is None else found.mean

    def is_settled(self, job: JobView) -> bool:
        """True if, until some job ends, the remaining work depends only on the job's progress."""
        if job.stop_samples is not None and not self._own.leaves_early(job.family):
            return True
        return type(self._model) is ResidualLife and bool(self.families[job.family].finished)

    def informed(self, job: JobId) -> bool:
        """True if the last prediction for a job is based on more than the job's age."""
        cached = self._cache.get(job)
        return cached is not None and cached.left is not None and cached.left.informed
