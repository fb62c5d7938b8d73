"""Validation of a plan against the current state.

A plan may be based on an older state. Entries that still fit are kept, as in Nomad's plan applier.
The other entries are refused one by one. New slots on a node where workers of the job died
repeatedly are replaced by free slots on other nodes, if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import msgspec

from controlplane.core.model.job import Job, batch_limit, local_limit
from controlplane.core.model.job_phases import HOLDING, Phase, Running
from controlplane.core.model.rescale import Swap
from controlplane.core.state import State
from controlplane.core.swap_plan import Mover, swaps_among
from controlplane.policy.api import Plan, Reason
from schemas.ids import JobId, NodeId, Seconds, SlotId, is_place, node_of

CRASHES_BEFORE_AVOIDED: Final = 2  # crashes of a job on a node before the node is avoided

Placed = Mapping[JobId, Mapping[SlotId, int]]


def around_bad_nodes(
    placed: Placed, state: State, traded: AbstractSet[SlotId] = frozenset()
) -> dict[JobId, dict[SlotId, int]]:
    """Replace new slots on nodes where the job's workers died repeatedly.

    Args:
        placed: slot -> local batch of each job that changes. Slots that the job has already stay.
        traded: slots that jobs are about to trade.

    Returns:
        `placed` with each such slot replaced, at its rank, by a free slot of the same kind on
        another node. A slot without a replacement stays, because a risky slot is better than none.
    """
    taken = traded | {slot for slots in placed.values() for slot in slots}
    taken |= {slot for swap in state.swaps for slot in swap.slots()}
    found = {}
    spare: list[SlotId] | None = None
    for name, slots in placed.items():
        found[name] = dict(slots)
        if any(map(is_place, slots)) or not all(slots.values()):
            continue  # its slots belong together
        fits = state.fit(state.jobs[name]).slots
        bad = bad_for(state.jobs[name])
        new = [slot for slot in slots if node_of(slot) in bad and not _has(state.jobs[name], slot)]
        if not new:
            continue
        if spare is None:
            spare = [slot for slot in state.slot_index.available().free if slot not in taken]
        instead = dict[SlotId, SlotId]()
        for slot in new:
            other = next(
                (
                    s
                    for s in spare
                    if node_of(s) not in bad
                    and _same_kind(state, s, slot)
                    and (fits is None or s in fits)
                ),
                None,
            )
            if other is not None:
                spare.remove(other)
                instead[slot] = other
        found[name] = {instead.get(slot, slot): batch for slot, batch in slots.items()}
    return found


def bad_for(job: Job) -> set[NodeId]:
    """Return the nodes on which the job's workers died repeatedly."""
    return {
        node
        for node, count in job.attempts.crashes_by_node.items()
        if count >= CRASHES_BEFORE_AVOIDED
    } | job.attempts.blamed.keys()


def _has(job: Job, slot: SlotId) -> bool:
    return job.group is not None and any(member.slot == slot for member in job.group.members)


def _same_kind(state: State, one: SlotId, other: SlotId) -> bool:
    return _kind(state, one) == _kind(state, other)


def _kind(state: State, slot: SlotId) -> tuple[str, str]:
    node = state.slot_index.slots()[slot]
    index = int(slot.rpartition("/")[2])
    return next((one.kind, one.model) for one in node.spec.slots if one.index == index)


