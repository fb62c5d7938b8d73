"""History of single jobs: batch limit, noise scale, migration, and trials of growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from controlplane.policy.api import JobView, StepsSeen
from controlplane.policy.search.observed_jobs import JobHistory, LimitBounds
from controlplane.prediction.step_times import SMOOTHING
from controlplane.prediction.throughput import statistical_efficiency
from schemas.ids import Seconds, SlotId

GROWTH_SAMPLES: Final = 2  # measurements of the new group before it is judged
LOSS_THRESHOLD: Final = 0.1  # relative; smaller losses are within the noise


@dataclass(slots=True)
class GroupPace:
    """The step time of one group, corrected as if no other job used the cores of its nodes."""

    version: int
    slots: int
    batch: int  # global, samples per step
    step_s: float = 0.0
    count: int = 0  # number of measurements

    def add(self, step_s: float) -> None:
        """Record the duration of a step, in seconds."""
        self.count += 1
        share = max(SMOOTHING, 1.0 / self.count)
        self.step_s += share * (step_s - self.step_s)


@dataclass(slots=True)
class GrowthTrial:
    """The present group of a job and the last smaller group; a missing one is None."""

    now: GroupPace | None = None
    before: GroupPace | None = None

    def add(self, version: int, slots: int, batch: int, step_s: float) -> None:
        """Record a step time, corrected for other jobs; a new group or batch starts a new trial."""
        now = self.now
        if now is None or (now.version, now.batch) != (version, batch):
            measured = (one for one in (now, self.before) if one is not None and one.count > 0)
            self.before = next((one for one in measured if one.slots < slots), None)
            now = self.now = GroupPace(version, slots, batch)
        now.add(step_s)

    def loss(self, progress: Callable[[int], float]) -> tuple[float, int] | None:
        """Return (progress now / progress before, slots before) if the growth lost, or None.

        `progress` returns the value of one step with a given batch.
        """
        now, before = self.now, self.before
        if now is None or before is None or now.count < GROWTH_SAMPLES:
            return None
        ratio = progress(now.batch) / now.step_s / (progress(before.batch) / before.step_s)
        return (ratio, before.slots) if ratio < 1.0 - LOSS_THRESHOLD else None

    def job_loss(self, job: JobView, noise_scale: float) -> tuple[float, int] | None:
        """Return the `loss` of a job; return None, too, if the trial measured another group."""
        present = (len(job.running_on), sum(job.running_on.values()))
        if self.now is None or (self.now.slots, self.now.batch) != present:
            return None

        def progress(batch: int) -> float:
            worth = statistical_efficiency(np.array([float(batch)]), job.batch_size, noise_scale)
            return batch * float(worth[0])

        return self.loss(progress)


class BatchHold(Enum):
    """Allowed changes of the batch of a job on its present slots."""

    NO = auto()
    GROW_ONLY = auto()
    SHRINK_ONLY = auto()


@dataclass(frozen=True, slots=True)
class Migration:
    """Migration of a running job, which first grows to its old and new slots together.

    This growth is no trial: the size in between was not chosen, and its speed predicts nothing.
    """

    all_slots: frozenset[SlotId]  # old and new slots
    new_slots: frozenset[SlotId]

    @classmethod
    def between(cls, have: Iterable[SlotId], to: Iterable[SlotId]) -> Migration | None:
        """Return the migration between sets of slots; None if the job only grows or shrinks."""
        before, after = frozenset(have), frozenset(to)
        return None if before <= after or after <= before else cls(before | after, after)


@dataclass(slots=True)
class OnesJobHistory(JobHistory):
    """History of one job for this policy."""

    group: tuple[int, int] = (-1, 0)  # version and global batch of the last telemetry
    group_step: int = 0  # step of the job at which this group started with this batch
    slots: int = 0  # number of slots in the last view
    batch: int = 0  # global batch in the last view in which the job had slots
    batch_at: Seconds = Seconds(-1e9)  # time of the last change of the batch alone
    batch_grew: bool = False  # direction of that change
    slots_before_return: int = 0  # slots before the job last returned some while no job waited
    returned_at: Seconds = Seconds(-1e9)
    epoch: int = 0  # last finished epoch
    last_noise: float | None = None  # last measurement; None: not measured yet
    view: JobView | None = None  # the job in the last view
    edition: int = 0  # number of changes that matter to plans
    trial: GrowthTrial = field(default_factory=GrowthTrial)
    move: Migration | None = None  # migration started by the last plan that changed the job

    def observe_steps(self, event: StepsSeen) -> bool:
        """Record the steps of a group; return True if the speed belongs to this group alone."""
        group = (event.group, event.global_batch)
        again, trained = self.group == group, event.samples_done - self.samples
        if not again:
            self.group_step = event.step - event.group_steps
        self.steps, self.group, self.samples = event.step, group, event.samples_done
        return event.group_steps > 0 or (again and trained > 0)

    def grow_limit(self, steps: int) -> None:
        """Raise R to twice the reported batch if `steps` steps were trained with that batch."""
        if self.steps - self.group_step >= steps:
            self.limit = self.bounds.clip(max(self.limit, 2 * self.group[1]))

    def follow(self, job: JobView, now: Seconds, *, contended: bool) -> None:
        """Update bounds, R and returned slots; `contended` is True if some waiting job would fit.

        R stays between the present batch and twice that batch, however often plans are made.
        """
        self.view = job
        self.bounds = LimitBounds(first=job.batch_size, least=job.batch_size, most=job.batch_limit)
        self.limit = max(self.limit, job.batch_size)
        present = sum(job.running_on.values())
        if present and present != self.batch:
            alone = len(job.running_on) == self.slots
            self.batch_at = now if alone else Seconds(-1e9)
            self.batch, self.batch_grew = present, present > self.batch
        if present:
            self.limit = self.bounds.clip(max(present, min(self.limit, 2 * present)))
        if not job.running_on:
            self.slots = 0
            return
        slots = len(job.running_on)
        moved = self.move is not None and self.move.new_slots == job.running_on.keys()
        if slots < self.slots and not contended and not moved:
            self.slots_before_return, self.returned_at = self.slots, now
        self.slots = slots
