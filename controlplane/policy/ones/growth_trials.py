"""Trials of growth: whether the last growth, batch or place of a job pays, by telemetry.

Batches that lost are not tried again for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import JobView
from controlplane.prediction.speed_model import statistical_efficiency
from controlplane.prediction.step_times import SMOOTHING
from schemas.ids import JobId, Seconds

GROWTH_SAMPLES: Final = 2  # measurements of the new group before it is judged
SAME_SIZE_SAMPLES: Final = 3  # of both groups, if they have the same size
LOSS_THRESHOLD: Final = 0.1  # relative; a growth that loses less progress is within the noise


@dataclass(slots=True)
class GroupPace:
    """Step time of one group, as if no other job used its cores."""

    version: int
    slots: int
    batch: int  # global, samples per step
    nodes: int = 1
    step_s: float = 0.0
    count: int = 0  # measurements

    def add(self, step_s: float) -> None:
        """Record the seconds of a step."""
        self.count += 1
        share = max(SMOOTHING, 1.0 / self.count)
        self.step_s += share * (step_s - self.step_s)


@dataclass(slots=True)
class GrowthTrial:
    """Present group of a job and the groups to compare it with; None: nothing to compare."""

    now: GroupPace | None = None
    before: GroupPace | None = None  # last group with fewer slots
    previous: GroupPace | None = None  # previous group, same size, smaller batch or fewer nodes

    def add(self, version: int, slots: int, batch: int, step_s: float, nodes: int = 1) -> None:
        """Record a step time; another group, or another batch, starts a new trial.

        Args:
            step_s: seconds of a step, as if no other job used its cores.
        """
        now = self.now
        if now is None or (now.version, now.batch) != (version, batch):
            self.before = self._smaller_than(slots)
            new = GroupPace(version, slots, batch, nodes)
            self.previous = now if now is not None and _is_comparable(now, new) else None
            now = self.now = new
        now.add(step_s)

    def _smaller_than(self, slots: int) -> GroupPace | None:
        """Return the last group with fewer slots."""
        found = (one for one in (self.now, self.before) if one is not None and one.count > 0)
        return next((one for one in found if one.slots < slots), None)

    @property
    def compares(self) -> bool:
        """True if there are two groups to compare."""
        return self.now is not None and (self.before is not None or self.previous is not None)

    def ratio(self, progress: Callable[[int], float]) -> float | None:
        """Return the progress over that before the growth; None if unknown, or without growth.

        Args:
            progress: value of one step with a given batch.
        """
        return _ratio(self.now, self.before, progress, GROWTH_SAMPLES)

    def loss(self, progress: Callable[[int], float]) -> float | None:
        """Return the ratio if the growth lost progress; None otherwise."""
        return _lost(self.ratio(progress))

    def same_size_loss(self, progress: Callable[[int], float]) -> float | None:
        """Return the ratio to the previous group of this size if it lost progress, otherwise None.

        A batch and a place make less difference than a size, so that one more measurement is
        needed.
        """
        if self.previous is None or self.previous.count < SAME_SIZE_SAMPLES:
            return None  # with fewer, noise would decide about half of all changes
        return _lost(_ratio(self.now, self.previous, progress, SAME_SIZE_SAMPLES))


def _is_comparable(before: GroupPace, now: GroupPace) -> bool:
    """True if `now` has as many slots, and either a larger batch or more nodes, but not both."""
    if before.slots != now.slots:
        return False
    larger, farther = now.batch > before.batch, now.nodes > before.nodes
    return (larger and now.nodes == before.nodes) or (farther and now.batch == before.batch)


def _ratio(
    now: GroupPace | None, before: GroupPace | None, progress: Callable[[int], float], count: int
) -> float | None:
    if now is None or before is None or now.count < count:
        return None
    then = progress(before.batch) / before.step_s
    return progress(now.batch) / now.step_s / then


def _lost(ratio: float | None) -> float | None:
    return ratio if ratio is not None and ratio < 1.0 - LOSS_THRESHOLD else None


class Loss(NamedTuple):
    """Change that lost progress."""

    ratio: float  # progress now over progress before
    slots: int  # before the change; the present number for a batch or a place
    batch: int | None = None  # global batch before, if a larger one lost; otherwise None


def last_loss(trial: GrowthTrial, job: JobView, noise_scale: float) -> Loss | None:
    """Return the loss by the last change of a job's slots, batch or nodes; None if it lost nothing.

    None also if too little was measured, or if the trial is of another group than the job has now.
    """
    now, before, previous = trial.now, trial.before, trial.previous
    present = (len(job.running_on), sum(job.running_on.values()))
    if now is None or (now.slots, now.batch) != present:
        return None

    def progress(batch: int) -> float:
        worth = statistical_efficiency(np.array([float(batch)]), job.batch_size, noise_scale)
        return batch * float(worth[0])

    loss = trial.loss(progress)
    if loss is not None and before is not None:
        return Loss(loss, before.slots)
    loss = trial.same_size_loss(progress)
    if loss is None or previous is None:
        return None
    return Loss(loss, previous.slots, previous.batch if now.batch > previous.batch else None)


NOISE_GROWTH: Final = 2.0  # a larger batch may pay once phi has grown by this factor
CAP_DURATION_S: Final = 600.0  # a loss may have had another cause, so caps expire


class _Cap(NamedTuple):
    batch: int  # global batch that was better
    slots: int  # slots at that time
    noise_scale: float  # phi at that time, samples
    until: Seconds


class BatchCaps:
    """Caps on the batches of jobs for which a larger batch made less progress on the same slots.

    The model of speeds is linear in the batch; a device that is full, or swaps, is not.
    """

    def __init__(self) -> None:
        self._caps: dict[JobId, _Cap] = {}

    def observe(self, job: JobView, trial: GrowthTrial, noise_scale: float, now: Seconds) -> None:
        """Add a cap if the trial, with the latest telemetry, shows that a batch lost progress."""
        loss = last_loss(trial, job, noise_scale)
        if loss is not None and loss.batch is not None:
            until = Seconds(now + CAP_DURATION_S)
            self._caps[job.job] = _Cap(loss.batch, len(job.running_on), noise_scale, until)

    def __contains__(self, job: JobId) -> bool:
        """True if the job has a cap."""
        return job in self._caps

    def expire(self, now: Seconds) -> None:
        """Remove old caps."""
        if self._caps:
            self._caps = {job: cap for job, cap in self._caps.items() if now < cap.until}

    def forget(self, job: JobId) -> None:
        """Remove the cap of a job, if any."""
        self._caps.pop(job, None)

    def capped(self, job: JobView, limit: int, noise_scale: float) -> int:
        """Return R, clamped to the job's cap."""
        cap = self._caps.get(job.job)
        if cap is None or len(job.running_on) != cap.slots:
            return limit
        return limit if noise_scale >= NOISE_GROWTH * cap.noise_scale else min(limit, cap.batch)
