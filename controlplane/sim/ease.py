"""How little a job can take: its least slot seconds, and its least time, on any schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.sim.errors import TraceError
from controlplane.sim.oracle import compact
from controlplane.sim.physics.api import Work

if TYPE_CHECKING:
    from controlplane.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Ease:
    """Both are reached by schedules that differ: a bound, not a plan."""

    slot_s: float  # least slots times seconds
    least_s: float  # least seconds


def easiest(work: Work, scenario: Scenario) -> Ease:
    """The best sizes and batches for every epoch, from 1 slot to what the job may have.

    Sizes 1 to 8, then doublings; batches in doublings from the first to the largest. What lies
    between could be a little better; steps of two leave that to a few percent.
    """
    spec, widest = work.spec, max(group.slots for group in scenario.nodes)
    most = min(spec.slots[1], scenario.slots)
    sizes = sorted(set(range(1, min(8, most) + 1)) | {most} | _doublings(8, most))
    batches = sorted(_doublings(spec.batch_size, spec.batch_limit) | {spec.batch_limit})
    slot_s = least_s = 0.0
    begins = 0.0
    for epoch in range(work.epochs):
        ends = work.epoch_ends_at(epoch)
        paces = [
            (size, pace)
            for size in sizes
            for batch in batches
            if size <= batch <= size * spec.local_limit
            for pace in [_pace(work, size, batch, epoch, widest)]
            if pace > 0.0
        ]
        slot_s += (ends - begins) * min((size / pace for size, pace in paces), default=0.0)
        least_s += (ends - begins) / max((pace for _, pace in paces), default=1e9)
        begins = ends
    return Ease(slot_s, max(least_s, 1e-9))


def _doublings(first: int, most: int) -> set[int]:
    found = set()
    while first <= most:
        found.add(first)
        first *= 2
    return found


def _pace(work: Work, size: int, batch: int, epoch: int, widest: int) -> float:
    try:
        return work.pace(compact(size, widest), batch, epoch).progress_per_s
    except TraceError:
        return 0.0  # nothing like it was measured
