"""Sizes that are decided in rounds, and hold in between."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from statistics import fmean
from typing import Final, Literal

from controlplane.policy.api import JobView
from controlplane.policy.placement.slot_partition import Partition, useful_slots
from schemas.ids import JobId, Seconds

Starts = Literal["at-once", "rounds"]  # of jobs that come between rounds
SHORTEST_ROUND_S: Final = 1.0  # where jobs are young: what a change of a group takes


class Rounds:
    """When it is time to decide anew; asked twice at one moment, it is once.

    Sizes hold until the next round, unless nobody of the last one is left. Rounds of a fixed
    length are made for jobs of one length: where jobs last some seconds, a minute is for ever. So
    rounds may also be no longer than a share of the jobs' mean age.
    """

    def __init__(self, interval_s: float, age_share: float = 0.0, starts: float = 0.0) -> None:
        """Begin before the first round.

        Args:
            interval_s: seconds from round to round, at most; 0: decide at every moment that is
                new, or that shows a new job.
            age_share: of the mean age that jobs had when it began, that a round lasts at most;
                those that came since count as of no age. 0: `interval_s` always.
            starts: times what the jobs' last starts took on average, that it lasts all the same.
        """
        self._interval_s = interval_s
        self._age_share = age_share
        self._starts = starts
        self._begun_at = Seconds(0.0)

    def is_due(self, partition: Partition, decided: Mapping[JobId, object]) -> bool:
        """Whether to decide anew."""
        jobs: Container[JobId] = partition.view.jobs
        if not any(name in jobs for name in decided):
            return True
        if self._interval_s:
            return partition.now >= self._ends_at(partition)
        new = any(job.job not in decided for job in partition.waiting)
        return new or partition.now != self._begun_at

    def begin(self, now: Seconds) -> None:
        """It was decided now.

        Args:
            now: seconds on the controller's clock.
        """
        self._begun_at = now

    def next_at(self, partition: Partition) -> Seconds | None:
        """When the next round is due, if there is anybody to decide about.

        Args:
            partition: what of the view can be given out.
        """
        at = self._ends_at(partition)
        return at if partition.view.jobs and at > partition.now else None

    def _ends_at(self, partition: Partition) -> Seconds:
        """When the present round ends."""
        jobs = partition.view.jobs.values()
        length_s = self._interval_s
        if self._age_share and jobs:
            ages = [max(0.0, self._begun_at - job.submitted_at) for job in jobs]
            started = [job.start_s for job in jobs if job.start_s is not None]
            least_s = max(SHORTEST_ROUND_S, self._starts * fmean(started or [0.0]))
            length_s = min(length_s, max(least_s, self._age_share * fmean(ages)))
        return Seconds(self._begun_at + length_s)


def fill_idle_slots(
    partition: Partition,
    targets: Mapping[JobId, int],
    fewest: Callable[[JobView], int] = lambda job: job.least,
) -> dict[JobId, int]:
    """Sizes of jobs that wait between rounds and fit on slots that nobody has or is to have.

    In order of arrival, each on as few as it can train on: the next round gives it more.

    Args:
        partition: what of the view can be given out.
        targets: slots of each job in the last round.
        fewest: slots on which a job can train.
    """
    left = partition.room
    for job in (*partition.running, *partition.waiting, *partition.leaving):
        left -= max(targets.get(job.job, 0), len(job.running_on))
    found: dict[JobId, int] = {}
    for job in sorted(partition.waiting, key=lambda job: (job.submitted_at, job.job)):
        size = fewest(job)
        if not targets.get(job.job) and 0 < size <= left:
            found[job.job] = size
            left -= size
    return found


def reschedulable(partition: Partition) -> list[JobView]:
    """Those whom a round decides about, in the order of the view.

    One whose slots are just being freed will be started again, on what the round gives it.

    Args:
        partition: what of the view can be given out.
    """
    names = {job.job for job in (*partition.running, *partition.waiting, *partition.leaving)}
    return [job for name, job in partition.view.jobs.items() if name in names]


def fit_targets(
    partition: Partition, targets: Mapping[JobId, int], *, fixed_batches: bool = False
) -> dict[JobId, int]:
    """The targets of jobs that may change now, as far as there is room; in the view's order.

    Who shrinks does so at once; who grows or starts does it when all of it fits. A running job
    without a target keeps its size.

    Args:
        partition: what of the view can be given out.
        targets: slots of each job in the last round.
        fixed_batches: jobs keep their user's batch, so that a size which changes is no larger.

    Returns:
        Slots of each job that runs.
    """
    if fixed_batches:
        jobs = partition.view.jobs
        targets = {
            name: _within_batch(jobs[name], target, partition)
            for name, target in targets.items()
            if name in jobs
        }
    sizes: dict[JobId, int] = {}
    left = partition.room - sum(targets.get(job.job, 0) for job in partition.leaving)
    for job in partition.running:
        have = len(job.running_on)
        sizes[job.job] = min(have, targets.get(job.job, have))
        left -= sizes[job.job]
    for job in (*partition.running, *partition.waiting):
        target = targets.get(job.job, 0)
        further = target - sizes.get(job.job, 0)
        if 0 < further <= left:
            sizes[job.job] = target
            left -= further
    return {name: sizes[name] for name in partition.view.jobs if sizes.get(name)}


def _within_batch(job: JobView, target: int, partition: Partition) -> int:
    """A size that changes gives each slot a sample; that of a group that it lost may not."""
    if target in {0, len(job.running_on)}:
        return target
    return min(target, max(job.least, useful_slots(job, partition)))
