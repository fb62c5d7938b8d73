"""History of single jobs and what it teaches: batch limits, noise scales, measured passes.

A `Migration` takes two changes; between them the job has the old and the new slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from controlplane.policy.api import EpochSeen, JobView, StepsSeen
from controlplane.policy.ones.growth_trials import GrowthTrial
from controlplane.policy.ones.slowdowns import PlacementIndex
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.batch_limits import LimitBounds
from controlplane.policy.search.observed_families import (
    Colocation,
    FamilyHistories,
    is_plausible_noise,
)
from controlplane.policy.search.observed_jobs import JobHistory
from controlplane.prediction.slowdowns import stretch
from schemas.ids import Seconds, SlotId


@dataclass(frozen=True, slots=True)
class Migration:
    """Migration of a running job, which first grows to the old and the new slots together.

    That is no growth: the size in between was not chosen, and the speed at it predicts nothing.
    """

    all_slots: frozenset[SlotId]  # old and new slots
    new_slots: frozenset[SlotId]


def migration_between(have: Iterable[SlotId], to: Iterable[SlotId]) -> Migration | None:
    """Return the migration between two sets of slots.

    None if the job only grows, shrinks, starts or stops.
    """
    before, after = frozenset(have), frozenset(to)
    if before <= after or after <= before:
        return None
    return Migration(before | after, after)


@dataclass(slots=True)
class OnesJobHistory(JobHistory):
    """History of one job."""

    group: tuple[int, int] = (-1, 0)  # version and global batch of the last telemetry
    group_step: int = 0  # step of the job at which this group started with this batch
    slots: int = 0  # in the last view
    slots_before_return: int = 0  # slots before it last gave some up although no job waited
    returned_at: Seconds = Seconds(-1e9)
    epoch: int = 0  # last finished epoch
    last_noise: float | None = None  # last measurement; None: none
    view: JobView | None = None  # as in the last view
    counted_at: Seconds = Seconds(0.0)  # when an epoch or a report interval last ended
    due_at: float = 0.0  # when `follow` is due although the view of the job is unchanged
    edition: int = 0  # counts changes that matter to plans
    trial: GrowthTrial = field(default_factory=GrowthTrial)
    move: Migration | None = None  # migration started by the last plan that changed the job

    def observe_steps(self, event: StepsSeen) -> bool:
        """Count the steps of a group; return True if the speed belongs to this group alone.

        It does if the event says so, or if an earlier report of the group exists and samples were
        trained since.
        """
        group = (event.group, event.global_batch)
        again, trained = self.group == group, event.samples_done - self.samples
        if not again:
            self.group_step = event.step - event.group_steps
        self.steps, self.group, self.samples = event.step, group, event.samples_done
        return event.group_steps > 0 or (again and trained > 0)

    def grow_limit(self, steps: int) -> None:
        """Set R to twice the reported batch if `steps` steps were trained with it."""
        batch = self.group[1]
        if self.steps - self.group_step >= steps:
            self.limit = self.bounds.clip(max(self.limit, 2 * batch))

    def follow(
        self, job: JobView, options: OnesOptions, now: Seconds, *, contended: bool, warm: bool
    ) -> None:
        """Update bounds, R and returned slots from a view.

        Args:
            contended: a job waits that would fit.
            warm: the job has done its first steps.
        """
        self.view = job
        self.bounds = limit_bounds(job)
        self.limit = max(self.limit, job.batch_size)
        self.follow_batch(job)
        if not job.running_on:
            self.slots = 0
            return
        slots = len(job.running_on)
        moved = self.move is not None and self.move.new_slots == job.running_on.keys()
        if slots < self.slots and not contended and not moved:
            self.slots_before_return, self.returned_at = self.slots, now
        self.slots = slots
        self.due_at = max(self.counted_at, job.moved_at) + options.report_interval_s
        if now > self.due_at and warm:
            self.counted_at = now
            self.due_at = now + options.report_interval_s

    def follow_batch(self, job: JobView) -> None:
        """Clamp R between the present batch and twice that batch.

        However often plans are made, no batch more than doubles before some steps were trained with
        it.
        """
        present = sum(job.running_on.values())
        if present:
            self.limit = self.bounds.clip(max(present, min(self.limit, 2 * present)))


def noise_estimate(
    job: JobView,
    history: OnesJobHistory | None,
    relatives: Callable[[int], float | None] | None,
    options: OnesOptions,
) -> float:
    """Return phi, samples: the job's latest, else its relatives' at this stage, else a prior.

    Workers smooth what they measure. The result is rounded to an eighth of a doubling.

    Args:
        relatives: phi of the family after a number of epochs; None if there is no family.
    """
    own = history.last_noise if history is not None else None
    own = own if is_plausible_noise(own) else job.noise_scale
    if is_plausible_noise(own):
        return _rounded(own)
    shared = relatives(job.epoch) if relatives else None
    return _rounded(shared or options.noise_scale_prior * job.batch_size)


def limit_bounds(job: JobView) -> LimitBounds:
    """Return the bounds of a job's R."""
    return LimitBounds(first=job.batch_size, least=job.batch_size, most=job.batch_limit)


