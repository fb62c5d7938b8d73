"""Who starts: gangs in order of arrival, and later ones where that delays nobody."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.policy.api import JobView
from controlplane.policy.planning.slot_partition import Partition, gang_size
from schemas.ids import JobId


@dataclass(slots=True)
class Line:
    """Who has slots, and what the first that has none waits for."""

    sizes: dict[JobId, int] = field(default_factory=dict)
    left: int = 0  # slots that nobody gets
    ahead: dict[JobId, int] = field(default_factory=dict)  # of who waits: jobs before it that wait
    before: dict[JobId, JobId] = field(default_factory=dict)  # who starts, and whom it passes by


def line_of(
    partition: Partition, remaining_s: Callable[[JobView, int], float], *, backfill: bool
) -> Line:
    """Everybody who runs goes on; who waits starts in order of arrival, as far as there is room.

    Backfill is EASY's (Lifka 1995): the first that does not fit has its slots promised for the
    moment at which running jobs will have left so many; another one may pass it if it is done by
    then, or takes slots that are not needed then.

    Args:
        remaining_s: how long a job still trains on so many slots, seconds; infinite: nobody knows.
        backfill: whether anybody may start before who came earlier.
    """
    line = Line({job.job: len(job.running_on) for job in partition.running}, partition.room)
    line.left -= sum(line.sizes.values())
    first: JobView | None = None  # that does not fit
    until, spare = 0.0, 0
    for job in sorted(partition.waiting, key=lambda job: job.submitted_at):
        size = gang_size(job, partition)
        if first is None and size > line.left:
            first = job
            until, spare = _promise(partition, size, line, remaining_s)
        fits = size <= line.left and (first is None or backfill)
        is_short = fits and (first is None or remaining_s(job, size) <= until)
        if fits and (is_short or size <= spare) and job is not first:
            line.sizes[job.job] = size
            line.left -= size
            if first is not None:
                line.before[job.job] = first.job
                spare -= 0 if is_short else size
        else:
            line.ahead[job.job] = len(line.ahead)
    return line


def _promise(
    partition: Partition, size: int, line: Line, remaining_s: Callable[[JobView, int], float]
) -> tuple[float, int]:
    """In how many seconds so many slots are free, and how many more are free then."""
    jobs = [*partition.running, *partition.pinned]
    started = [job for job in partition.waiting if job.job in line.sizes]
    ends = [(remaining_s(job, len(job.running_on)), len(job.running_on)) for job in jobs]
    ends += [(remaining_s(job, line.sizes[job.job]), line.sizes[job.job]) for job in started]
    free = line.left
    for end_s, slots in sorted(ends):
        free += slots
        if free >= size:
            return (end_s, free - size) if math.isfinite(end_s) else (0.0, 0)
    return 0.0, 0
