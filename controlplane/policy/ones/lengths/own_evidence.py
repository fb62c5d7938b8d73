"""What tells of one job's own end: its metric, and what its user said; each as far as it was right.

Both are held against what came, so that a script which always leaves early, or a metric that
always takes longer than its curve says, is known for it in its family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.ones.lengths.learnt_errors import LearntErrors, circles_of
from controlplane.policy.ones.lengths.metric_stops import MetricLog
from controlplane.prediction.length_distribution import Evidence
from schemas.ids import JobId
from schemas.jobs import StopRule

STATED_PRIOR: Final = 0.5  # spread of what came over what was said, before anything came
CURVE_PRIOR: Final = 0.5  # the same of a curve, per e-fold that it looks ahead
HELD_PRIOR: Final = 0.1  # and of a target that is met already, and has to be held
KEPT_ENDS: Final = 40  # predictions of one job's curve
EARLY: Final = 0.98  # of what was stated, below which a job ended before its rule
EARLY_SHARE: Final = 0.05  # of jobs that left early, above which no rule is certain
LEAST_AHEAD: Final = 0.02  # e-folds: nearer ends are told as if they were so far ahead


@dataclass(frozen=True, slots=True)
class _End:
    """What a metric foretold."""

    done: float  # samples, then
    total: float  # samples
    held: bool  # its target was met already


@dataclass(slots=True)
class _Own:
    """Of one active job."""

    family: str = ""
    metric: MetricLog = field(default_factory=MetricLog)
    stated: float | None = None  # samples, by a rule or a bound, as known last
    ends: list[_End] = field(default_factory=list)  # that its metric foretold
    rule: StopRule | None = None  # as known last
    asked_at: int = -1  # epochs, when the curve was last asked


class OwnEvidence:
    """Of all active jobs."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Own] = {}
        self._stated = LearntErrors(STATED_PRIOR)
        self._ends = {False: LearntErrors(CURVE_PRIOR), True: LearntErrors(HELD_PRIOR)}
        self._left_early = LearntErrors(0.0)  # 1: a job succeeded before its rule
        self._early: dict[str, bool] = {}  # by family, what follows from that; until a job ends

    @property
    def known(self) -> int:
        """Jobs of which something is remembered."""
        return len(self._jobs)

    # --- what happens

    def epoch(self, event: EpochSeen) -> None:
        """A job finished an epoch.

        Args:
            event: with its metric, if its stop rule is on one.
        """
        own = self._jobs.setdefault(event.job, _Own())
        own.family = event.family
        if event.stop_metric is not None:
            own.metric.add(event.epoch, event.stop_metric)

    def ended(self, job: JobId, family: str, total: float, *, succeeded: bool) -> None:
        """Hold what was said of a job against what came.

        Args:
            succeeded: else it was given up, and nothing came.
        """
        own = self._jobs.pop(job, None)
        if own is None or not succeeded or total <= 0.0:
            return
        circles = circles_of(family)
        before_stated = own.stated is not None and total < EARLY * own.stated
        before_rule = own.rule is not None and own.metric.least_left(own.rule) > 0
        self._early.clear()
        self._left_early.add(circles, float(before_rule if own.rule else before_stated))
        if own.stated is not None and own.stated > 0.0:
            self._stated.add(circles, math.log(total / own.stated))
        for end in own.ends:
            self._ends[end.held].add(circles, math.log(total / end.total) / _ahead(end))

    def forget(self, active: set[JobId]) -> None:
        """Drop what is known of jobs that nobody will hear of again."""
        self._jobs = {job: own for job, own in self._jobs.items() if job in active}

    # --- answers

    def certain(self, job: JobView, done: float) -> float | None:
        """What a rule leaves, samples; None: nothing is certain.

        A rule is when a job ends, unless a relative's script left before its own.
        """
        if job.stop_samples is None:
            return None
        self._jobs.setdefault(job.job, _Own(job.family)).stated = float(job.stop_samples)
        return None if self.leaves_early(job.family) else max(0.0, job.stop_samples - done)

    def bounds(self, job: JobView, done: float) -> tuple[float, float]:
        """The least and the most that is to come, samples."""
        most = math.inf if (bound := _bound(job)) is None else max(0.0, bound - done)
        rule, own = job.stop, self._jobs.get(job.job)
        if rule is None or rule.metric is None or not job.epoch_samples:
            return 0.0, most
        if own is not None:
            own.rule = rule
        if self.leaves_early(job.family):
            return 0.0, most
        epochs = (own.metric if own else MetricLog()).least_left(rule)
        at = max(job.samples_done, done - job.epoch_samples)  # the last epoch's end, as it counts
        least = max(0.0, at + epochs * job.epoch_samples - done)
        return min(least, most), most

    def leaves_early(self, family: str) -> bool:
        """Whether scripts like these are known to leave before their rules are met."""
        found = self._early.get(family)
        if found is None:
            share, _ = self._left_early.of(circles_of(family))
            found = self._early[family] = share > EARLY_SHARE
        return found

    def evidence(self, job: JobView, done: float) -> list[Evidence]:
        """All that tells of this job's own end."""
        own = self._jobs.setdefault(job.job, _Own(job.family))
        circles = circles_of(job.family)
        found = []
        if (bound := _bound(job)) is not None and bound > 0.0:
            own.stated = bound
            bias, spread = self._stated.of(circles)
            found.append(Evidence(math.log(bound) + bias, spread))
        end = self._end(job, own)
        if end is not None:
            bias, spread = self._ends[end.held].of(circles)
            ahead = _ahead(end)
            found.append(Evidence(math.log(end.total) + bias * ahead, spread * ahead))
        return found

    def _end(self, job: JobView, own: _Own) -> _End | None:
        """Samples in all, as its metric says at the end of the last epoch."""
        rule, metric = job.stop, own.metric
        if rule is None or rule.metric is None or not job.epoch_samples or not job.samples_done:
            return None
        epoch = metric.end(rule) if metric.epoch == job.epoch else None
        if epoch is None:
            return None
        total = job.samples_done + (epoch - metric.epoch) * job.epoch_samples
        held = rule.at_least is not None and metric.streak(rule.at_least) > 0
        end = _End(float(job.samples_done), total, held)
        if metric.epoch != own.asked_at:
            own.asked_at = metric.epoch
            if len(own.ends) < KEPT_ENDS:
                own.ends.append(end)
        return end


def _ahead(end: _End) -> float:
    """How far a prediction looked, e-folds of what was done then."""
    return max(math.log(max(end.total / end.done, 1.0)), LEAST_AHEAD)


def _bound(job: JobView) -> float | None:
    """The most that a job trains, as its user said: a rule's samples, or epochs beside a metric."""
    if job.stop_samples is not None:
        return float(job.stop_samples)
    rule: StopRule | None = job.stop
    if rule is None or rule.epochs is None or not job.epoch_samples:
        return None
    return float(job.samples_done + max(0, rule.epochs - job.epoch) * job.epoch_samples)
