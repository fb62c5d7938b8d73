"""Search for cycles of jobs that need each other's slots, and for the cheapest way to break them.

In a cycle no job can move first. Each job waits until the owner of its new slots leaves, and every
owner leaves only after it has its own new slots. A job can break the cycle by yielding its slots.
It then moves to free slots, shrinks or pauses. The other jobs move one after the other, and the
yielding job moves last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.core.model.job import Job, batch_limit, local_limit
from controlplane.core.model.rescale import Swap, SwapYield, YieldMode
from controlplane.policy.api import Reason
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, SlotId

_CHEAPEST = {way: rank for rank, way in enumerate(YieldMode)}


@dataclass(frozen=True, slots=True)
class Mover:
    """Running job, with the slots to which it should move."""

    job: Job
    target: Mapping[SlotId, int]  # slot -> local batch, samples per step
    reason: Reason

    @property
    def have(self) -> list[SlotId]:
        """Current slots, in rank order."""
        return [member.slot for member in self.job.group.members] if self.job.group else []

    @property
    def new(self) -> list[SlotId]:
        """Target slots that the job does not have yet."""
        have = set(self.have)
        return [slot for slot in self.target if slot not in have]

    @property
    def kept(self) -> list[SlotId]:
        """Current slots that the job keeps."""
        return [slot for slot in self.have if slot in self.target]


def swaps_among(
    movers: Sequence[Mover], spare: Sequence[SlotId], is_free: Callable[[SlotId], bool]
) -> list[Swap]:
    """Return the swaps that bring as many of `movers` to their targets as possible.

    Args:
        movers: jobs that each need a slot of another job. No slot is in two targets.
        spare: free slots for yielding jobs, which no entry of the plan takes.
        is_free: returns True if a slot has no owner, or its owner leaves it for no other job.

    Returns:
        One swap for each set of jobs that wait for each other. A job that waits for slots of a job
        that stays is in no swap.
    """
    candidates = {mover.job.job: mover for mover in movers}
    needs = _needs(candidates, is_free)
    spares = list(spare)
    cycles = _connected(list(candidates), needs)
    return [_swap([candidates[name] for name in names], needs, spares) for names in cycles]


def _needs(
    candidates: dict[JobId, Mover], is_free: Callable[[SlotId], bool]
) -> dict[JobId, set[JobId]]:
    """Return the jobs that each mover waits for. Remove movers that wait for a job that stays."""
    while True:
        leaves = {
            slot: name
            for name, mover in candidates.items()
            for slot in mover.have
            if slot not in mover.target
        }
        stuck = [
            name
            for name, mover in candidates.items()
            if not all(slot in leaves or is_free(slot) for slot in mover.new)
        ]
        if not stuck:
            return {
                name: {leaves[slot] for slot in mover.new if slot in leaves}
                for name, mover in candidates.items()
            }
        for name in stuck:
            del candidates[name]


def _connected(names: Sequence[JobId], needs: Mapping[JobId, set[JobId]]) -> list[list[JobId]]:
    """Group the jobs that wait for each other, directly or indirectly, in the order of `names`."""
    beside: dict[JobId, set[JobId]] = {name: set(needs[name]) for name in names}
    for name in names:
        for other in needs[name]:
            beside[other].add(name)
    found: list[list[JobId]] = []
    seen: set[JobId] = set()
    for first in names:
        if first in seen:
            continue
        group, front = {first}, [first]
        while front:
            new = beside[front.pop()] - group
            group |= new
            front += new
        seen |= group
        found.append([name for name in names if name in group])
    return found


@dataclass(slots=True)
class _Order:
    """Simulation of the order in which jobs can move."""

    needs: Mapping[JobId, set[JobId]]
    waiting: list[JobId]
    moved: set[JobId] = field(default_factory=set)  # jobs that have left their slots

    def advance(self) -> None:
        """Move all jobs that wait for no other job."""
        while ready := [name for name in self.waiting if self.needs[name] <= self.moved]:
            self.moved |= set(ready)
            self.waiting = [name for name in self.waiting if name not in self.moved]

    def blocking(self) -> set[JobId]:
        """Return the jobs that have not moved and that other jobs wait for."""
        needed = {other for name in self.waiting for other in self.needs[name]}
        return needed - self.moved


def _swap(movers: Sequence[Mover], needs: Mapping[JobId, set[JobId]], spare: list[SlotId]) -> Swap:
    """Return a swap in which the cheapest jobs yield until all other jobs can move.

    Slots that yielding jobs use meanwhile are removed from `spare`.
    """
    by_name = {mover.job.job: mover for mover in movers}
    order = _Order(needs, list(by_name))
    yields: dict[JobId, SwapYield] = {}
    order.advance()
    while blocking := order.blocking():
        ways = {
            name: _cheapest_yield(by_name[name], spare)
            for name in order.waiting
            if name in blocking
        }
        name = min(ways, key=lambda name: _cost(by_name[name], ways[name]))
        yields[name] = ways[name]
        for slot in ways[name].local_batch:
            if slot in spare:
                spare.remove(slot)
        order.moved.add(name)
        order.waiting.remove(name)
        order.advance()
    return Swap(
        targets={name: dict(mover.target) for name, mover in by_name.items()},
        yields=yields,
        reasons={name: mover.reason for name, mover in by_name.items()},
    )


def _cheapest_yield(mover: Mover, spare: Sequence[SlotId]) -> SwapYield:
    """Return the cheapest way for a job to yield the slots that it gives up."""
    job, kept = mover.job, mover.kept
    group = job.group
    least = max(1, job.spec.slots[0])
    missing = len(mover.have) - len(kept)
    interim = [*kept, *spare[:missing]]
    union = len({*mover.have, *interim, *mover.target})
    batch = group.global_batch if group else job.spec.batch_size
    if len(interim) > len(kept) and len(interim) >= least and union <= batch_limit(job):
        return SwapYield(mode=YieldMode.STAGING, local_batch=_shares(job, batch, interim))
    if len(kept) >= least:
        return SwapYield(mode=YieldMode.SHRINK, local_batch=_shares(job, batch, kept))
    return SwapYield(mode=YieldMode.PAUSE)


def _shares(job: Job, batch: int, slots: Sequence[SlotId]) -> dict[SlotId, int]:
    return split(max(len(slots), min(batch, local_limit(job) * len(slots))), slots)


def _cost(mover: Mover, given: SwapYield) -> tuple[int, float]:
    """Return a sort key of the yield mode's rank, then the start time multiplied by slots."""
    slots = len(mover.have)
    return _CHEAPEST[given.mode], slots * (mover.job.accounting.last_start_s or 1.0)
