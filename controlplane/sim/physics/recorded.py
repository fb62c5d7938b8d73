"""Physics from what a live cluster measured: its own jobs, once more, under another policy.

Speeds are those of whole epochs on one group, per family. The closed form that the search learns
live (`prediction.throughput`) is fitted to them: what was measured is as it was measured, the more
often the closer; other sizes are extrapolated by the form's rules. What a sample is worth at a
batch comes from the noise scale that the workers reported.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from msgspec.structs import replace

from controlplane.prediction.efficiency import statistical_efficiency
from controlplane.prediction.throughput import Sample, fit
from controlplane.prediction.work import remaining_samples
from controlplane.sim.errors import TraceError
from controlplane.sim.physics.api import Costs, Pace, Placement, Report
from controlplane.sim.recording.model import Family, Recording, Submission, Took
from controlplane.sim.trace import TraceJob
from schemas.jobs import JobSpec, StopRule

FULL_WEIGHT: Final = 10.0  # measurements after which one size counts no more in the fit
MOST_EPOCHS: Final = 10_000_000
TINY: Final = 1e-6  # of an epoch
Size = tuple[int, int, int]  # nodes, slots, global batch


class Recorded:
    """The jobs of a recording."""

    def __init__(
        self,
        recording: Recording,
        costs: Costs,
        *,
        stated: bool = False,
        same_quality: bool = True,
    ) -> None:
        """Choose what the cluster did not tell.

        Args:
            recording: of a live cluster.
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
        self._speeds: dict[str, _Speeds] = {}
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

    def work(self, job: TraceJob, batch: Literal["fixed", "elastic"], *, seed: int) -> RecordedWork:
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
        if family.name not in self._speeds:
            self._speeds[family.name] = _Speeds(family, found.spec.batch_size)
        metric = found.spec.stop is not None and found.spec.stop.metric is not None
        return RecordedWork(
            found,
            speeds=self._speeds[family.name],
            curves=_Curves(found, self._noise.get(family.name)),
            samples=_samples(found, family),
            learns=self._same_quality or metric,
            costs=_costs(family.took, self._took, self._given),
            stated=self._stated,
        )


class RecordedWork:
    """One job; see `Work`."""

    def __init__(
        self,
        job: Submission,
        *,
        speeds: _Speeds,
        curves: _Curves,
        samples: float,
        learns: bool,
        costs: Costs,
        stated: bool,
    ) -> None:
        """Count its work in samples at its first batch.

        Args:
            job: as it was recorded.
            speeds: of its family.
            curves: what it told, over its progress.
            samples: that it would have processed at the batches that it had.
            learns: whether a sample is worth less at larger batches; else each counts the same.
            costs: of its changes.
            stated: whether policies know its length.
        """
        self._speeds = speeds
        self._slower = speeds.slower(job)
        self._curves = curves
        self._learns = learns
        self._total = max(1.0, samples * (curves.mean_worth if learns else 1.0))
        self._epoch_samples = job.epoch_samples
        epochs = max(1, math.ceil(self._total / job.epoch_samples - TINY))
        if epochs > MOST_EPOCHS:
            what = f"job {job.name}: {epochs} epochs of {job.epoch_samples} samples"
            raise TraceError(what, f"correct its samples: at most {MOST_EPOCHS} epochs", "samples")
        self._epochs = epochs
        self._phi: dict[int, float | None] = {}
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
    def costs(self) -> Costs:
        """Of this job's changes."""
        return self._costs

    @property
    def epochs(self) -> int:
        """Its work in passes at the first batch; the last one may be shorter."""
        return self._epochs

    def pace(self, placement: Placement, batch: int, epoch: int) -> Pace:
        """As it was measured, or as the fitted form extrapolates it; one noise scale an epoch."""
        step_s = self._speeds.step_s(placement, batch) * self._slower
        speed, phi = batch / step_s, self._noise_scale(epoch)
        worth = 1.0 if phi is None or not self._learns else _worth(batch, self._curves.first, phi)
        return Pace(speed, worth * speed, step_s)

    def epoch_ends_at(self, epoch: int) -> float:
        """After so many passes at the first batch; the last one ends with the work."""
        if epoch >= self._epochs - 1:
            return self._total
        return float((epoch + 1) * self._epoch_samples)

    def setback(self, before: int, batch: int, epoch: int) -> float:
        """None was recorded."""
        return 0.0

    def report(self, epoch: int, batch: int) -> Report:
        """The loss and the noise scale that it told at the same progress; no other metrics."""
        share = min(1.0, self.epoch_ends_at(max(0, epoch - 1)) / self._total)
        return Report(
            train_loss=self._curves.loss.at(share),
            metrics={},
            noise_scale=self._noise_scale(max(0, epoch - 1)),
        )

    def remaining_steps(self, epoch: int, progress: float) -> float:
        """Steps that are left at the submitted batch."""
        return max(0.0, self._total - progress) / self.spec.batch_size

    def _noise_scale(self, epoch: int) -> float | None:
        """At the middle of an epoch."""
        if epoch not in self._phi:
            share = min(1.0, (epoch + 0.5) * self._epoch_samples / self._total)
            level = self._curves.noise.at(share)
            self._phi[epoch] = None if level is None else math.exp(level)
        return self._phi[epoch]


@dataclass(frozen=True, slots=True)
class _Curve:
    """Straight between its points, level beyond them; None everywhere if it has none."""

    shares: Sequence[float] = ()  # of the job's progress, growing
    values: Sequence[float] = ()

    def at(self, share: float) -> float | None:
        if not self.shares:
            return None
        place = bisect_left(self.shares, share)
        if place in {0, len(self.shares)}:
            return self.values[min(place, len(self.shares) - 1)]
        low, high = self.shares[place - 1], self.shares[place]
        part = (share - low) / (high - low)
        return self.values[place - 1] * (1.0 - part) + self.values[place] * part


