"""Evidence on the length of jobs: relatives' lengths, the job's metric, and its user's statements.

All evidence is compared with the actual lengths later, and corrected by family.

A target of a stop rule is met where the curve through the reports reaches it, and must then be held
for some epochs. A plateau is met some epochs after the curve rises less than its reports scatter.
Epochs that a rule requires whatever they report bound the length from below.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.search.observed_families import MAX_RELATIVES
from controlplane.prediction.convergence_curves import MAX_REPORTS, ConvergenceCurves, job_curve
from controlplane.prediction.lengths import Evidence, pooled_spread
from schemas.ids import JobId
from schemas.jobs import StopRule

PRIOR_SPREAD: Final = 0.3  # prior spread of log totals within a family
PRIOR_TRUST: Final = 2.0  # weight of this prior, as a number of relatives; a judgement
COMMON_TRUST: Final = 4.0  # weight of the common spread, as a number of relatives; a judgement


@dataclass(slots=True)
class FamilyLengths:
    """Totals and progress of a family's jobs, in samples."""

    finished: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    given_up: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_RELATIVES))
    at_work: dict[JobId, int] = field(default_factory=dict)  # samples done by active jobs
    reached: int = 0  # samples done by the job furthest ahead
    epoch_samples: int = 0  # ||D||, as last reported

    def censored(self, job: JobId) -> list[int]:
        """Return the progress of other relatives that were given up or are still running."""
        running = [done for other, done in self.at_work.items() if other != job and done > 0]
        return [*self.given_up, *running]

    def progressed(self, job: JobId, done: int) -> None:
        """Record the progress of an active job."""
        self.at_work[job] = max(self.at_work.get(job, 0), done)
        self.reached = max(self.reached, done)

    def ended(self, job: JobId, done: int, *, succeeded: bool) -> None:
        """Record the total of a job. The length of a job that did not succeed is censored."""
        self.at_work.pop(job, None)
        if done:
            (self.finished if succeeded else self.given_up).append(done)
        self.reached = max(self.reached, done)


class SpreadOfLengths:
    """The spread of lengths in each family; if jobs are few, it is close to the common spread."""

    def __init__(self) -> None:
        self._common = PRIOR_SPREAD
        self._of: dict[str, float] = {}

    def update(self, families: Iterable[FamilyLengths]) -> None:
        """Recompute the common spread after a job has finished."""
        totals = [family.finished for family in families]
        self._common = pooled_spread(totals, PRIOR_SPREAD, PRIOR_TRUST)
        self._of.clear()

    def of(self, name: str, family: FamilyLengths) -> float:
        """Return the standard deviation of the logarithm of a family's totals."""
        if name not in self._of:
            self._of[name] = pooled_spread([family.finished], self._common, COMMON_TRUST)
        return self._of[name]


DECAY: Final = 0.98  # factor of the old weights at each new error
SCOPE_WEIGHT: Final = 2.0  # weight of the wider scope, as a number of errors; a judgement


@dataclass(slots=True)
class _Sums:
    count: float = 0.0
    first: float = 0.0  # sum of errors
    second: float = 0.0  # sum of squared errors

    def add(self, error: float) -> None:
        self.count = DECAY * self.count + 1.0
        self.first = DECAY * self.first + error
        self.second = DECAY * self.second + error * error


@dataclass(slots=True)
class ErrorStatistics:
    """Bias and spread of errors by scope; if errors are few, the next wider scope weighs more."""

    prior_spread: float  # spread before the first error
    trust: float = SCOPE_WEIGHT
    _sums: dict[str, _Sums] = field(default_factory=dict)

    def add(self, scopes: Sequence[str], error: float) -> None:
        """Record an error, usually log(actual / predicted), in each scope."""
        if not math.isfinite(error):
            return
        for scope in scopes:
            self._sums.setdefault(scope, _Sums()).add(error)

    def of(self, scopes: Sequence[str]) -> tuple[float, float]:
        """Return the expected bias and spread of the next error in the last, narrowest scope."""
        bias, square = 0.0, self.prior_spread**2
        for scope in scopes:
            seen = self._sums.get(scope)
            if seen is None:
                continue
            weight = self.trust + seen.count
            before, bias = bias, (self.trust * bias + seen.first) / weight
            around = seen.second - 2.0 * bias * seen.first + seen.count * bias * bias
            square = (self.trust * (square + (before - bias) ** 2) + max(around, 0.0)) / weight
        return bias, math.sqrt(square)


def scopes_of(family: str) -> tuple[str, ...]:
    """Return the scopes of a family: all jobs, its user's (the name up to a slash), its own."""
    user, slash, _ = family.partition("/")
    return ("", f"{user}/", family) if slash else ("", family)


MIN_EPOCHS: Final = 4  # reports needed for a curve: one more than its coefficients
MAX_EXTRAPOLATION: Final = 20.0  # a curve is extrapolated to this multiple of its epochs
FLAT_WITHIN: Final = 1.0  # a plateau may rise by this share of the reports' scatter
NO_DECAY: Final = 1.0  # weigh all reports alike; early ones show the shape too


