"""Remaining work of jobs: the mean residual life of finished relatives, and its calibration.

ONES (section 3.2.1) fits a Beta distribution of progress to all jobs, which policy `ones-paper`
does. Here the lengths of finished relatives are used as they are, because families differ by orders
of magnitude and relatives hardly at all (docs/evolution.md, "Lengths").
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from controlplane.policy.api import (
    EpochSeen,
    JobEnded,
    JobView,
    PolicyEvent,
    SearchStats,
    StepsSeen,
)
from controlplane.policy.search.observed_families import MAX_RELATIVES
from controlplane.prediction.lengths import remaining_samples
from schemas.ids import JobId

SHARES: Final = (0.05, 0.1, 0.9, 0.95)  # probabilities of the ends of the 90% and 80% intervals


class WorkLeft(NamedTuple):
    """Prediction of the remaining work, in samples."""

    mean: float
    quantiles: tuple[float, ...] = ()  # quantiles at `SHARES`; empty: not computed
    informed: bool = True  # False: only the job's age is known


@dataclass(slots=True)
class FamilyLengths:
    """Totals and progress of a family's jobs, in samples."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    at_work: dict[JobId, int] = field(default_factory=dict)  # samples done by active jobs
    reached: int = 0  # samples done by the job furthest ahead

    def progressed(self, job: JobId, done: int) -> None:
        """Record the progress of an active job."""
        self.at_work[job] = max(self.at_work.get(job, 0), done)
        self.reached = max(self.reached, done)

    def ended(self, job: JobId, done: int, *, succeeded: bool) -> None:
        """Record the end of a job; only the total of a job that succeeded is a length."""
        self.at_work.pop(job, None)
        if done and succeeded:
            self.finished.append(done)
        self.reached = max(self.reached, done)

    def left(self, done: float, *, bounds: bool) -> WorkLeft | None:
        """Return the remaining work of a job of the family, or None if nothing is known.

        With `bounds`, the result has quantiles, which take ten times as long.
        """
        if not self.finished and not max(done, self.reached):
            return None
        mean = remaining_samples(done, None, self.finished, self.reached)
        informed = bool(self.finished)
        if not bounds:
            return WorkLeft(mean, informed=informed)
        longer = [total - done for total in self.finished if total > done]
        if longer:
            return WorkLeft(mean, tuple(np.quantile(longer, SHARES).tolist()), informed)
        # No relative trained for longer. Assume that half of such jobs last twice as long.
        reached = max(done, self.reached)
        return WorkLeft(mean, tuple(reached / (1.0 - share) - done for share in SHARES), informed)


EARLY_RATIO: Final = 0.98  # a job that ends below this share of its statement left early
EARLY_SHARE: Final = 0.05  # if more jobs than this share leave early, no statement is certain
SCOPE_WEIGHT: Final = 2.0  # weight of the wider scope, as a number of jobs; a judgement
DECAY: Final = 0.98  # factor of the old weights at each new job


class EarlyLeaves:
    """Shares of jobs whose scripts left before their stated end, by family, user and overall."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # by scope: jobs, and those that left

    def ended(self, family: str, stated: float, total: float) -> None:
        """Compare the total of a job that succeeded with the total that its user stated."""
        for scope in _scopes_of(family):
            jobs, left = self._counts.get(scope, (0.0, 0.0))
            early = float(total < EARLY_RATIO * stated)
            self._counts[scope] = (DECAY * jobs + 1.0, DECAY * left + early)

    def expected(self, family: str) -> bool:
        """True if scripts of this family are known to leave early."""
        share = 0.0
        for scope in _scopes_of(family):
            jobs, left = self._counts.get(scope, (0.0, 0.0))
            share = (SCOPE_WEIGHT * share + left) / (SCOPE_WEIGHT + jobs)
        return share > EARLY_SHARE


def _scopes_of(family: str) -> tuple[str, ...]:
    """Return the scopes of a family: all jobs, its user's (the name up to a slash), its own."""
    user, slash, _ = family.partition("/")
    return ("", f"{user}/", family) if slash else ("", family)


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

    @property
    def known(self) -> int:
        """Number of jobs with kept predictions."""
        return len(self._predictions)

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


MAX_INACTIVE: Final = 100  # number of ended jobs with kept state


class _Cached(NamedTuple):
    """Cached prediction, valid while the job's view and the family's lengths stay the same."""

    view: JobView
    key: tuple[float, int, int]
    left: WorkLeft | None


class JobLengths:
    """The predictions of the remaining work of jobs, updated by policy events."""

    def __init__(self) -> None:
        self.families: defaultdict[str, FamilyLengths] = defaultdict(FamilyLengths)
        self._early = EarlyLeaves()
        self._stated: dict[JobId, float] = {}  # totals that users stated, samples
        self.calibration = LengthCalibration()
        self._cache: dict[JobId, _Cached] = {}  # last prediction of each job
        self._edition = 0  # number of ended jobs; each end changes predictions

    def observe(self, event: PolicyEvent) -> None:
        """Learn from an epoch, telemetry or the end of a job; ignore other events."""
        match event:
            case EpochSeen() | StepsSeen():
                self.families[event.family].progressed(event.job, event.samples_done)
            case JobEnded():
                total, succeeded = event.samples_done, event.succeeded
                self.families[event.family].ended(event.job, total, succeeded=succeeded)
                stated = self._stated.pop(event.job, None)
                if stated is not None and succeeded and total:
                    self._early.ended(event.family, stated, total)
                self._cache.pop(event.job, None)
                self._edition += 1
                self.calibration.ended(event.job, total, succeeded=succeeded)

    def forget(self, active: Collection[JobId]) -> None:
        """Drop the state of jobs that are not active, if many such jobs have accumulated."""
        known = max(self.calibration.known, len(self._stated), len(self._cache))
        if known <= 2 * len(active) + MAX_INACTIVE:
            return
        there = set(active)
        self.calibration.forget(there)
        self._stated = {job: total for job, total in self._stated.items() if job in there}
        self._cache = {job: cached for job, cached in self._cache.items() if job in there}
        for family in self.families.values():
            family.at_work = {job: done for job, done in family.at_work.items() if job in there}

    def _left(self, job: JobView) -> WorkLeft | None:
        """Return the remaining work of a job, or None if nothing is known."""
        family = self.families[job.family]
        done = float(max(job.samples_done, family.at_work.get(job.job, 0)))
        if job.stop_samples is not None:
            self._stated[job.job] = float(job.stop_samples)
            if not self._early.expected(job.family):
                return WorkLeft(max(0.0, job.stop_samples - done))
        key = (done, self._edition, 0 if family.finished else family.reached)
        cached = self._cache.get(job.job)
        if cached is not None and cached.view is job and cached.key == key:
            return cached.left
        due = self.calibration.due(job.job, done)
        found = family.left(done, bounds=due)
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
        if job.stop_samples is not None and not self._early.expected(job.family):
            return True
        return bool(self.families[job.family].finished)

    def informed(self, job: JobId) -> bool:
        """True if the last prediction for a job is based on more than the job's age."""
        cached = self._cache.get(job)
        return cached is not None and cached.left is not None and cached.left.informed
