"""Jobs recorded in a live cluster, trained again under another policy.

A recording has the speeds of whole epochs on one group, by family. Speeds are used as measured,
interpolated linearly between measurements, and extrapolated beyond them by the rules of
`recording.FamilyStepTimes`. Results show the extrapolated share. The progress per sample at a batch
follows from the noise scales that the workers reported.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace

from controlplane.prediction.lengths import remaining_samples
from controlplane.prediction.throughput import statistical_efficiency
from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import (
    ChangeCosts,
    EpochMetrics,
    JobModel,
    Placement,
    Throughput,
    TrainingModel,
)
from controlplane.sim.models.recording import (
    ChangeTimes,
    Family,
    FamilyStepTimes,
    Recording,
    Submission,
)
from controlplane.sim.results import TraceJob
from schemas.jobs import StopRule


@dataclass(frozen=True, slots=True)
class ProgressCurve:
    """Piecewise linear curve, constant beyond its ends; its value is None if it has no points."""

    shares: Sequence[float] = ()  # shares of the job's progress, increasing
    values: Sequence[float] = ()

    def at(self, share: float) -> float | None:
        """Return the value at a share of the job's progress, in [0, 1]."""
        if not self.shares:
            return None
        place = bisect_left(self.shares, share)
        if place in {0, len(self.shares)}:
            return self.values[min(place, len(self.shares) - 1)]
        low, high = self.shares[place - 1], self.shares[place]
        part = (share - low) / (high - low)
        return self.values[place - 1] * (1.0 - part) + self.values[place] * part


class ReportedCurves:
    """Reported loss and noise scale of a job over its progress.

    A job without a noise scale has the mean of its family, or the same progress at any batch.
    """

    def __init__(self, job: Submission, usual: float | None) -> None:
        """Map epochs to progress; `usual` is the mean log of the family's noise scales, or None."""
        self.first = job.spec.batch_size
        epochs = [epoch for _, epoch in sorted({e.number: e for e in job.epochs}.items())]
        measured = [epoch for epoch in epochs if epoch.noise_scale]
        by_number = ProgressCurve(
            [float(epoch.number) for epoch in measured],
            [math.log(epoch.noise_scale or 1.0) for epoch in measured],
        )
        levels = [by_number.at(float(epoch.number)) for epoch in epochs]
        levels = [usual if level is None else level for level in levels]
        efficiencies = [
            1.0 if level is None else efficiency(epoch.batch, self.first, math.exp(level))
            for epoch, level in zip(epochs, levels, strict=True)
        ]
        self.mean_efficiency = float(np.mean(efficiencies)) if efficiencies else 1.0
        ends = (np.cumsum(efficiencies) / sum(efficiencies)).tolist() if efficiencies else []
        known = [place for place, epoch in enumerate(epochs) if epoch.noise_scale]
        self.noise = ProgressCurve([ends[at] for at in known], [levels[at] or 0.0 for at in known])
        if not known and usual is not None:
            self.noise = ProgressCurve([1.0], [usual])
        losses = {
            end: epoch.train_loss
            for end, epoch in zip(ends, epochs, strict=True)
            if epoch.train_loss is not None
        }
        self.loss = ProgressCurve(list(losses), list(losses.values()))


def efficiency(batch: int, first: int, phi: float) -> float:
    """Return the progress per sample relative to the first batch; `phi` is in samples."""
    return float(statistical_efficiency(np.array(float(batch)), float(first), phi))


MAX_EPOCHS: Final = 10_000_000
EPOCH_TOLERANCE: Final = 1e-6  # a rest below this share of an epoch is dropped


class RecordedModel(TrainingModel):
    """Training model of the jobs of a recording."""

    def __init__(self, recording: Recording, costs: ChangeCosts, *, stated: bool = False) -> None:
        """Index the recording.

        `costs` apply to changes that the recording did not measure. If `stated`, the work of a job
        is known if its user or script stated it.
        """
        self._jobs = {job.name: job for job in recording.jobs}
        self._families = {family.name: family for family in recording.families}
        self._took = recording.took
        self._given = costs
        self.costs = _costs(ChangeTimes(), recording.took, costs)
        self._stated = stated
        self._step_times: dict[str, FamilyStepTimes] = {}
        noise: dict[str, list[float]] = {}
        for job in recording.jobs:
            scales = [epoch.noise_scale for epoch in job.epochs if epoch.noise_scale]
            noise.setdefault(job.family, []).extend(scales)
        self._noise = {
            name: float(np.mean(np.log(values))) for name, values in noise.items() if values
        }

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> RecordedJob:
        """Return the model of a job; neither the seed nor the kind of batch has an effect."""
        found = self._jobs.get(job.workload)
        if found is None:
            problem = f"job {job.name}: {job.workload[:60]!r} is not a job of the recording"
            raise TraceError(problem, "simulate the recording's own trace", "workload")
        family = self._families.get(found.family)
        if family is None or not family.speeds:
            problem = f"job {job.name}: no whole epoch of family {found.family!r} was measured"
            hint = "leave the job out, or record when one of them has trained an epoch on one group"
            raise TraceError(problem, hint, "family")
        if family.name not in self._step_times:
            self._step_times[family.name] = FamilyStepTimes(family)
        return RecordedJob(
            found,
            step_times=self._step_times[family.name],
            curves=ReportedCurves(found, self._noise.get(family.name)),
            samples=_samples(found, family),
            costs=_costs(family.took, self._took, self._given),
            stated=self._stated,
        )


