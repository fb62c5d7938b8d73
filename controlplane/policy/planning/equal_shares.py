"""Equal shares of slots, all of them used as far as jobs can use them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from controlplane.policy.api import JobView
from controlplane.policy.planning.slot_partition import Partition, useful_slots
from schemas.ids import JobId


def shares(
    line: Sequence[JobView], partition: Partition, room: int | None = None
) -> dict[JobId, int]:
    """Slots of each job that has some, in the order of the line.

    Args:
        line: jobs in the order in which they are given their least.
        room: slots for these jobs; None: all of the partition's.
    """
    room = partition.room if room is None else room
    left = room
    jobs: list[JobView] = []
    for job in line:
        if job.least <= left:
            jobs.append(job)
            left -= job.least
    if not jobs:
        return {}
    bounds = [(job.least, max(job.least, useful_slots(job, partition))) for job in jobs]
    level = _level(bounds, room)
    sizes = [min(max(level, low), high) for low, high in bounds]
    left = room - sum(sizes)
    could = [place for place, (low, high) in enumerate(bounds) if low <= level < high]
    could.sort(key=lambda place: (len(jobs[place].running_on) <= level, jobs[place].submitted_at))
    for place in could[:left]:
        sizes[place] += 1
    return {job.job: size for job, size in zip(jobs, sizes, strict=True)}


def _level(bounds: Sequence[tuple[int, int]], room: int) -> int:
    """The greatest share that all can be raised to within their bounds and the room."""
    low, high = 0, max(high for _, high in bounds)
    while low < high:
        middle = math.ceil((low + high) / 2)
        if sum(min(max(middle, least), most) for least, most in bounds) <= room:
            low = middle
        else:
            high = middle - 1
    return low