@dataclass(frozen=True, slots=True)
class Move:
    """Change of a job to these slots and local batches. An empty mapping pauses the job."""

    job: JobId
    local_batch: Mapping[SlotId, int]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check, with the accepted changes in order and the reasons of refused entries."""

    moves: tuple[Move, ...] = ()  # moves that give up slots are first
    swaps: tuple[Swap, ...] = ()  # swaps of jobs that need each other's slots
    refused: Mapping[JobId, str] = field(default_factory=dict)
    rejected: Mapping[JobId, Reason] = field(default_factory=dict)  # jobs that will never start
    promised: Mapping[JobId, Seconds] = field(default_factory=dict)  # changed expected ends

    @property
    def empty(self) -> bool:
        """True if the plan changes nothing."""
        return not (self.moves or self.swaps or self.rejected or self.promised)


def difference(plan: Plan, state: State, now: Seconds, *, whole: bool = True) -> Plan:
    """Return the part of `plan` that changes something now. An empty entry stops its job.

    Slots on nodes where the job's workers died are replaced here, before the plan becomes an input,
    so that the history has the actual slots. If `whole` is True, running jobs that `plan` omits are
    stopped.
    """
    verdict = check(complete(plan, state) if whole else plan, state, now)
    traded = {slot for swap in verdict.swaps for slot in swap.slots()}
    placed = around_bad_nodes({m.job: m.local_batch for m in verdict.moves}, state, traded)
    for swap in verdict.swaps:
        placed |= swap.targets
    return Plan(
        based_on=plan.based_on,
        local_batch=placed,
        reasons={name: reason for name, reason in plan.reasons.items() if name in placed},
        rejected=verdict.rejected,
        promised=verdict.promised,
    )


def in_parts(changes: Plan, state: State, most: int) -> Iterator[Plan]:
    """Split the result of `difference` into plans, each of which starts at most `most` jobs.

    The first part has all other entries. A start takes free slots, so it may follow later.
    """
    placed = changes.local_batch
    starts = [name for name, slots in placed.items() if slots and state.jobs[name].group is None]
    later = set(starts[most:])
    first = _part(changes, [name for name in placed if name not in later])
    yield msgspec.structs.replace(first, rejected=changes.rejected, promised=changes.promised)
    for begin in range(most, len(starts), most):
        yield _part(changes, starts[begin : begin + most])


def _part(changes: Plan, names: Sequence[JobId]) -> Plan:
    """Return a plan for some of the jobs."""
    placed = {name: changes.local_batch[name] for name in names}
    reasons = {name: changes.reasons[name] for name in names if name in changes.reasons}
    return Plan(based_on=changes.based_on, local_batch=placed, reasons=reasons)


def complete(plan: Plan, state: State) -> Plan:
    """Return `plan` with an empty entry for every running job that it omits, unless it is rigid."""
    absent = {
        name: dict[SlotId, int]()
        for name in [name for name in state.jobs_with_processes if name not in plan.local_batch]
        if state.jobs[name].phase is Phase.RUNNING and not state.jobs[name].spec.rigid
    }
    return msgspec.structs.replace(plan, local_batch={**plan.local_batch, **absent})


def check(plan: Plan, state: State, now: Seconds) -> Verdict:
    """Validate every entry of `plan` against the current state.

    A job is left alone if it has changed since the plan was made, is changing, has a manual
    override, or is not in the plan.

    Args:
        plan: entries (ONES eq. 1) map slots of each job to local batches in samples per step.
        now: seconds since the epoch.
    """
    usable = _FreeSlots(state)
    restarts = {n for n in plan.restart if n in state.jobs and state.jobs[n].phase is Phase.RUNNING}
    gives: list[Move] = []
    takes: list[Move] = []
    rejected, refused = _rejections(plan, state)
    for job, placed in _entries(plan, state):
        problem = _out_of_bounds(job, placed) or _stale(job, plan, now)
        if state.scheduling_paused and _grows(job, placed):
            problem = f"scheduling is {state.scheduling_paused}"
        if problem:
            refused[job.job] = problem
            continue
        stops = job.job in restarts and placed.keys() != _slots(job)
        target = {} if stops else dict(placed)  # a later plan starts the job on free slots
        move = Move(job.job, target, plan.reasons.get(job.job, Reason("planned", "planned")))
        if _grows(job, target):
            takes.append(move)
        else:
            gives.append(move)
            usable.leave(job, target)
    kept, blocked = list(gives), list[Move]()
    for move in takes:
        job = state.jobs[move.job]
        problem = usable.take(job, move.local_batch)
        if problem:
            refused[job.job] = problem
            blocked.append(move)
        else:
            kept.append(move)
    swaps = _swaps(blocked, state, usable) if len(blocked) > 1 else []
    for swap in swaps:
        for name in swap.targets:
            del refused[name]
    promised = {
        name: end
        for name, end in plan.promised.items()
        if name not in rejected and _is_new_promise(state.jobs.get(name), end)
    }
    return Verdict(tuple(kept), tuple(swaps), refused, rejected, promised)


def _swaps(blocked: Iterable[Move], state: State, usable: _FreeSlots) -> list[Swap]:
    """Return swaps for refused moves of jobs that need each other's slots."""
    movers: list[Mover] = []
    claimed: set[SlotId] = set()
    for move in blocked:
        job = state.jobs[move.job]
        picky = state.fit(job).slots is not None  # a spare slot may not fit it
        if job.phase is Phase.RUNNING and not picky and claimed.isdisjoint(move.local_batch):
            movers.append(Mover(job, move.local_batch, move.reason))
            claimed |= move.local_batch.keys()
    if len(movers) < 2:  # noqa: PLR2004
        return []
    spare = [slot for slot in state.slot_index.available().free if slot not in claimed]
    return swaps_among(movers, [slot for slot in spare if usable.is_free(slot)], usable.is_free)


