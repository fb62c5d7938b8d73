"""From schedules to sizes: what is promised for now, then whatever would be idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.policy.api import JobView
from controlplane.policy.planning.slot_partition import Partition, useful_slots
from schemas.ids import JobId


@dataclass(slots=True)
class Line:
    """Jobs that may be changed or started, by what they are owed."""

    measured: list[JobView] = field(default_factory=list)  # run first, for a while, on their least
    promised: list[JobView] = field(default_factory=list)  # by what they were promised
    others: list[JobView] = field(default_factory=list)  # get what nobody was promised


def sizes_now(
    partition: Partition,
    line: Line,
    due: Mapping[JobId, int],
    later: Mapping[JobId, int],
    gains: Callable[[JobView, int], bool],
) -> dict[JobId, int]:
    """Slots of each job that has some, all in all at most the room.

    Those that are measured have their least, those that were promised something what their
    schedules say of this interval. What is left is used rather than kept idle: running jobs keep
    what they have, promised ones begin early, others have their least, and then all of them grow.

    Args:
        line: its running and waiting jobs, in their order.
        due: slots of each promised job in this interval.
        later: the same of the next one in which it has some.
        gains: whether a job is worth growing to so many slots.
    """
    sizes: dict[JobId, int] = {}
    left = partition.room

    def give(job: JobView, slots: int) -> None:
        nonlocal left
        have = sizes.get(job.job, 0)
        most = max(job.least, useful_slots(job, partition))
        wanted = min(max(slots, have), most, have + left)
        if wanted >= job.least and wanted > have:
            sizes[job.job] = wanted
            left -= wanted - have

    for job in line.measured:
        give(job, job.least)
    for job in line.promised:
        give(job, due.get(job.job, 0))
    for job in line.promised:
        give(job, len(job.running_on))
    for job in line.promised:
        if not sizes.get(job.job):
            give(job, max(job.least, later.get(job.job, 0)))
            give(job, job.least)
    for job in sorted(line.others, key=lambda job: not job.running_on):
        give(job, job.least)
    for job in line.others:
        give(job, len(job.running_on))
    for jobs in (line.promised, line.others):
        _grow(jobs, sizes, give, gains, lambda: left)
    return sizes


def _grow(
    jobs: Sequence[JobView],
    sizes: Mapping[JobId, int],
    give: Callable[[JobView, int], None],
    gains: Callable[[JobView, int], bool],
    left: Callable[[], int],
) -> None:
    """One slot more for each that runs, as long as there is room and it gains by that."""
    growing = [job for job in jobs if sizes.get(job.job)]
    while growing and left():
        still: list[JobView] = []
        for job in growing:
            have = sizes[job.job]
            if left() and gains(job, have + 1):
                give(job, have + 1)
                if sizes[job.job] > have:
                    still.append(job)
        growing = still