@dataclass(slots=True)
class MetricLog:
    """The reports of a job's stop metric."""

    epochs: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    values: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    best: float = -math.inf
    since_best: int = 0  # number of epochs without an increase
    _fitted: tuple[int, float | None] = (0, None)  # (epoch of the fit, predicted end)

    @property
    def epoch(self) -> int:
        """Last reported epoch."""
        return self.epochs[-1] if self.epochs else 0

    def add(self, epoch: int, value: float) -> None:
        """Record the metric of a finished epoch (1-based), once; nan is no increase."""
        if epoch <= self.epoch:
            return
        self.epochs.append(epoch)
        self.values.append(value)
        if value > self.best:
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1

    def streak(self, target: float) -> int:
        """Return how many epochs in a row, up to the last one, met a target."""
        found = 0
        for value in reversed(self.values):
            if not value >= target:
                break
            found += 1
        return found

    def least_left(self, rule: StopRule) -> int:
        """Return the number of further epochs that the rule requires whatever they report."""
        if rule.at_least is not None:
            return max(0, rule.consecutive - self.streak(rule.at_least))
        return max(0, (rule.plateau or 0) - self.since_best) if self.epochs else rule.plateau or 0

    def end(self, rule: StopRule) -> float | None:
        """Return the epoch at which the curve is expected to meet the rule, or None if never."""
        if self._fitted[0] != self.epoch:
            self._fitted = (self.epoch, self._end(rule))
        return self._fitted[1]

    def _end(self, rule: StopRule) -> float | None:
        epoch, target = self.epoch, rule.at_least
        if target is not None and (streak := self.streak(target)):
            return float(epoch + max(1, rule.consecutive - streak))
        if len(self.epochs) < MIN_EPOCHS:
            return None
        falling = [-value if math.isfinite(value) else None for value in self.values]
        curve = job_curve([float(at) for at in self.epochs], falling, decay=NO_DECAY)
        if target is not None:
            crosses = float(curve.reaches(np.array([-target]))[0])
            if not crosses <= MAX_EXTRAPOLATION * epoch:
                return None
            return max(math.ceil(crosses), epoch + 1) + rule.consecutive - 1.0
        return _plateau_end(curve, epoch, rule.plateau or 1, epoch - self.since_best)


def _plateau_end(curve: ConvergenceCurves, epoch: int, wait: int, best: int) -> float | None:
    """Return the epoch from which the curve rises less than reports scatter, plus `wait`."""
    ahead = np.arange(best, math.ceil(MAX_EXTRAPOLATION * epoch) + 1, dtype=np.float64)
    now, later = curve.at(ahead[None, :])[0], curve.at(ahead[None, :] + wait)[0]
    with np.errstate(invalid="ignore"):
        flat = now - later < FLAT_WITHIN * float(curve.error[0])
    if not flat.any():
        return None
    return max(float(ahead[int(flat.argmax())]) + wait, epoch + 1.0)


STATED_PRIOR: Final = 0.5  # prior spread of log(actual / stated)
CURVE_PRIOR: Final = 0.5  # prior spread of a curve's errors, per e-fold ahead
HELD_PRIOR: Final = 0.1  # prior spread if the target is met and must be held
MAX_PREDICTIONS: Final = 40  # predictions kept for each job
EARLY_RATIO: Final = 0.98  # a job that ends below this share of its statement left early
EARLY_SHARE: Final = 0.05  # if more jobs than this share leave early, no rule is certain
MIN_AHEAD: Final = 0.02  # e-folds; lower bound of the distance to an end


@dataclass(frozen=True, slots=True)
class _End:
    """Prediction of a job's total from its metric."""

    done: float  # samples at the time of the prediction
    total: float  # samples
    held: bool  # True if the target was met at that time


@dataclass(slots=True)
class _JobRecord:
    """Evidence on one active job."""

    family: str = ""
    metric: MetricLog = field(default_factory=MetricLog)
    stated: float | None = None  # samples, from the last known rule or bound
    ends: list[_End] = field(default_factory=list)  # predictions from the metric
    rule: StopRule | None = None  # last known rule
    predicted_at: int = -1  # epoch of the last prediction


