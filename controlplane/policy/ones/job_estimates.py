"""The estimates of jobs and families, updated by policy events and views."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from controlplane.policy.api import (
    ClusterView,
    EpochSeen,
    JobEnded,
    JobView,
    PlanTaken,
    PolicyEvent,
    StepsSeen,
)
from controlplane.policy.ones.job_history import BatchHold, Migration, OnesJobHistory
from controlplane.policy.ones.job_lengths import JobLengths
from controlplane.policy.ones.slowdowns import LearnedSlowdowns, PlacementIndex
from controlplane.policy.options import OnesOptions
from controlplane.policy.search.observed_families import (
    MAX_RELATIVES,
    FamilyHistories,
    is_plausible_noise,
)
from controlplane.policy.search.observed_jobs import resumed
from controlplane.prediction import FloatArray
from controlplane.prediction.slowdowns import stretch
from schemas.ids import JobId, Seconds, SlotId

SETTLE_S: Final = 3.0  # least time between two changes of a job, however short its epochs
GROWTH_STEPS: Final = 10  # steps that a job trains with a batch before that batch can double
BATCH_HOLD_S: Final = 60.0  # time in which a change of the batch alone is not taken back
OWN_NOISE: Final = -1  # noise count of a job with measurements of its own


class EstimateVersion(NamedTuple):
    """Version of all inputs of a job's estimates."""

    edition: int
    family_edition: int
    largest: int  # most slots that a job of the family ran on
    measured: bool  # True if the family has measurements
    noise_count: int  # number of measurements by relatives, or `OWN_NOISE`
    ends: int  # number of ended jobs, because lengths depend on all of them
    until: float  # controller's clock, seconds; the version expires when e.g. a gate opens