@lru_cache(maxsize=4096)
def _rounded(value: float) -> float:
    """Round to an eighth of a doubling: finer steps change no batch, but invalidate all tables."""
    return float(2.0 ** (round(8.0 * math.log2(max(value, 1e-9))) / 8.0))


class Measurements:
    """Passes to families what their jobs measured, and to jobs their noise scales."""

    def __init__(
        self, families: FamilyHistories, placement: PlacementIndex, options: OnesOptions
    ) -> None:
        self._families = families
        self._placement = placement
        self._options = options

    def epoch(self, event: EpochSeen, history: OnesJobHistory) -> None:
        """Record an epoch; its speed counts if the group was the same and alone on its nodes.

        Neighbours may have changed during the epoch; telemetry covers a moment only.
        """
        self._observe_noise(history, event.family, max(0, event.epoch - 1), event.noise_scale)
        sane = math.isfinite(event.samples_per_s) and event.samples_per_s > 0
        alone = not self._options.interference or self._placement.is_alone(event.job)
        if event.whole and event.slots and sane and alone:
            self._timed(event)

    def steps(self, event: StepsSeen, history: OnesJobHistory, *, counts: bool) -> None:
        """Record telemetry, by the worker's clock: delayed reports arrive all at once.

        Args:
            counts: the speed belongs to this group alone; the first report of a group may cover
                time before all its members were there.
        """
        self._observe_noise(history, event.family, history.epoch, event.noise_scale)
        speed = event.samples_per_s
        if not counts or not math.isfinite(speed) or speed <= 0:
            return
        alone_s = self._alone_s(event, event.global_batch / speed)
        history.trial.add(event.group, event.slots, event.global_batch, alone_s, event.nodes)
        self._timed(event)

    def _timed(self, event: EpochSeen | StepsSeen) -> None:
        """Record the time of a pass; without a report on passes a step counts as one pass."""
        family = self._families.of(event.family)
        times = event.step_times
        if self._options.passes and times is not None:
            family.observe_passes(event.slots, times.local_batch, times.passes)
            self._measured(event, times.local_batch, times.pass_s)
            return
        local = max(1, round(event.global_batch / max(1, event.slots)))
        if family.passes.limits.one_is_enough(event.slots, local):
            self._measured(event, local, event.global_batch / event.samples_per_s)

    def _measured(self, event: EpochSeen | StepsSeen, local: int, step_s: float) -> None:
        options, family = self._options, self._families.of(event.family)
        if (options.gpu_types or options.interference) and self._placement.is_changing(event.job):
            return  # the view shows the future place, not that of the measurement
        gpu_type = self._placement.gpu_type(event.job) if options.gpu_types else ""
        colocation: Colocation | None = None
        if options.interference:
            others = self._placement.colocations(event.job)
            known = family.parts.colocations
            colocation = max(others, key=lambda one: (known.get(one, 0.0), one), default=None)
        step_s /= self._placement.stretch(event.job)
        family.add(
            event.nodes,
            event.slots,
            local,
            step_s,
            gpu_type=gpu_type,
            colocation=colocation,
        )

    def _alone_s(self, event: StepsSeen, step_s: float) -> float:
        """Return the seconds of a step if no other job used the cores of its nodes."""
        cores = self._placement.cores
        alone = stretch(-(-event.slots // max(1, event.nodes)), cores)
        return step_s / self._placement.stretch(event.job) * alone

    def _observe_noise(
        self, history: OnesJobHistory, family: str, epoch: int, noise_scale: float | None
    ) -> None:
        if not is_plausible_noise(noise_scale):
            return
        history.last_noise = noise_scale
        self._families.of(family).observe_noise(epoch, noise_scale)
