"""Interface of training models: the ground truth about jobs, which no policy may see."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast
from zlib import crc32

from msgspec.structs import replace
from numpy.random import default_rng

from controlplane.sim.models.demands import Demand
from controlplane.sim.results import TraceJob
from schemas.epochs import StepTimes
from schemas.jobs import JobSpec

Placement = tuple[int, ...]  # slots on each node, in rank order


def seconds_of(parts: StepTimes) -> float:
    """Return the seconds of a step; unlike `StepTimes.step_s`, exactly `pass_s` for one pass."""
    return parts.pass_s + (parts.pass_s - parts.sync_s) * (parts.passes - 1)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Speed of a group, in samples processed and in progress of the job."""

    samples_per_s: float  # processed by the workers
    progress_per_s: float  # in samples at the first batch
    step_s: float = 0.0  # duration of a step
    extrapolated: bool = False  # True if no such group was measured
    parts: StepTimes | None = None  # parts of a step; None: not modelled

    def times(self, factor: float) -> Throughput:
        """Return the throughput of a group that is `factor` times as fast; `factor` is above 0."""
        parts = self.parts
        if parts is not None:
            parts = replace(parts, pass_s=parts.pass_s / factor, sync_s=parts.sync_s / factor)
        speeds = (self.samples_per_s * factor, self.progress_per_s * factor, self.step_s / factor)
        return Throughput(*speeds, self.extrapolated, parts)


@dataclass(frozen=True, slots=True)
class ChangeCosts:
    """Durations of changes to a group, in seconds."""

    start_s: float  # first start, from the order to the first step
    restart_s: float  # start from a checkpoint
    prepare_s: float  # preparation of a new worker while the old group trains
    switch_s: float  # pause of training while the group changes

    def overridden(
        self, stall_s: float | None, first_stall_s: float | None, prepare_s: float | None = None
    ) -> ChangeCosts:
        """Return the costs after replacing the pause, the starts and the preparation.

        `stall_s` replaces `switch_s`, and `first_stall_s` replaces `start_s` and `restart_s`. An
        argument of None keeps the value.
        """
        return ChangeCosts(
            start_s=self.start_s if first_stall_s is None else first_stall_s,
            restart_s=self.restart_s if first_stall_s is None else first_stall_s,
            prepare_s=self.prepare_s if prepare_s is None else prepare_s,
            switch_s=self.switch_s if stall_s is None else stall_s,
        )


@dataclass(frozen=True, slots=True)
class EpochMetrics:
    """Values that a worker reports at the end of an epoch."""

    train_loss: float | None
    metrics: dict[str, float]
    noise_scale: float | None  # of the gradients, samples


class JobModel(ABC):
    """Ground truth about one job. Progress is measured in samples at the job's first batch.

    By default an epoch is one pass at the first batch, changes of the batch lose no progress, and
    the job measures no noise scale. In the methods, `placement` is the number of slots on each node
    in rank order, `batch` is the global batch in samples per step, and `epoch` is the number of
    finished epochs.
    """

    application: str  # name of the workload, for results by application
    spec: JobSpec  # specification that the user submits
    epoch_samples: int  # ||D||
    costs: ChangeCosts
    epochs: int  # total number
    demand: Demand | None = None  # None: the usual demand of `application`

    @abstractmethod
    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the throughput of a group; raise `TraceError` if there is no data about it."""

    def epoch_ends_at(self, epoch: int) -> float:
        """Return the progress at the end of a 0-based epoch, in samples at the first batch."""
        return float((epoch + 1) * self.epoch_samples)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """Return the progress lost when the global batch changes from `before` to `batch`."""
        return 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Return the running epoch's noise scale in samples, or None if it was not measured."""
        return None

    @abstractmethod
    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return the report after `epoch` epochs, with the noise scale of the last one."""

    def loss_left(self, epoch: int) -> float | None:
        """Return the share of the total loss reduction that remains. No policy sees this share.

        The share is 1 before the first epoch and 0 at the smallest loss. It is None if the loss is
        invented or unknown.
        """
        return None

    @abstractmethod
    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the remaining steps at the first batch, as published simulators count them."""


class TrainingModel(ABC):
    """Factory of job models."""

    whole_seconds: bool = False  # epochs end at whole seconds, as in Pollux' simulator
    costs: ChangeCosts  # of a typical job; single jobs may differ

    @abstractmethod
    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> JobModel:
        """Return the model of a job; raise `TraceError` if its workload or numbers are invalid.

        Args:
            batch: "fixed" if the policy keeps the batch that the user tuned for the requested
                slots; "elastic" if it chooses a batch, starting from one that fits one slot.
            seed: seed of all random differences between jobs.
        """


def job_name(name: str) -> str:
    """Return a valid job name, made from a name in a trace by replacing invalid characters."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).lstrip("-_")[:48] or "job"


def job_spec(job: TraceJob, **fields: Any) -> JobSpec:
    """Return a job specification with a trace job's name and requested slots, and `fields`."""
    usual = {"name": job_name(job.name), "script": "train.py", "retries": 1}
    return JobSpec(**{**usual, "slots_wanted": job.slots, **fields})


def training_s(
    model: JobModel, placement: Placement, batch: int, epoch: int = 0, progress: float = 0.0
) -> float:
    """Return the seconds from a position to the end of a job; infinite for a rate of 0."""
    total = 0.0
    for at in range(epoch, model.epochs):
        ends = model.epoch_ends_at(at)
        rate = model.throughput(placement, batch, at).progress_per_s
        total += max(0.0, ends - progress) / rate if rate > 0.0 else math.inf
        progress = max(progress, ends)
    return total


@cache
def packed(slots: int, widest: int) -> Placement:
    """Return the placement of `slots` on the fewest nodes of `widest` slots, full nodes first."""
    whole, rest = divmod(slots, widest)
    return (*(widest,) * whole, *((rest,) if rest else ()))


STREAM = 91  # random stream of these draws


class EarlyStops(TrainingModel):
    """Training model in which some jobs succeed after a part of their epochs.

    The part is uniform in (0, 1), rounded up to whole epochs. The statements of users do not
    change, so a policy cannot know that a job will end early.
    """

    def __init__(self, model: TrainingModel, share: float) -> None:
        """Let a random share of the jobs of `model` end early; `share` is in [0, 1]."""
        self.model, self.share = model, share
        self.whole_seconds, self.costs = model.whole_seconds, model.costs

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> JobModel:
        """Return the model of a job, which ends after the same epoch for either kind of batch."""
        whole = self.model.job_model(job, batch, seed=seed)
        rng = default_rng((seed, crc32(job.name.encode()), STREAM))
        leaves, part = rng.random(2)
        if leaves >= self.share:
            return whole
        return cast("JobModel", ShortenedJob(whole, max(1, math.ceil(part * whole.epochs))))


class ShortenedJob:
    """Job that ends after `epochs` epochs; all other properties are those of the whole job."""

    def __init__(self, whole: JobModel, epochs: int) -> None:
        self.whole, self.epochs = whole, epochs

    def __getattr__(self, name: str) -> Any:  # noqa: D105 - as the whole job
        return getattr(self.whole, name)

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the number of steps until the job ends early, at least 1."""
        ends_at = self.whole.epoch_ends_at(self.epochs - 1)
        beyond = self.whole.remaining_steps(self.epochs, ends_at)
        return max(1.0, self.whole.remaining_steps(epoch, progress) - beyond)
