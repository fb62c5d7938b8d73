"""Scheduling rounds: sizes are decided in a round and hold until the next one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from statistics import fmean
from typing import Final, Literal

from controlplane.policy.api import JobView
from controlplane.policy.placement.slot_partition import Partition, useful_slots
from schemas.ids import JobId, Seconds

Starts = Literal["at-once", "rounds"]  # of jobs that arrive between rounds
GROUP_CHANGE_S: Final = 1.0  # lower bound for young jobs: duration of a group change


class Rounds:
    """Decides when a round starts; a repeated request at the same moment belongs to the same round.

    Sizes hold until the next round, unless no job of the last one is left. A fixed interval suits
    jobs of one length: where jobs last seconds, a minute is too long. Therefore a round may also be
    limited to a share of the jobs' mean age.

    Args:
        interval_s: longest round, seconds; 0: decide at every new moment, and for every new job.
        age_share: longest round as a share of the mean age that the jobs had when it started; jobs
            that arrived since count with age 0. 0: `interval_s` always.
        starts: shortest round, in multiples of the mean duration of the jobs' last starts.
    """

    def __init__(self, interval_s: float, age_share: float = 0.0, starts: float = 0.0) -> None:
        self._interval_s = interval_s
        self._age_share = age_share
        self._starts = starts
        self._begun_at = Seconds(0.0)

    def is_due(self, partition: Partition, decided: Mapping[JobId, object]) -> bool:
        """True if sizes have to be decided again."""
        jobs: Container[JobId] = partition.view.jobs
        if not any(name in jobs for name in decided):
            return True
        if self._interval_s:
            return partition.now >= self._ends_at(partition)
        new = any(job.job not in decided for job in partition.waiting)
        return new or partition.now != self._begun_at

    def begin(self, now: Seconds) -> None:
        """Record that sizes were decided now."""
        self._begun_at = now

    def next_at(self, partition: Partition) -> Seconds | None:
        """Return when the next round is due; None without jobs."""
        at = self._ends_at(partition)
        return at if partition.view.jobs and at > partition.now else None

    def _ends_at(self, partition: Partition) -> Seconds:
        jobs = partition.view.jobs.values()
        length_s = self._interval_s
        if self._age_share and jobs:
            ages = [max(0.0, self._begun_at - job.submitted_at) for job in jobs]
            started = [job.start_s for job in jobs if job.start_s is not None]
            least_s = max(GROUP_CHANGE_S, self._starts * fmean(started or [0.0]))
            length_s = min(length_s, max(least_s, self._age_share * fmean(ages)))
        return Seconds(self._begun_at + length_s)


def fill_idle_slots(
    partition: Partition,
    targets: Mapping[JobId, int],
    fewest: Callable[[JobView], int] = lambda job: job.least,
) -> dict[JobId, int]:
    """Return sizes for jobs that wait between rounds and fit on idle, unassigned slots.

    In order of arrival, each on the `fewest` slots on which it can train (0: none); the next round
    gives it more.
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
    """Return the jobs that a round decides about, in the order of the view.

    Jobs whose slots are being freed are included: they restart on what the round gives them.
    """
    names = {job.job for job in (*partition.running, *partition.waiting, *partition.leaving)}
    return [job for name, job in partition.view.jobs.items() if name in names]


def fit_targets(
    partition: Partition, targets: Mapping[JobId, int], *, fixed_batches: bool = False
) -> dict[JobId, int]:
    """Return the sizes of the jobs that run now: the targets as far as there is room.

    In the view's order. A job shrinks at once; it grows or starts when its whole target fits. A
    running job without a target keeps its size. With `fixed_batches` the user's batch bounds a size
    that changes.
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
    """Return a target that gives each slot a sample; a kept size stays, even without that."""
    if target in {0, len(job.running_on)}:
        return target
    return min(target, max(job.least, useful_slots(job, partition)))
