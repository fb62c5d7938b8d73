"""Finds the jobs of a plan that wait for each other's slots in a circle, and how to break it.

Nobody can begin in a circle: each takes its place beside an owner who leaves, and all of them leave
only when they have a new place. If one steps aside, to a free slot, to fewer slots, or for a pause,
the others can follow one after the other, and it comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.core.model.job import Job, batch_limit, local_limit
from controlplane.core.model.rescale import Aside, Swap, Way
from controlplane.policy.api import Reason
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, SlotId

_CHEAPEST = {way: rank for rank, way in enumerate(Way)}


@dataclass(frozen=True, slots=True)
class Mover:
    """A job that trains, and is to have other slots."""

    job: Job
    target: Mapping[SlotId, int]  # slot -> local batch, samples per step
    reason: Reason

    @property
    def have(self) -> list[SlotId]:
        """Where it trains now, in rank order."""
        return [member.slot for member in self.job.group.members] if self.job.group else []

    @property
    def new(self) -> list[SlotId]:
        """What it does not have yet."""
        have = set(self.have)
        return [slot for slot in self.target if slot not in have]

    @property
    def kept(self) -> list[SlotId]:
        """What it has and keeps."""
        return [slot for slot in self.have if slot in self.target]


def swaps_among(
    movers: Sequence[Mover], spare: Sequence[SlotId], is_free: Callable[[SlotId], bool]
) -> list[Swap]:
    """The swaps that bring as many of `movers` to their targets as can be.

    Args:
        movers: each of which lacks a slot that somebody else has. No slot is in two targets.
        spare: free slots that nobody of the plan takes, to step aside to.
        is_free: whether nobody has a slot, or its owner leaves it for nobody.

    Returns:
        One for each set of jobs that wait for each other. Jobs that wait for somebody who does not
        leave are in none of them.
    """
    left = {mover.job.job: mover for mover in movers}
    needs = _needs(left, is_free)
    spares = list(spare)
    together = _connected(list(left), needs)
    return [_swap([left[name] for name in names], needs, spares) for names in together]


def _needs(left: dict[JobId, Mover], is_free: Callable[[SlotId], bool]) -> dict[JobId, set[JobId]]:
    """Who waits for whom; movers that wait for somebody who does not leave are taken out."""
    while True:
        leaves = {
            slot: name
            for name, mover in left.items()
            for slot in mover.have
            if slot not in mover.target
        }
        stuck = [
            name
            for name, mover in left.items()
            if not all(slot in leaves or is_free(slot) for slot in mover.new)
        ]
        if not stuck:
            return {
                name: {leaves[slot] for slot in mover.new if slot in leaves}
                for name, mover in left.items()
            }
        for name in stuck:
            del left[name]


def _connected(names: Sequence[JobId], needs: Mapping[JobId, set[JobId]]) -> list[list[JobId]]:
    """Those who wait for each other, directly or not, together; in the order of `names`."""
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
    """Who can take its place by now."""

    needs: Mapping[JobId, set[JobId]]
    waiting: list[JobId]
    gone: set[JobId] = field(default_factory=set)  # from where they were

    def go_on(self) -> None:
        """Let all follow that wait for nobody any more."""
        while ready := [name for name in self.waiting if self.needs[name] <= self.gone]:
            self.gone |= set(ready)
            self.waiting = [name for name in self.waiting if name not in self.gone]

    def blocking(self) -> set[JobId]:
        """Those for whom somebody waits who cannot go on."""
        needed = {other for name in self.waiting for other in self.needs[name]}
        return needed - self.gone


def _swap(movers: Sequence[Mover], needs: Mapping[JobId, set[JobId]], spare: list[SlotId]) -> Swap:
    """Let the cheapest step aside until the others can follow; takes from `spare`."""
    by_name = {mover.job.job: mover for mover in movers}
    order = _Order(needs, list(by_name))
    aside: dict[JobId, Aside] = {}
    order.go_on()
    while blocking := order.blocking():
        ways = {name: _aside(by_name[name], spare) for name in order.waiting if name in blocking}
        name = min(ways, key=lambda name: _cost(by_name[name], ways[name]))
        aside[name] = ways[name]
        for slot in ways[name].local_batch:
            if slot in spare:
                spare.remove(slot)
        order.gone.add(name)
        order.waiting.remove(name)
        order.go_on()
    return Swap(
        targets={name: dict(mover.target) for name, mover in by_name.items()},
        aside=aside,
        reasons={name: mover.reason for name, mover in by_name.items()},
    )


def _aside(mover: Mover, spare: Sequence[SlotId]) -> Aside:
    """The cheapest way for a job to leave the slots that it gives up."""
    job, kept = mover.job, mover.kept
    group = job.group
    least = max(1, job.spec.slots[0])
    missing = len(mover.have) - len(kept)
    meanwhile = [*kept, *spare[:missing]]
    both = len({*mover.have, *meanwhile, *mover.target})
    batch = group.global_batch if group else job.spec.batch_size
    if len(meanwhile) > len(kept) and len(meanwhile) >= least and both <= batch_limit(job):
        return Aside(way=Way.STAGING, local_batch=_shares(job, batch, meanwhile))
    if len(kept) >= least:
        return Aside(way=Way.SHRINK, local_batch=_shares(job, batch, kept))
    return Aside(way=Way.PAUSE)


def _shares(job: Job, batch: int, slots: Sequence[SlotId]) -> dict[SlotId, int]:
    """The batch as it is, or as much of it as fits."""
    return split(max(len(slots), min(batch, local_limit(job) * len(slots))), slots)


def _cost(mover: Mover, aside: Aside) -> tuple[int, float]:
    """What nobody pays who need not: a worse way, then more seconds of more slots."""
    slots = len(mover.have)
    return _CHEAPEST[aside.way], slots * (mover.job.accounting.started_s or 1.0)
