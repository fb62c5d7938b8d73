"""A model from what a live cluster measured: its own jobs, once more, under another policy.

Speeds are those of whole epochs on one group, per family: as measured, straight between
measurements, and by the simple rules of `step_times` beyond them, which the results say. What a
sample is worth at a batch comes from the noise scale that the workers reported.

What a recorded job reported of itself, over its progress.
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
from controlplane.prediction.speed_model import statistical_efficiency
from controlplane.sim.cluster import TraceError
from controlplane.sim.models.job_model import ChangeCosts, EpochMetrics, Placement, Throughput
from controlplane.sim.models.recording import ChangeTimes, Family, Recording, StepTimes, Submission
from controlplane.sim.results import TraceJob
from schemas.jobs import JobSpec, StopRule


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight between its points, level beyond them; None everywhere if it has none."""

    shares: Sequence[float] = ()  # of the job's progress, growing
    values: Sequence[float] = ()

    def at(self, share: float) -> float | None:
        """The value there.

        Args:
            share: of the job's progress, in [0, 1].
        """
        if not self.shares:
            return None
        place = bisect_left(self.shares, share)
        if place in {0, len(self.shares)}:
            return self.values[min(place, len(self.shares) - 1)]
        low, high = self.shares[place - 1], self.shares[place]
        part = (share - low) / (high - low)
        return self.values[place - 1] * (1.0 - part) + self.values[place] * part


