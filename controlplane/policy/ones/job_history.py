"""History of single jobs: batch limit, noise scale, migration, and trials by telemetry.

A trial compares the groups before and after a job's last change. `BatchCaps` keeps a batch that
lost from returning too soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import numpy as np

from controlplane.policy.api import JobView, StepsSeen
from controlplane.policy.search.observed_jobs import JobHistory, LimitBounds
from controlplane.prediction.step_times import SMOOTHING
from controlplane.prediction.throughput import statistical_efficiency
from schemas.ids import JobId, Seconds, SlotId

GROWTH_SAMPLES: Final = 2  # measurements of the new group before it is judged
SAME_SIZE_SAMPLES: Final = 3  # measurements of each group, if both have the same size
LOSS_THRESHOLD: Final = 0.1  # relative; smaller losses are within the noise


@dataclass(slots=True)
class GroupPace:
    """The step time of one group, corrected as if no other job used the cores of its nodes."""

    version: int
    slots: int
    batch: int  # global, samples per step
    nodes: int = 1
    step_s: float = 0.0
    count: int = 0  # number of measurements

    def add(self, step_s: float) -> None:
        """Record the duration of a step, in seconds."""
        self.count += 1
        share = max(SMOOTHING, 1.0 / self.count)
        self.step_s += share * (step_s - self.step_s)


class Loss(NamedTuple):
    """Result of a change that lost progress."""

    ratio: float  # progress now over progress before
    slots: int  # number before the change; unchanged if a batch or place lost
    batch: int | None = None  # global batch before, if a larger one lost; otherwise None


@dataclass(slots=True)
class GrowthTrial:
    """The present group of a job and earlier groups to compare it with; a missing one is None."""

    now: GroupPace | None = None
    before: GroupPace | None = None  # last group with fewer slots
    previous: GroupPace | None = None  # same size, but a smaller batch or fewer nodes

    def add(self, version: int, slots: int, batch: int, step_s: float, nodes: int = 1) -> None:
        """Record a step time, corrected for other jobs; a new group or batch starts a new trial."""
        now = self.now
        if now is None or (now.version, now.batch) != (version, batch):
            measured = (one for one in (now, self.before) if one is not None and one.count > 0)
            self.before = next((one for one in measured if one.slots < slots), None)
            new = GroupPace(version, slots, batch, nodes)
            self.previous = now if now is not None and _is_comparable(now, new) else None
            now = self.now = new
        now.add(step_s)

    def loss(self, progress: Callable[[int], float]) -> Loss | None:
        """Return the loss caused by the last change of slots, batch or nodes, or None.

        `progress` returns the value of one step with a given batch. A change of the batch
        or the nodes needs one measurement more than a change of size. Otherwise noise would decide
        about half of these cases.
        """
        now, before, previous = self.now, self.before, self.previous
        if now is None:
            return None

        def lost(other: GroupPace, count: int) -> float | None:
            if now.count < count:
                return None
            ratio = progress(now.batch) / now.step_s / (progress(other.batch) / other.step_s)
            return ratio if ratio < 1.0 - LOSS_THRESHOLD else None

        if before is not None and (ratio := lost(before, GROWTH_SAMPLES)) is not None:
            return Loss(ratio, before.slots)
        if previous is None or previous.count < SAME_SIZE_SAMPLES:
            return None
        if (ratio := lost(previous, SAME_SIZE_SAMPLES)) is None:
            return None
        return Loss(ratio, previous.slots, previous.batch if now.batch > previous.batch else None)

    def job_loss(self, job: JobView, noise_scale: float) -> Loss | None:
        """Return the `loss` of a job; return None, too, if the trial measured another group."""
        present = (len(job.running_on), sum(job.running_on.values()))
        if self.now is None or (self.now.slots, self.now.batch) != present:
            return None

        def progress(batch: int) -> float:
            worth = statistical_efficiency(np.array([float(batch)]), job.batch_size, noise_scale)
            return batch * float(worth[0])

        return self.loss(progress)


def _is_comparable(before: GroupPace, now: GroupPace) -> bool:
    """True if `now` differs from `before` in a larger batch or in more nodes, but not in both."""
    if before.slots != now.slots:
        return False
    larger, farther = now.batch > before.batch, now.nodes > before.nodes
    return (larger and now.nodes == before.nodes) or (farther and now.batch == before.batch)


NOISE_GROWTH: Final = 2.0  # a larger batch may pay once phi has grown by this factor
CAP_DURATION_S: Final = 600.0  # caps expire, because a loss may have had another cause


class _Cap(NamedTuple):
    batch: int  # global batch that was better
    slots: int  # slots when the cap was set
    noise_scale: float  # phi when the cap was set, samples
    until: Seconds


class BatchCaps:
    """Temporary limits on batches, for jobs that made less progress with a larger batch.

    The two batches are compared on the same number of slots.

    The speed model is linear in the batch, but a device that is full or swaps memory is not.
    """

    def __init__(self) -> None:
        self._caps: dict[JobId, _Cap] = {}

    def observe(self, job: JobView, trial: GrowthTrial, noise_scale: float, now: Seconds) -> None:
        """Limit the job's batch if the trial shows that a larger batch made less progress.

        A limit ends for good once phi has grown by `NOISE_GROWTH`.
        """
        cap = self._caps.get(job.job)
        if cap is not None and noise_scale >= NOISE_GROWTH * cap.noise_scale:
            del self._caps[job.job]
        loss = trial.job_loss(job, noise_scale)
        if loss is not None and loss.batch is not None:
            until = Seconds(now + CAP_DURATION_S)
            self._caps[job.job] = _Cap(loss.batch, len(job.running_on), noise_scale, until)

    def __contains__(self, job: JobId) -> bool:
        """True if the job's batch is limited."""
        return job in self._caps

    def expire(self, now: Seconds) -> None:
        """Remove limits that are older than ten minutes."""
        if self._caps:
            self._caps = {job: cap for job, cap in self._caps.items() if now < cap.until}

    def forget(self, job: JobId) -> None:
        """Remove the limit on the batch of a job, if there is one."""
        self._caps.pop(job, None)

    def capped(self, job: JobView, limit: int) -> int:
        """Return `limit` (R), lowered to the temporary limit of the job if that still applies."""
        cap = self._caps.get(job.job)
        if cap is None or len(job.running_on) != cap.slots:
            return limit
        return min(limit, cap.batch)


class BatchHold(Enum):
    """Allowed changes of the batch of a job on its present slots."""

    NO = auto()
    GROW_ONLY = auto()
    SHRINK_ONLY = auto()
    KEEP = auto()


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
