"""What every model says of a job's training; no policy may see any of this.

Jobs whose scripts leave early: tuners and impatient scripts end many a job before its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol
from zlib import crc32

from numpy.random import default_rng

from controlplane.sim.results import TraceJob
from schemas.jobs import JobSpec

Placement = tuple[int, ...]  # slots on each node, in rank order


@dataclass(frozen=True, slots=True)
class StepParts:
    """How a step divides into passes, of which the last one synchronises; as workers report it."""

    pass_s: float  # its last pass, with its synchronisation
    sync_s: float  # of that, the synchronisation, as far as nothing is computed beside it
    local_batch: int  # samples of one pass of one worker
    passes: int  # of one worker

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.pass_s + (self.pass_s - self.sync_s) * (self.passes - 1)


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast a group trains."""

    samples_per_s: float  # what its workers process
    progress_per_s: float  # how much of the job's work that is worth
    step_s: float = 0.0  # of one step of all its workers
    extrapolated: bool = False  # whether nothing like this group was ever measured
    parts: StepParts | None = None  # of a step; None: the model knows none

    def times(self, factor: float) -> Throughput:
        """The same group at `factor` times its speed, which is above 0.

        Args:
            factor: above 0; below 1 is slower.
        """
        parts = self.parts
        if parts is not None:
            parts = replace(parts, pass_s=parts.pass_s / factor, sync_s=parts.sync_s / factor)
        return Throughput(
            self.samples_per_s * factor,
            self.progress_per_s * factor,
            self.step_s / factor,
            extrapolated=self.extrapolated,
            parts=parts,
        )


@dataclass(frozen=True, slots=True)
class ChangeCosts:
    """What it takes to change a group, in seconds."""

    start_s: float  # first start: order to first step
    restart_s: float  # the same from a checkpoint
    prepare_s: float  # a newcomer beside a group that trains on
    switch_s: float  # nobody trains while the group changes

    def overridden(
        self,
        stall_s: float | None,
        first_stall_s: float | None,
        prepare_s: float | None = None,
    ) -> ChangeCosts:
        """The same, but for what somebody chose.

        Args:
            stall_s: seconds that nobody trains in any change; None: as it is.
            first_stall_s: seconds of any start; None: as it is.
            prepare_s: seconds of a newcomer beside a group that trains; None: as it is.
        """
        return ChangeCosts(
            start_s=self.start_s if first_stall_s is None else first_stall_s,
            restart_s=self.restart_s if first_stall_s is None else first_stall_s,
            prepare_s=self.prepare_s if prepare_s is None else prepare_s,
            switch_s=self.switch_s if stall_s is None else stall_s,
        )


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """What a worker says at the end of an epoch."""

    train_loss: float | None
    metrics: dict[str, float]
    noise_scale: float | None  # of the gradients, samples


class JobModel(Protocol):
    """The truth about one job. Progress is counted in samples at the job's first batch."""

    @property
    def application(self) -> str:
        """What it trains, for results by application."""
        ...

    @property
    def spec(self) -> JobSpec:
        """What its user submits."""
        ...

    @property
    def epoch_samples(self) -> int:
        """||D||, samples."""
        ...

    @property
    def costs(self) -> ChangeCosts:
        """Of this job's changes."""
        ...

    @property
    def epochs(self) -> int:
        """That it takes in all: after so many it is done."""
        ...

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """How fast a group trains.

        Args:
            placement: slots on each node, in rank order.
            batch: global, samples per step.
            epoch: finished ones.

        Raises:
            TraceError: if the model knows nothing of such a group.
        """
        ...

    def epoch_ends_at(self, epoch: int) -> float:
        """Progress at which epoch `epoch` (0-based) is finished.

        Args:
            epoch: 0-based.

        Returns:
            Samples at the first batch, since the job began.
        """
        ...

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """Progress that is lost when the global batch jumps.

        Args:
            before: global batch up to now, samples.
            batch: global batch from now on, samples.
            epoch: finished ones.
        """
        ...

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Of the gradients, samples, as a worker measures it; None: it tells none.

        Args:
            epoch: finished ones, so that it is that of the running epoch.
            batch: global, samples per step.
        """
        ...

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """What a worker says at the end of an epoch; its noise scale is that of this epoch.

        Args:
            epoch: finished ones, this one too.
            batch: global, samples per step, that it ended with.
        """
        ...

    def loss_left(self, epoch: int) -> float | None:
        """The share of all that its loss will fall which is still to come; nobody is told.

        Args:
            epoch: finished ones.

        Returns:
            1 before the first one, 0 at its smallest loss; None: its loss is made up.
        """
        ...

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Steps at the first batch that are left, as published simulators count for Optimus.

        Args:
            epoch: finished ones.
            progress: so far, samples at the first batch.
        """
        ...


class TrainingModel(Protocol):
    """Makes the truth of jobs."""

    @property
    def whole_seconds(self) -> bool:
        """Whether epochs last whole seconds, as in Pollux' simulator."""
        ...

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> JobModel:
        """The truth about `job`.

        Args:
            batch: whether the policy keeps the batch that the user tuned for so many slots, or
                chooses one, from a first batch that fits one slot.
            seed: of everything that differs from job to job.

        Raises:
            TraceError: if it is none of this model's workloads, or its numbers make no sense.
        """
        ...


@cache
def packed(slots: int, widest: int) -> Placement:
    """A placement on as few nodes as possible, whole ones first.

    Args:
        slots: in all.
        widest: slots of a node.
    """
    whole, rest = divmod(slots, widest)
    return (*(widest,) * whole, *((rest,) if rest else ()))


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