class RecordedJob(JobModel):
    """Job of a recording; its last epoch can be shorter than the other epochs.

    The job ends at the same progress as in the recording, even if other batches need more or fewer
    samples to reach this progress.
    """

    def __init__(
        self,
        job: Submission,
        *,
        step_times: FamilyStepTimes,
        curves: ReportedCurves,
        samples: float,
        costs: ChangeCosts,
        stated: bool,
    ) -> None:
        """Compute the job's work in samples at its first batch.

        `samples` is the number of samples until the end of the job at the recorded batches.
        """
        self._step_times = step_times
        self._slowdown = step_times.slowdown(job)
        self._training_share = _training_share(job)
        self._curves = curves
        self._total = max(1.0, samples * curves.mean_efficiency)
        self.epoch_samples = job.epoch_samples
        epochs = max(1, math.ceil(self._total / job.epoch_samples - EPOCH_TOLERANCE))
        if epochs > MAX_EPOCHS:
            problem = f"job {job.name}: {epochs} epochs of {job.epoch_samples} samples"
            hint = f"correct its samples: at most {MAX_EPOCHS} epochs"
            raise TraceError(problem, hint, "samples")
        self.epochs = epochs
        self._phi: dict[int, float | None] = {}
        self._throughputs: dict[tuple[Placement, int, int], Throughput] = {}
        self.application, self.costs = job.family, costs
        retries = 0 if job.ended == "failed" else job.spec.retries
        stop = _stop(job, epochs) if stated else None
        self.spec = replace(job.spec, stop=stop, retries=retries)

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """Return the measured, interpolated or extrapolated throughput in an epoch."""
        key = (placement, batch, epoch)
        if key not in self._throughputs:
            self._throughputs[key] = self._throughput(placement, batch, epoch)
        return self._throughputs[key]

    def _throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        step = self._step_times.step(placement, batch)
        step_s = step.seconds * self._slowdown
        speed, phi = batch / step_s, self.noise_scale(epoch, batch)
        useful = 1.0 if phi is None else efficiency(batch, self._curves.first, phi)
        progress_per_s = self._training_share * useful * speed
        parts = self._step_times.parts(placement, batch, step_s)
        return Throughput(speed, progress_per_s, step_s, step.extrapolated, parts)

    def epoch_ends_at(self, epoch: int) -> float:
        """Return the progress after `epoch` + 1 passes at the first batch, up to the total work."""
        if epoch >= self.epochs - 1:
            return self._total
        return float((epoch + 1) * self.epoch_samples)

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """Return the noise scale in the middle of the epoch; it does not depend on the batch."""
        if epoch not in self._phi:
            share = min(1.0, (epoch + 0.5) * self.epoch_samples / self._total)
            level = self._curves.noise.at(share)
            self._phi[epoch] = None if level is None else math.exp(level)
        return self._phi[epoch]

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """Return the loss and noise scale reported at the same progress, without other metrics."""
        share = min(1.0, self.epoch_ends_at(max(0, epoch - 1)) / self._total)
        return EpochMetrics(
            train_loss=self._curves.loss.at(share),
            metrics={},
            noise_scale=self.noise_scale(max(0, epoch - 1), batch),
        )

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Return the number of steps until the end of the job at the submitted batch."""
        return max(0.0, self._total - progress) / self.spec.batch_size


def _training_share(job: Submission) -> float:
    """Return the share of an epoch's time that training takes, in (0, 1].

    Scripts use the rest of the time between epochs, for example for evaluation. Simulated journals
    show such a rest too, because their epochs are a progress, not a pass.
    """
    known = [(e.speed, e.lasted_s) for e in job.epochs if e.speed is not None and e.lasted_s]
    lasted_s = math.fsum(seconds for _, seconds in known)
    trained_s = math.fsum(job.epoch_samples / speed.samples_per_s for speed, _ in known)
    return min(1.0, trained_s / lasted_s) if known else 1.0


def _samples(job: Submission, family: Family) -> float:
    """Return the samples that a job would have processed without cancellation or the window's end.

    Work that was not stated is estimated as in a live cluster. A cancelled job ends earlier.
    """
    done = float(job.samples)
    if job.ended in {"succeeded", "failed"}:
        return done
    left = remaining_samples(done, job.stated_samples, family.finished, family.furthest)
    return max(done + left, float(job.epoch_samples))


def _stop(job: Submission, epochs: int) -> StopRule | None:
    """Return the user's stop rule, converted to simulated epochs; a metric rule is unchanged."""
    stop = job.spec.stop
    if stop is not None and stop.metric is not None:
        return stop
    return StopRule(epochs=epochs) if job.stated_samples is not None else None


def _costs(own: ChangeTimes, cluster: ChangeTimes, given: ChangeCosts) -> ChangeCosts:
    """Return the costs measured for the family, else those of the cluster, else the given costs.

    In a measured change without new workers, the members first agree on a step, then training
    pauses while the group changes. A change with new workers ends with the same two parts. Both
    measured times are therefore upper limits of the pause, if the pause was not measured. A restart
    that was not measured is assumed to take as long as a first start.
    """
    pause_s = _first_known(own.pause_s, cluster.pause_s, given.switch_s)
    alone_s = _first_known(own.switch_s, cluster.switch_s, math.inf)
    join_s = _first_known(own.join_s, cluster.join_s, math.inf)
    switch_s = min(pause_s, alone_s, join_s)
    restart_s = _first_known(own.start_s, cluster.start_s, given.restart_s)
    return ChangeCosts(
        start_s=_first_known(own.start_s, cluster.start_s, given.start_s),
        restart_s=_first_known(own.restart_s, cluster.restart_s, restart_s),
        prepare_s=join_s - switch_s if math.isfinite(join_s) else given.prepare_s,
        switch_s=switch_s,
    )


def _first_known(own: float | None, cluster: float | None, given: float) -> float:
    return next((value for value in (own, cluster) if value is not None), given)