class Estimates:
    """The estimates of jobs and families, updated by policy events and views."""

    def __init__(self, options: OnesOptions) -> None:
        self._options = options
        self.families = FamilyHistories()  # all jobs without a family share the record of ""
        self._slowdowns = LearnedSlowdowns(self.families)
        self._placement = PlacementIndex()
        self._histories: defaultdict[JobId, OnesJobHistory] = defaultdict(OnesJobHistory)
        self.lengths = JobLengths()
        self._services: deque[float] = deque(maxlen=MAX_RELATIVES)  # slot seconds of finished jobs
        self._ends = 0  # number of ended jobs

    # --- events and views

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Learn from `event`: an epoch, telemetry, the end of a job, or a plan put in force."""
        self.lengths.observe(event)
        match event:
            case EpochSeen():
                self._epoch(event)
            case StepsSeen():
                self._steps(event, now)
            case JobEnded():
                self._ends += 1
                family = self.families[event.family]
                if event.succeeded and event.samples_done:
                    family.finished.append(event.samples_done)
                    self._services.append(event.slot_s)
                family.reached = max(family.reached, event.samples_done)
                self._histories.pop(event.job, None)
            case PlanTaken(waiting=waiting, slots=slots):
                for name in self._histories.keys() & waiting:
                    history = self._histories[name]
                    history.limit = resumed(history.limit, history.bounds)
                    history.edition += 1
                for name in self._histories.keys() & slots:
                    history = self._histories[name]
                    if history.view is not None:
                        history.move = Migration.between(history.view.running_on, slots[name])
                        history.edition += 1

    def _epoch(self, event: EpochSeen) -> None:
        """Record an epoch; use its speed if the group did not change."""
        history = self._histories[event.job]
        history.edition += 1
        if event.whole:
            history.limit = max(history.limit, event.global_batch)
        history.epoch = max(history.epoch, event.epoch)
        self._observe_noise(history, event.family, max(0, event.epoch - 1), event.noise_scale)
        sane = math.isfinite(event.samples_per_s) and event.samples_per_s > 0
        if event.whole and event.slots and sane:
            self._timed(event)

    def _steps(self, event: StepsSeen, now: Seconds) -> None:
        """Record telemetry; use its speed if all of it was measured in this group.

        The first report of a group may cover time before all members had joined.
        """
        history = self._histories[event.job]
        history.edition += 1
        family, speed = self.families[event.family], event.samples_per_s
        family.reached = max(family.reached, event.samples_done)
        counts = history.observe_steps(event)
        history.grow_limit(GROWTH_STEPS)
        self._observe_noise(history, event.family, history.epoch, event.noise_scale)
        if counts and math.isfinite(speed) and speed > 0:
            alone = stretch(-(-event.slots // max(1, event.nodes)), self._placement.cores)
            step_s = event.global_batch / speed / self._placement.stretch(event.job) * alone
            history.trial.add(event.group, event.slots, event.global_batch, step_s)
            self._timed(event)

    def _timed(self, event: EpochSeen | StepsSeen) -> None:
        """Record the time of a pass. Without a report on passes, a step is taken to be one pass."""
        family = self.families[event.family]
        local = max(1, round(event.global_batch / max(1, event.slots)))
        times = event.step_times
        if times is not None:
            family.observe_passes(event.slots, times.local_batch, times.passes)
            local, step_s = times.local_batch, times.pass_s
        elif family.passes.limits.one_is_enough(event.slots, local):
            step_s = event.global_batch / event.samples_per_s
        else:
            return
        if self._placement.is_changing(event.job):
            return  # the view shows the job's future slots, not the measured ones
        family.add(
            event.nodes,
            event.slots,
            local,
            step_s / self._placement.stretch(event.job),
            gpu_type=self._placement.gpu_type(event.job),
        )

    def _observe_noise(
        self, history: OnesJobHistory, family: str, epoch: int, noise_scale: float | None
    ) -> None:
        if is_plausible_noise(noise_scale):
            history.last_noise = noise_scale
            self.families[family].observe_noise(epoch, noise_scale)

    def update(self, view: ClusterView, *, contended: bool, now: Seconds) -> None:
        """Update placements and limits from a view; `contended` is True if a waiting job fits."""
        self._placement.update(view)
        self.lengths.forget(view.jobs)
        self.families.priors.types = self._placement.types
        for job in view.jobs.values():
            history = self._histories[job.job]
            if history.view is not job:
                before = (history.limit, history.returned_at)
                history.follow(job, now, contended=contended)
                history.edition += before != (history.limit, history.returned_at)

    # --- estimates

    def version(self, job: JobView, now: Seconds) -> EstimateVersion | None:
        """Return the version of a job's estimates, or None if no version covers all inputs."""
        history, options = self._histories[job.job], self._options
        if not self.lengths.is_settled(job):
            return None
        family = self.families[job.family]
        own = history.last_noise is not None
        times = (
            self.gate(job),
            history.returned_at + options.report_interval_s,
            history.batch_at + BATCH_HOLD_S,
        )
        until = min((at for at in times if now <= at), default=math.inf)
        return EstimateVersion(
            history.edition,
            family.edition,
            family.largest,
            bool(family.means),
            OWN_NOISE if own else family.noise_count,
            self._ends,
            until,
        )

    def is_current(self, job: JobView, version: EstimateVersion, now: Seconds) -> bool:
        """True if the job's estimates still have this version; ten times faster than `version`."""
        history, family = self._histories[job.job], self.families[job.family]
        return (
            history.edition == version.edition
            and now < version.until
            and family.edition == version.family_edition
            and family.model is not None
            and family.largest == version.largest
            and version.noise_count in {OWN_NOISE, family.noise_count}
            and bool(family.means) == version.measured
            and self._ends == version.ends
        )

    def limit(self, job: JobView) -> int:
        """Return the batch limit R of a job, in samples per step."""
        return max(job.batch_size, min(self._histories[job.job].limit, job.batch_limit))

    def warm(self, job: JobView) -> bool:
        """True if a job finished an epoch, or did the warm-up steps and its speed is known."""
        warm = self._histories[job.job].steps >= self._options.warmup_steps
        return job.epoch > 0 or (warm and bool(self.families[job.family].means))

    def batch_hold(self, job: JobView, now: Seconds) -> BatchHold:
        """Return whether the batch of a job may change on its present slots.

        Estimates of the best batch swing with each report, so a change is not taken back for a
        while, unless R fell below it.
        """
        history = self._histories[job.job]
        if now >= history.batch_at + BATCH_HOLD_S or history.batch > self.limit(job):
            return BatchHold.NO
        return BatchHold.GROW_ONLY if history.batch_grew else BatchHold.SHRINK_ONLY

    def growth_loss(self, job: JobView) -> tuple[float, int] | None:
        """Return (progress now / progress before, slots before) if the last growth lost."""
        if self.moves_to(job) is not None:
            return None
        return self._histories[job.job].trial.job_loss(job, self.noise_scale(job))

    def moves_to(self, job: JobView) -> frozenset[SlotId] | None:
        """Return the slots that a half-migrated job will keep, or None for other jobs."""
        move = self._histories[job.job].move
        half_way = move is not None and move.all_slots == job.running_on.keys()
        return move.new_slots if move is not None and half_way else None

    def gate(self, job: JobView) -> Seconds:
        """Return when a job may be moved again if it finishes no epoch earlier.

        In the paper the schedule changes when *all* running jobs have finished an epoch. Here each
        job waits for itself alone, because one slow epoch would hold up all other jobs.
        """
        options = self._options
        wait_s = SETTLE_S if job.epoch_at > job.placed_at else options.report_interval_s
        return Seconds(job.placed_at + wait_s)

    def max_slots_after_return(self, job: JobView, now: Seconds) -> int | None:
        """Return the slot limit of a job that recently returned slots; None: no limit."""
        history = self._histories[job.job]
        if now - history.returned_at > self._options.report_interval_s:
            return None
        return history.slots_before_return - 1

    def noise_scale(self, job: JobView) -> float:
        """Return the noise scale phi, in samples: the job's, its relatives', or a prior.

        The result is rounded to an eighth of a doubling.
        """
        own = self._histories[job.job].last_noise
        own = own if is_plausible_noise(own) else job.noise_scale
        if is_plausible_noise(own):
            return _rounded(own)
        shared = self.families[job.family].noise_at(job.epoch) if job.family else None
        return _rounded(shared or self._options.noise_scale_prior * job.batch_size)

    def remaining_service(self, job: JobView, now: Seconds) -> float | None:
        """Return the mean slot seconds that finished jobs still needed at this job's age.

        Return None if there is a better estimate, or if no finished job needed more slot seconds
        than this job has used.
        """
        alone = not self._options.share_family
        if alone or self.families[job.family].finished or job.stop_samples is not None:
            return None
        if self.lengths.informed(job.job):
            return None
        served = job.served(now)
        longer = [service for service in self._services if service > served]
        return sum(longer) / len(longer) - served if longer else None

    def type_slowdowns(self, types: Sequence[str], families: Sequence[str]) -> FloatArray | None:
        """Return factors by GPU type, (J, types), all at least 1, or None if no type is slower."""
        return self._slowdowns.by_type(types, families)


@lru_cache(maxsize=4096)
def _rounded(value: float) -> float:
    """Round to an eighth of a doubling; finer steps change no batch but invalidate all tables."""
    return float(2.0 ** (round(8.0 * math.log2(max(value, 1e-9))) / 8.0))
