"""Lengths by the paper's Beta distribution of progress (ONES section 3.2.1), family by family.

Departure from the paper: it regresses over all jobs of a cluster at once. Here each family has
its own regression as soon as one of its jobs has finished, and the one over all of them is only
asked before: families differ in length by orders of magnitude, which five features do not tell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from scipy.special import betaincinv

from controlplane.policy.api import EpochSeen, JobEnded, JobView
from controlplane.policy.ones.lengths.family_lengths import FamilyLengths
from controlplane.policy.ones.lengths.length_models import ResidualLife
from controlplane.policy.ones.lengths.own_evidence import OwnEvidence
from controlplane.policy.ones.lengths.work_left import SHARES, WorkLeft
from controlplane.prediction.array_types import FloatArray
from controlplane.prediction.progress_distribution import (
    FEATURES,
    Points,
    ProgressModel,
    features,
    fit,
    points_of,
)
from schemas.ids import JobId

KEPT_LOGS: Final = 20  # of finished jobs of one family
KEPT_EPOCHS: Final = 100  # of one job
KEPT_COMMON: Final = 40  # logs of any family, for those of which no job has finished
LEAST_PROGRESS: Final = 1e-6  # divisor of a bound
LEAST_LEFT: Final = 1e-3  # of what was done, that is to come at least


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


class BetaProgress:
    """Progress after so many epochs is Be(epochs, A x + b)."""

    def __init__(self) -> None:
        self._logs: dict[JobId, _Log] = {}
        self._families: dict[str, _Regression] = {}
        self._common = _Regression(deque(maxlen=KEPT_COMMON))
        self._before = ResidualLife()

    def epoch(self, event: EpochSeen, family: FamilyLengths) -> None:
        """One more entry of the job's log."""
        log = self._logs.setdefault(event.job, _Log())
        if log.first_loss is None:
            log.first_loss = event.train_loss
        if len(log.rows) < KEPT_EPOCHS and event.epoch > 0:
            log.rows[event.epoch] = self._features(
                family, log, event.samples_done, event.train_loss, event.stop_metric
            )

    def ended(self, event: JobEnded, family: FamilyLengths) -> None:
        """Its log is learnt from, if it came to its end."""
        log = self._logs.pop(event.job, None)
        if log is None or not event.succeeded:
            return
        own = self._families.setdefault(event.family, _Regression(deque(maxlen=KEPT_LOGS)))
        points = log.points()
        own.add(points)
        self._common.add(points)

    def forget(self, active: set[JobId]) -> None:
        """Logs of other jobs are dropped."""
        self._logs = {job: log for job, log in self._logs.items() if job in active}

    def left(
        self, job: JobView, family: FamilyLengths, done: float, own: OwnEvidence, *, bounds: bool
    ) -> WorkLeft | None:
        """As many epochs as the mean progress leaves; before any is known, the residual life."""
        log = self._logs.get(job.job, _Log())
        model = self._model(job.family)
        epoch_samples = job.epoch_samples or family.epoch_samples
        if model is None or not epoch_samples:
            return self._before.left(job, family, done, own, bounds=bounds)
        last = max(log.rows, default=0)
        row = log.rows[last] if last else self._features(family, log, 0.0, None, None)
        epochs = np.array([float(max(last, 1))])
        alpha, beta = model.shapes(row[None, :], epochs)
        came = float(epochs[0]) * epoch_samples
        least = LEAST_LEFT * max(done, 1.0)
        mean = max(came * float((alpha + beta)[0] / alpha[0]) - done, least)
        if not bounds:
            return WorkLeft(mean)
        progress = np.maximum(betaincinv(alpha, beta, 1.0 - np.array(SHARES)), LEAST_PROGRESS)
        return WorkLeft(mean, tuple(np.maximum(came / progress - done, least).tolist()))

    def _model(self, family: str) -> ProgressModel | None:
        own = self._families.get(family)
        return (own.fitted() if own is not None else None) or self._common.fitted()

    def _features(
        self,
        family: FamilyLengths,
        log: _Log,
        done: float,
        loss: float | None,
        metric: float | None,
    ) -> FloatArray:
        return features(float(family.epoch_samples), log.first_loss, done, loss, metric)