class _FreeSlots:
    """Slots that the remaining entries of a plan can still take."""

    def __init__(self, state: State) -> None:
        index = state.slot_index
        self._nodes = index.slots()
        self._state = state
        self._reservations = index.reservations()
        self._held = index.is_taken
        self._taken: set[SlotId] = set()  # slots taken by entries of this plan
        self._soon = index.releasing()  # slot -> job that leaves it
        self._promised = {slot for swap in state.swaps for slot in swap.slots()}

    def take(self, job: Job, placed: Mapping[SlotId, int]) -> str:
        """Take the new slots of `placed` for `job`. Return why this is impossible, or ""."""
        current = _slots(job)
        new = [slot for slot in placed if slot not in current]
        starts, fits = job.group is None, self._state.fit(job).slots
        closed = self._state.closed_to(job)
        for slot in new:
            if node_of(slot) in closed:
                return f"slot {slot} is reserved for others"
            if is_place(slot) and not job.spec.slots[1]:
                node = self._state.nodes.get(node_of(slot))
            else:
                node = self._nodes.get(slot)
                if placed[slot] and fits is not None and slot not in fits:
                    return f"slot {slot} does not fit what the job requests"
            if node is None or not node.usable:
                return f"slot {slot} is not available any more"
            if slot in self._promised:
                return f"slot {slot} is reserved for a swap"
            left_by = self._soon.get(slot, job.job)
            taken = slot in self._taken or self._held(slot)
            if taken and (starts or left_by == job.job):
                return f"slot {slot} is taken"
        self._taken.update(new)
        for slot in new:
            self._soon.pop(slot, None)
        return ""

    def is_free(self, slot: SlotId) -> bool:
        """True if the slot is free, not taken by this plan, and its node is usable."""
        node = self._nodes.get(slot)
        if node is None or not node.usable or slot in self._promised:
            return False
        return slot not in self._taken and not self._held(slot)

    def leave(self, job: Job, placed: Mapping[SlotId, int]) -> None:
        """Record that `job` shrinks to `placed`. Other jobs may prepare workers on the rest."""
        for member in job.group.members if job.group else ():
            if member.slot not in placed and member.slot not in self._reservations:
                self._soon[member.slot] = job.job


def _entries(plan: Plan, state: State) -> Iterable[tuple[Job, Mapping[SlotId, int]]]:
    """Yield each entry that changes something, with its job, if a plan may change the job now."""
    now, wanted = state.slot_index.allocations(), plan.local_batch
    trading = {name for swap in state.swaps for name in swap.targets}
    for name in [name for name, placed in wanted.items() if now.get(name) != placed]:
        job, placed = state.jobs.get(name), wanted[name]
        if job is None or job.ended or name in plan.rejected:
            continue
        if job.withheld or job.override is not None or name in trading:
            continue
        if job.phase is Phase.RUNNING or (job.phase not in HOLDING and placed):
            yield job, placed


def _rejections(plan: Plan, state: State) -> tuple[dict[JobId, Reason], dict[JobId, str]]:
    """Return accepted rejections with their reasons, and refused rejections with problems."""
    rejected: dict[JobId, Reason] = {}
    refused: dict[JobId, str] = {}
    for name, reason in plan.rejected.items():
        job = state.jobs.get(name)
        if job is None or job.ended or job.withheld or job.override is not None:
            continue
        if job.phase is not Phase.QUEUED:
            refused[name] = "a job that has started cannot be rejected"
        elif job.promised_end is not None:
            refused[name] = "a job with a promised end cannot be rejected"
        else:
            rejected[name] = reason
    return rejected, refused


def _is_new_promise(job: Job | None, end: Seconds) -> bool:
    """True if a promise differs from the latest promise of a job that has not ended."""
    if job is None or job.ended or not math.isfinite(end):
        return False
    return job.promised_end is None or job.promised_end.latest != end


def _grows(job: Job, placed: Mapping[SlotId, int]) -> bool:
    return not placed.keys() <= _slots(job)


def _slots(job: Job) -> set[SlotId]:
    return {member.slot for member in job.group.members} if job.group else set()


def _stale(job: Job, plan: Plan, now: Seconds) -> str:
    if job.changed_version > plan.based_on:
        return "the job changed after the plan was made"
    if isinstance(job.status, Running) and job.status.script.finished:
        return "the training has finished"
    if job.phase is not Phase.RUNNING and job.attempts.next_start_at > now:
        return "the job waits for its next retry"
    if job.phase is Phase.RUNNING and job.attempts.next_change_at > now:
        return "the job waits before its next change"
    return ""


def _out_of_bounds(job: Job, placed: Mapping[SlotId, int]) -> str:
    if not placed:
        return ""
    least, most = job.spec.slots
    batches = [batch for batch in placed.values() if batch or not job.spec.rigid]  # 0: kept empty
    if not least <= len(batches) <= max(1, most):
        return f"{len(batches)} slots are outside the job's range"
    if any(not 1 <= batch <= local_limit(job) for batch in batches):
        return "a local batch is out of range"
    limit = batch_limit(job)
    if sum(placed.values()) > limit:
        return "the global batch exceeds its limit"
    current = _slots(job)
    if job.spec.rigid and current:
        return f"a running {job.spec.kind} job keeps its slots"
    union = current | placed.keys()
    if current - placed.keys() and placed.keys() - current and len(union) > limit:
        return "the batch is too small for the old and the new slots together"
    return ""