class _Curves:
    """What a job told, over its progress; a job without a noise scale has its family's mean.

    Where nobody in the family ever told one, every sample is worth the same at every batch.
    """

    def __init__(self, job: Submission, usual: float | None) -> None:
        """Place the job's epochs on its progress.

        Args:
            job: as it was recorded.
            usual: mean logarithm of the family's noise scales; None if there are none.
        """
        self.first = job.spec.batch_size
        epochs = sorted(
            {epoch.number: epoch for epoch in job.epochs}.values(), key=lambda e: e.number
        )
        told = [epoch for epoch in epochs if epoch.noise_scale]
        by_number = _Curve(
            [float(epoch.number) for epoch in told],
            [math.log(epoch.noise_scale or 1.0) for epoch in told],
        )
        levels = [by_number.at(float(epoch.number)) for epoch in epochs]
        levels = [usual if level is None else level for level in levels]
        worths = [
            1.0 if level is None else _worth(epoch.batch, self.first, math.exp(level))
            for epoch, level in zip(epochs, levels, strict=True)
        ]
        self.mean_worth = float(np.mean(worths)) if worths else 1.0
        ends = (np.cumsum(worths) / sum(worths)).tolist() if worths else []
        known = [place for place, epoch in enumerate(epochs) if epoch.noise_scale]
        self.noise = _Curve([ends[at] for at in known], [levels[at] or 0.0 for at in known])
        if not known and usual is not None:
            self.noise = _Curve([1.0], [usual])
        losses = [(end, e.train_loss) for end, e in zip(ends, epochs, strict=True)]
        heard = [(end, loss) for end, loss in losses if loss is not None]
        self.loss = _Curve([end for end, _ in heard], [loss for _, loss in heard])


class _Speeds:
    """Steps of one family."""

    def __init__(self, family: Family, first_batch: int) -> None:
        self._known: dict[tuple[Placement, int], float] = {}
        seen: dict[Size, list[float]] = {}
        for speed in family.speeds:
            size = (speed.nodes, speed.slots, speed.batch)
            seen.setdefault(size, []).append(speed.batch / speed.samples_per_s)
        samples = [
            Sample(nodes, slots, batch / slots, float(np.mean(times)), _weight(times))
            for (nodes, slots, batch), times in sorted(seen.items())
        ]
        self._model = fit(samples, first_batch)
        self._own = {
            size: (float(np.mean(times)) / self._modelled(size)) ** (len(times) / (len(times) + 1))
            for size, times in seen.items()
        }

    def step_s(self, placement: Placement, batch: int) -> float:
        """Seconds of a step."""
        key = (placement, batch)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._usual((len(placement), sum(placement), batch))
        return known

    def slower(self, job: Submission) -> float:
        """How much longer one job's steps took than its family's; the less sure, the fewer."""
        seen = [epoch.speed for epoch in job.epochs if epoch.speed is not None]
        if not seen:
            return 1.0
        took = [1.0 / speed.samples_per_s for speed in seen]
        usual = [self._usual((s.nodes, s.slots, s.batch)) / s.batch for s in seen]
        believed = float(np.mean(usual))  # one more epoch, at the usual speed
        return (sum(took) + believed) / (sum(usual) + believed)

    def _usual(self, size: Size) -> float:
        return self._modelled(size) * self._own.get(size, 1.0)

    def _modelled(self, size: Size) -> float:
        nodes, slots, batch = size
        said = self._model.step_s(np.array(nodes), np.array(slots), np.array(batch / slots))
        return max(1e-9, float(said))


def _weight(times: Sequence[float]) -> float:
    return min(FULL_WEIGHT, float(len(times)))


def _worth(batch: int, first: int, phi: float) -> float:
    return float(statistical_efficiency(np.array(float(batch)), float(first), phi))


def _samples(job: Submission, family: Family) -> float:
    """What a job would have processed had it not been cancelled, and not outlived the recording.

    Where that was not stated, it is what a live cluster would have believed: as much as its
    relatives, else twice what it had done. A cancelled job ends before that, unless the other
    policy is faster.
    """
    if job.ended in {"succeeded", "failed"}:
        return float(job.samples)
    done = float(job.samples)
    left = remaining_samples(done, job.stated_samples, family.finished, float(family.furthest))
    return max(done + left, float(job.epoch_samples))


def _stop(job: Submission, epochs: int) -> StopRule | None:
    """What was stated, in epochs as they are counted here; a metric as it was."""
    stop = job.spec.stop
    if stop is not None and stop.metric is not None:
        return stop
    return StopRule(epochs=epochs) if job.stated_samples is not None else None


def _costs(own: Took, everybody: Took, given: Costs) -> Costs:
    """Of the family, else of the cluster, else as they were given.

    A change without newcomers took as long as its members needed to come to an agreed step and to
    change. The second part alone is what nobody trains in, so it bounds what was given from above.
    """
    switch_s = min(given.switch_s, _first(own.switch_s, everybody.switch_s, given.switch_s))
    join_s = _first(own.join_s, everybody.join_s, given.prepare_s + switch_s)
    return Costs(
        start_s=_first(own.start_s, everybody.start_s, given.start_s),
        restart_s=_first(own.restart_s, everybody.restart_s, given.restart_s),
        prepare_s=max(0.0, join_s - switch_s),
        switch_s=switch_s,
    )


def _first(own: float | None, everybody: float | None, given: float) -> float:
    return next((value for value in (own, everybody) if value is not None), given)