class JobEvidence:
    """Evidence on active jobs from their metrics and their users' statements."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _JobRecord] = {}
        self._stated = ErrorStatistics(STATED_PRIOR)
        self._ends = {False: ErrorStatistics(CURVE_PRIOR), True: ErrorStatistics(HELD_PRIOR)}
        self._left_early = ErrorStatistics(0.0)  # 1: the job left before its rule was met
        self._early: dict[str, bool] = {}  # cache by family, cleared when a job ends

    @property
    def known(self) -> int:
        """Number of jobs with recorded evidence."""
        return len(self._jobs)

    # --- events

    def epoch(self, event: EpochSeen) -> None:
        """Record a finished epoch, and the metric if the job's stop rule has one."""
        own = self._jobs.setdefault(event.job, _JobRecord())
        own.family = event.family
        if event.stop_metric is not None:
            own.metric.add(event.epoch, event.stop_metric)

    def ended(self, job: JobId, family: str, total: float, *, succeeded: bool) -> None:
        """Compare the evidence with the job's total if the job succeeded."""
        own = self._jobs.pop(job, None)
        if own is None or not succeeded or total <= 0.0:
            return
        scopes = scopes_of(family)
        before_stated = own.stated is not None and total < EARLY_RATIO * own.stated
        before_rule = own.rule is not None and own.metric.least_left(own.rule) > 0
        self._early.clear()
        self._left_early.add(scopes, float(before_rule if own.rule else before_stated))
        if own.stated is not None and own.stated > 0.0:
            self._stated.add(scopes, math.log(total / own.stated))
        for end in own.ends:
            self._ends[end.held].add(scopes, math.log(total / end.total) / _ahead(end))

    def forget(self, active: set[JobId]) -> None:
        """Drop the evidence on jobs that are not active."""
        self._jobs = {job: own for job, own in self._jobs.items() if job in active}

    # --- estimates

    def certain(self, job: JobView, done: float) -> float | None:
        """Return the samples that remain by a stated rule, or None if no length is certain."""
        if job.stop_samples is None:
            return None
        self._jobs.setdefault(job.job, _JobRecord(job.family)).stated = float(job.stop_samples)
        return None if self.leaves_early(job.family) else max(0.0, job.stop_samples - done)

    def bounds(self, job: JobView, done: float) -> tuple[float, float]:
        """Return the least and the greatest possible remaining work, in samples."""
        most = math.inf if (bound := _bound(job)) is None else max(0.0, bound - done)
        rule, own = job.stop, self._jobs.get(job.job)
        if rule is None or rule.metric is None or not job.epoch_samples:
            return 0.0, most
        if own is not None:
            own.rule = rule
        if self.leaves_early(job.family):
            return 0.0, most
        epochs = (own.metric if own else MetricLog()).least_left(rule)
        at = max(job.samples_done, done - job.epoch_samples)  # estimated end of the last epoch
        least = max(0.0, at + epochs * job.epoch_samples - done)
        return min(least, most), most

    def leaves_early(self, family: str) -> bool:
        """True if scripts of this family are known to leave before their rules are met."""
        found = self._early.get(family)
        if found is None:
            share, _ = self._left_early.of(scopes_of(family))
            found = self._early[family] = share > EARLY_SHARE
        return found

    def evidence(self, job: JobView, done: float) -> list[Evidence]:
        """Return the evidence by the user's statement and by the metric, as far as each exists."""
        own = self._jobs.setdefault(job.job, _JobRecord(job.family))
        scopes = scopes_of(job.family)
        found = []
        if (bound := _bound(job)) is not None and bound > 0.0:
            own.stated = bound
            bias, spread = self._stated.of(scopes)
            found.append(Evidence(math.log(bound) + bias, spread))
        end = self._end(job, own)
        if end is not None:
            bias, spread = self._ends[end.held].of(scopes)
            ahead = _ahead(end)
            found.append(Evidence(math.log(end.total) + bias * ahead, spread * ahead))
        return found

    def _end(self, job: JobView, own: _JobRecord) -> _End | None:
        """Return the total that the metric predicts after the last epoch, or None if it cannot."""
        rule, metric = job.stop, own.metric
        if rule is None or rule.metric is None or not job.epoch_samples or not job.samples_done:
            return None
        epoch = metric.end(rule) if metric.epoch == job.epoch else None
        if epoch is None:
            return None
        total = job.samples_done + (epoch - metric.epoch) * job.epoch_samples
        held = rule.at_least is not None and metric.streak(rule.at_least) > 0
        end = _End(float(job.samples_done), total, held)
        if metric.epoch != own.predicted_at:
            own.predicted_at = metric.epoch
            if len(own.ends) < MAX_PREDICTIONS:
                own.ends.append(end)
        return end


def _ahead(end: _End) -> float:
    """Return the distance from a prediction to the end, in e-folds of the work done before."""
    return max(math.log(max(end.total / end.done, 1.0)), MIN_AHEAD)


def _bound(job: JobView) -> float | None:
    """Return the user's bound in samples, from a rule or its epochs, or None if there is none."""
    if job.stop_samples is not None:
        return float(job.stop_samples)
    rule: StopRule | None = job.stop
    if rule is None or rule.epochs is None or not job.epoch_samples:
        return None
    return float(job.samples_done + max(0, rule.epochs - job.epoch) * job.epoch_samples)


SHARES: Final = (0.05, 0.1, 0.9, 0.95)  # probabilities of the ends of the 90% and 80% intervals


class WorkLeft(NamedTuple):
    """Prediction of the remaining work, in samples."""

    mean: float
    quantiles: tuple[float, ...] = ()  # quantiles at `SHARES`; empty: not computed
    informed: bool = True  # False: only the job's age is known

    def between(self, least: float, most: float) -> WorkLeft:
        """Return the prediction, clamped to [least, most]."""
        mean, *quantiles = (min(most, max(least, v)) for v in (self.mean, *self.quantiles))
        return self._replace(mean=mean, quantiles=tuple(quantiles))
