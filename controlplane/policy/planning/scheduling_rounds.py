"""Sizes that are decided in rounds, and hold in between."""

from __future__ import annotations

from collections.abc import Container, Mapping

from controlplane.policy.api import JobView
from controlplane.policy.planning.slot_partition import Partition, useful_slots
from schemas.ids import JobId, Seconds


class Rounds:
    """When it is time to decide anew; asked twice at one moment, it is once.

    A job that arrives waits for the next round, unless nobody of the last one is left.
    """

    def __init__(self, interval_s: float) -> None:
        """Begin before the first round.

        Args:
            interval_s: seconds from round to round; 0: decide at every moment that is new, or that
                shows a new job.
        """
        self._interval_s = interval_s  # 0: at every moment that is new, or shows a new job
        self._begun_at = Seconds(0.0)

    def is_due(self, partition: Partition, decided: Mapping[JobId, object]) -> bool:
        """Whether to decide anew.

        Args:
            partition: what there is.
            decided: the jobs of the last round.
        """
        jobs: Container[JobId] = partition.view.jobs
        if not any(name in jobs for name in decided):
            return True
        if self._interval_s:
            return partition.now >= self._begun_at + self._interval_s
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
        at = Seconds(self._begun_at + self._interval_s)
        return at if partition.view.jobs and at > partition.now else None


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
