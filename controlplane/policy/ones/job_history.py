"""What the search remembers of one job: how its batch may grow, its noise scale, its slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from controlplane.policy.api import JobView, StepsSeen
from controlplane.policy.ones.growth_trials import GrowthTrial
from controlplane.policy.ones.half_moves import HalfMove
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.search.batch_limits import LimitBounds
from controlplane.policy.search.observed_families import SmoothedNoise, believable
from controlplane.policy.search.observed_jobs import JobHistory
from schemas.ids import Seconds


@dataclass(slots=True)
class OnesJobHistory(JobHistory):
    """What is remembered of one job."""

    group: tuple[int, int] = (-1, 0)  # version and global batch of the last telemetry
    group_step: int = 0  # of the job, when that group had trained none with that batch
    slots: int = 0  # that it was seen on last
    gave_back: int = 0  # slots that it had when it gave some up for nobody
    gave_back_at: Seconds = Seconds(-1e9)
    epoch: int = 0  # finished
    noise: SmoothedNoise = field(default_factory=SmoothedNoise)
    last_noise: float | None = None  # as measured last; None: never
    view: JobView | None = None  # as it was looked at last
    due_at: float = 0.0  # when its report interval ends
    edition: int = 0  # of all this, as far as plans follow from it
    trial: GrowthTrial = field(default_factory=GrowthTrial)
    move: HalfMove | None = None  # that the last plan began which changed it

    def observe_noise(self, noise_scale: float) -> None:
        """One more measurement.

        Args:
            noise_scale: phi, samples; one that is `believable`.
        """
        self.noise.add(noise_scale)
        self.last_noise = noise_scale

    def observe_steps(self, event: StepsSeen) -> bool:
        """Count the steps of a group with one batch, and the samples of the job.

        Returns:
            Whether its speed is one of just that group: it says so, or an earlier report of the
            same group was there, and samples were trained since.
        """
        group = (event.group, event.global_batch)
        again, trained = self.group == group, event.samples_done - self.samples
        if not again:
            self.group_step = event.step - event.group_steps
        self.steps, self.group, self.samples = event.step, group, event.samples_done
        return event.group_steps > 0 or (again and trained > 0)

    def grow_limit(self, steps: int) -> None:
        """R is twice the batch that telemetry tells of, if so many steps were trained with it.

        Args:
            steps: that a batch has to be trained before it may double.
        """
        batch = self.group[1]
        if self.steps - self.group_step >= steps:
            self.limit = self.bounds.clip(max(self.limit, 2 * batch))

    def follow(
        self, job: JobView, options: OnesOptions, now: Seconds, *, contended: bool, warm: bool
    ) -> bool:
        """Take note of a new view: bounds, R, and slots that were given back for nobody.

        Args:
            now: seconds on the controller's clock.
            contended: whether a job waits that would fit.
            warm: whether the job has done its first steps.

        Returns:
            Whether an epoch, or a report interval of a long one, is to be counted.
        """
        self.view = job
        self.bounds = limit_bounds(job)
        self.limit = max(self.limit, job.batch_size)
        if options.grows_by_steps:
            self.follow_batch(job)
        if not job.running_on:
            self.slots = 0
            return False
        slots = len(job.running_on)
        moved = self.move is not None and self.move.to == job.running_on.keys()
        if slots < self.slots and not contended and not moved:
            self.gave_back, self.gave_back_at = self.slots, now
        self.slots = slots
        self.due_at = max(self.counted_at, job.moved_at) + options.report_interval_s
        if now > self.due_at and warm:
            self.epoch_due, self.counted_at = True, now
            self.due_at = now + options.report_interval_s
        due, self.epoch_due = self.epoch_due, False
        return due and not options.grows_by_steps

    def follow_batch(self, job: JobView) -> None:
        """R is at most twice the batch of now, and that batch at least.

        So whatever is planned and planned again, no batch is more than doubled before some steps
        were trained with it.
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
    """Phi, samples: its own as measured last, else its relatives' at this stage, else a prior.

    Workers smooth what they measure. With `smooth_noise` it is smoothed once more here, and drawn
    towards what was thought before while few were measured.

    Args:
        relatives: says phi of its family after so many epochs; None: it has none.

    Returns:
        Samples, to an eighth of a doubling.
    """
    if not options.smooth_noise:
        own = history.last_noise if history is not None else None
        own = own if believable(own) else job.noise_scale
        if believable(own):
            return _rounded(own)
    before = (relatives(job.epoch) if relatives else None) or options.noise_scale_prior * (
        job.batch_size
    )
    if not options.smooth_noise:
        return _rounded(before)
    measured = history.noise.count if history else 0
    value = history.noise.value if history and measured else job.noise_scale
    if not believable(value):
        return _rounded(before)
    measured = max(measured, job.noise_epochs)
    trust = measured / (measured + options.noise_trust) if measured else 1.0
    return _rounded(before * (value / before) ** trust)


def limit_bounds(job: JobView) -> LimitBounds:
    """What R of a job stays within."""
    return LimitBounds(first=job.batch_size, least=job.batch_size, most=job.batch_limit)


@lru_cache(maxsize=4096)
def _rounded(value: float) -> float:
    """To an eighth of a doubling: finer steps change no batch, but all would be worked out anew."""
    return float(2.0 ** (round(8.0 * math.log2(max(value, 1e-9))) / 8.0))
