"""Jobs whose scripts leave early: tuners and impatient scripts end many a job before its time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
)
from controlplane.sim.submissions import TraceJob
from schemas.jobs import JobSpec

STREAM = 91  # of a seed, from which the jobs are drawn


@dataclass(frozen=True, slots=True)
class EarlyStops:
    """The same model of training, in which some jobs succeed after a part of their epochs.

    The part is uniform in (0, 1), rounded up to whole epochs. Their users say what they would have
    said anyway: nobody is told that a job will leave early, or that it has.
    """

    model: TrainingModel
    share: float  # of the jobs

    @property
    def whole_seconds(self) -> bool:
        """As in the model."""
        return self.model.whole_seconds

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> JobModel:
        """The truth about `job`; the same length whichever the batch."""
        whole = self.model.job_model(job, batch, seed=seed)
        rng = default_rng((seed, crc32(job.name.encode()), STREAM))
        leaves, part = rng.random(2)
        if leaves >= self.share:
            return whole
        return ShortenedJob(whole, max(1, math.ceil(part * whole.epochs)))


@dataclass(frozen=True, slots=True)
class ShortenedJob:
    """One job that leaves early; all else is as it would have been."""

    whole: JobModel
    epochs: int

    @property
    def application(self) -> str:
        """Of the whole job."""
        return self.whole.application

    @property
    def spec(self) -> JobSpec:
        """Of the whole job."""
        return self.whole.spec

    @property
    def epoch_samples(self) -> int:
        """Of the whole job."""
        return self.whole.epoch_samples

    @property
    def costs(self) -> ChangeCosts:
        """Of the whole job."""
        return self.whole.costs

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Of the whole job."""
        return self.whole.throughput(placement, batch, epoch)

    def epoch_ends_at(self, epoch: int) -> float:
        """Of the whole job."""
        return self.whole.epoch_ends_at(epoch)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """Of the whole job."""
        return self.whole.lost_progress(before, batch, epoch)

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Of the whole job."""
        return self.whole.noise_scale(epoch, batch)

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Of the whole job."""
        return self.whole.epoch_metrics(epoch, batch)

    def loss_left(self, epoch: int) -> float | None:
        """Of the whole job."""
        return self.whole.loss_left(epoch)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Up to where it leaves, at least 1."""
        ends_at = self.whole.epoch_ends_at(self.epochs - 1)
        beyond = self.whole.remaining_steps(self.epochs, ends_at)
        return max(1.0, self.whole.remaining_steps(epoch, progress) - beyond)