class ReportedCurves:
    """What a job reported, over its progress; a job without a noise scale has its family's mean.

    Where nobody in the family ever reported one, every sample is worth the same at every batch.
    """

    def __init__(self, job: Submission, usual: float | None) -> None:
        """Place the job's epochs on its progress.

        Args:
            usual: mean logarithm of the family's noise scales; None if there are none.
        """
        self.first = job.spec.batch_size
        epochs = sorted(
            {epoch.number: epoch for epoch in job.epochs}.values(), key=lambda e: e.number
        )
        measured = [epoch for epoch in epochs if epoch.noise_scale]
        by_number = Curve(
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
        self.noise = Curve([ends[at] for at in known], [levels[at] or 0.0 for at in known])
        if not known and usual is not None:
            self.noise = Curve([1.0], [usual])
        losses = [(end, e.train_loss) for end, e in zip(ends, epochs, strict=True)]
        losses_known = [(end, loss) for end, loss in losses if loss is not None]
        self.loss = Curve([end for end, _ in losses_known], [loss for _, loss in losses_known])


def efficiency(batch: int, first: int, phi: float) -> float:
    """Progress per sample, relative to the first batch.

    Args:
        batch: global, samples.
        phi: noise scale of the gradients, samples.
    """
    return float(statistical_efficiency(np.array(float(batch)), float(first), phi))


MOST_EPOCHS: Final = 10_000_000
TINY: Final = 1e-6  # of an epoch


class RecordedModel:
    """The jobs of a recording."""

    def __init__(
        self,
        recording: Recording,
        costs: ChangeCosts,
        *,
        stated: bool = False,
        same_quality: bool = True,
    ) -> None:
        """Choose what the recording does not say.

        Args:
            costs: of changes that the recording has no measurement of.
            stated: users state how much work their jobs are, where they did or their scripts did;
                else nobody knows.
            same_quality: a job is over when it has learnt as much as it had, however many samples
                that takes at other batches. False: a job that stated epochs or samples is over
                after as many samples at any batch, as a live cluster does it; those with a metric
                still have to learn as much.
        """
        self._jobs = {job.name: job for job in recording.jobs}
        self._families = {family.name: family for family in recording.families}
        self._took = recording.took
        self._given = costs
        self._stated = stated
        self._same_quality = same_quality
        self._step_times: dict[str, StepTimes] = {}
        noise: dict[str, list[float]] = {}
        for job in recording.jobs:
            noise.setdefault(job.family, []).extend(
                e.noise_scale for e in job.epochs if e.noise_scale
            )
        self._noise = {
            name: float(np.mean(np.log(values))) for name, values in noise.items() if values
        }

    @property
    def whole_seconds(self) -> bool:
        """Epochs last as long as they last."""
        return False

    def job_model(
        self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int
    ) -> RecordedJob:
        """The truth about `job`; the same for every seed, and whether its batch is fixed or not.

        Raises:
            TraceError: if it is not in the recording, or nobody knows how fast it trains.
        """
        found = self._jobs.get(job.workload)
        if found is None:
            what = f"job {job.name}: {job.workload[:60]!r} is no job of the recording"
            raise TraceError(what, "simulate the recording's own trace", "workload")
        family = self._families.get(found.family)
        if family is None or not family.speeds:
            what = f"job {job.name}: no whole epoch of family {found.family!r} was measured"
            hint = "leave the job out, or record when one of them has trained an epoch on one group"
            raise TraceError(what, hint, "family")
        if family.name not in self._step_times:
            self._step_times[family.name] = StepTimes(family)
        metric = found.spec.stop is not None and found.spec.stop.metric is not None
        return RecordedJob(
            found,
            step_times=self._step_times[family.name],
            curves=ReportedCurves(found, self._noise.get(family.name)),
            samples=_samples(found, family),
            learns=self._same_quality or metric,
            costs=_costs(family.took, self._took, self._given),
            stated=self._stated,
        )


class RecordedJob:
    """One job; see `JobModel`."""

    def __init__(
        self,
        job: Submission,
        *,
        step_times: StepTimes,
        curves: ReportedCurves,
        samples: float,
        learns: bool,
        costs: ChangeCosts,
        stated: bool,
    ) -> None:
        """Count its work in samples at its first batch.

        Args:
            curves: what it reported, over its progress.
            samples: that it would have processed at the batches that it had.
            learns: whether a sample is worth less at larger batches; else each counts the same.
            stated: whether policies know its length.

        Raises:
            TraceError: if it has more epochs than a simulation can count.
        """
        self._step_times = step_times
        self._slowdown = step_times.slowdown(job)
        self._training_share = _training_share(job)
        self._curves = curves
        self._learns = learns
        self._total = max(1.0, samples * (curves.mean_efficiency if learns else 1.0))
        self._epoch_samples = job.epoch_samples
        epochs = max(1, math.ceil(self._total / job.epoch_samples - TINY))
        if epochs > MOST_EPOCHS:
            what = f"job {job.name}: {epochs} epochs of {job.epoch_samples} samples"
            raise TraceError(what, f"correct its samples: at most {MOST_EPOCHS} epochs", "samples")
        self._epochs = epochs
        self._phi: dict[int, float | None] = {}
        self._throughputs: dict[tuple[Placement, int, int], Throughput] = {}
        self._application = job.family
        self._costs = costs
        retries = 0 if job.ended == "failed" else job.spec.retries
        stop = _stop(job, epochs) if stated else None
        self.spec: JobSpec = replace(job.spec, stop=stop, retries=retries)

    @property
    def application(self) -> str:
        """Its family."""
        return self._application

    @property
    def epoch_samples(self) -> int:
        """||D||."""
        return self._epoch_samples

    @property
    def costs(self) -> ChangeCosts:
        """Of this job's changes."""
        return self._costs

    @property
    def epochs(self) -> int:
        """Its work in passes at the first batch; the last one may be shorter."""
        return self._epochs

    def throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        """As it was measured, interpolated or extrapolated; one noise scale an epoch."""
        key = (placement, batch, epoch)
        known = self._throughputs.get(key)
        if known is None:
            known = self._throughputs[key] = self._throughput(placement, batch, epoch)
        return known

    def _throughput(self, placement: Placement, batch: int, epoch: int) -> Throughput:
        step = self._step_times.step(placement, batch)
        step_s = step.seconds * self._slowdown
        speed, phi = batch / step_s, self.noise_scale(epoch, batch)
        useful = (
            1.0 if phi is None or not self._learns else efficiency(batch, self._curves.first, phi)
        )
        progress_per_s = self._training_share * useful * speed
        parts = self._step_times.parts(placement, batch, step_s)
        return Throughput(
            speed, progress_per_s, step_s, extrapolated=step.extrapolated, parts=parts
        )

    def epoch_ends_at(self, epoch: int) -> float:
        """After so many passes at the first batch; the last one ends with the work."""
        if epoch >= self._epochs - 1:
            return self._total
        return float((epoch + 1) * self._epoch_samples)

    def lost_progress(self, before: int, batch: int, epoch: int) -> float:
        """None was recorded."""
        return 0.0

    def noise_scale(self, epoch: int, batch: int) -> float | None:
        """At the middle of an epoch; the same at any batch."""
        if epoch not in self._phi:
            share = min(1.0, (epoch + 0.5) * self._epoch_samples / self._total)
            level = self._curves.noise.at(share)
            self._phi[epoch] = None if level is None else math.exp(level)
        return self._phi[epoch]

    def epoch_metrics(self, epoch: int, batch: int) -> EpochMetrics:
        """The loss and the noise scale that it reported at the same progress; no other metrics."""
        share = min(1.0, self.epoch_ends_at(max(0, epoch - 1)) / self._total)
        return EpochMetrics(
            train_loss=self._curves.loss.at(share),
            metrics={},
            noise_scale=self.noise_scale(max(0, epoch - 1), batch),
        )

    def loss_left(self, epoch: int) -> float | None:
        """Nobody knows: the loss of a longer life was not recorded."""
        return None

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Steps that are left at the submitted batch."""
        return max(0.0, self._total - progress) / self.spec.batch_size


def _training_share(job: Submission) -> float:
    """The share of an epoch's time that its samples and its speed account for.

    The rest goes to what scripts do between epochs, such as evaluating. In a simulated cluster an
    epoch is what a pass is worth at the first batch, so its journals show such a share as well.
    """
    known = [(e.speed, e.lasted_s) for e in job.epochs if e.speed is not None and e.lasted_s]
    lasted_s = math.fsum(seconds for _, seconds in known)
    trained_s = math.fsum(job.epoch_samples / speed.samples_per_s for speed, _ in known)
    return min(1.0, trained_s / lasted_s) if known else 1.0


def _samples(job: Submission, family: Family) -> float:
    """What a job would have processed had it not been cancelled, and not outlived the recording.

    Where that was not stated, it is what a live cluster would have believed: as much as its
    relatives, else twice what it had done. A cancelled job ends before that, unless the other
    policy is faster.
    """
    if job.ended in {"succeeded", "failed"}:
        return float(job.samples)
    done = float(job.samples)
    left = remaining_samples(done, job.stated_samples, family.finished, family.furthest)
    return max(done + left, float(job.epoch_samples))


def _stop(job: Submission, epochs: int) -> StopRule | None:
    """What was stated, in epochs as they are counted here; a metric as it was."""
    stop = job.spec.stop
    if stop is not None and stop.metric is not None:
        return stop
    return StopRule(epochs=epochs) if job.stated_samples is not None else None


def _costs(own: ChangeTimes, everybody: ChangeTimes, given: ChangeCosts) -> ChangeCosts:
    """Of the family, else of the cluster, else as they were given.

    A change without newcomers took as long as its members needed to come to an agreed step and to
    change. The second part alone is what nobody trains in, so it bounds what was given from above.
    So does a change with newcomers, of which the last part is such a change.
    """
    alone_s = _first(own.switch_s, everybody.switch_s, math.inf)
    join_s = _first(own.join_s, everybody.join_s, math.inf)
    switch_s = min(given.switch_s, alone_s, join_s)
    return ChangeCosts(
        start_s=_first(own.start_s, everybody.start_s, given.start_s),
        restart_s=_first(own.restart_s, everybody.restart_s, given.restart_s),
        prepare_s=join_s - switch_s if math.isfinite(join_s) else given.prepare_s,
        switch_s=switch_s,
    )


def _first(own: float | None, everybody: float | None, given: float) -> float:
    return next((value for value in (own, everybody) if value is not None), given)
