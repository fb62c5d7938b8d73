"""Sorting of a view by what a plan may change, and composition of a plan from placed jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of


def consolidate(free: Sequence[SlotView], size: int) -> list[SlotView]:
    """Return `size` of the free slots, which are in view order, on few nodes, best fit first."""
    by_node: dict[NodeId, list[SlotView]] = defaultdict(list)
    for slot in free:
        by_node[slot.node].append(slot)
    fitting = [slots for slots in by_node.values() if len(slots) >= size]
    if fitting:
        return min(fitting, key=len)[:size]
    largest_first = sorted(by_node.values(), key=len, reverse=True)
    return [slot for slots in largest_first for slot in slots][:size]


def split(batch: int, slots: Sequence[SlotId]) -> dict[SlotId, int]:
    """Return the local batches of `slots`, equal except that the first slots get the remainder."""
    share, rest = divmod(batch, len(slots))
    return {slot: share + (place < rest) for place, slot in enumerate(slots)}


def with_batch(job: JobView, batch: int, slots: Sequence[SlotId]) -> dict[SlotId, int]:
    """Return local batches of `slots`; they stay the same if slots and global batch do."""
    if job.running_on.keys() == set(slots) and batch == sum(job.running_on.values()):
        return dict(job.running_on)
    return split(batch, slots)


@dataclass(slots=True)
class Reservation:
    """Slots of the first job that cannot start, which later ones must not delay."""

    at: float = math.inf  # when enough slots are free; infinity: unknown
    spare: float = 0.0  # slots that are left over then


def reserve(ends: Iterable[tuple[float, float]], lacks: float) -> Reservation:
    """Return the reservation of a job that lacks slots until others end (EASY backfill).

    Args:
        ends: latest end of each job, in order, and how many slots more the job could have then.
        lacks: slots that the job lacks now.
    """
    for at, gained in ends:
        lacks -= gained
        if lacks <= 0:
            return Reservation(at, -lacks)
    return Reservation()


def backs_off(until: Seconds, now: Seconds) -> Reason:
    """Return the reason for a job that failed or was lost and must not be tried before `until`."""
    wait_s = until - now
    return Reason(
        "backing_off", f"waits {wait_s:.0f} s before the next attempt", {"wait_s": wait_s}
    )


def too_large(needs: int, slots: int) -> Reason:
    """Return the reason why a job does not fit: the cluster has too few slots, or none."""
    numbers = {"needs": float(needs), "slots": float(slots)}
    if not slots:
        return Reason("no_slots", "no node has joined, or all are lost", numbers)
    return Reason("too_large", f"needs {needs} slots, the cluster has {slots}", numbers)


Why = Callable[[JobView, int], tuple[str, dict[str, float]]]  # (job, slots) -> words, numbers


@dataclass(slots=True)
class Partition:
    """The jobs and slots of a view, sorted by what a plan may change.

    An object is used for one plan only, because placers remove the slots that they use from `free`.
    """

    view: ClusterView
    now: Seconds
    free: dict[NodeId, list[SlotId]]  # by node, in the view's order; usable slots first
    room: int = 0  # number of slots that are free or held by `running`
    running: list[JobView] = field(default_factory=list)  # running jobs that may be changed
    waiting: list[JobView] = field(default_factory=list)  # waiting jobs that may be started
    pinned: list[JobView] = field(default_factory=list)  # running jobs that must stay unchanged
    leaving: list[JobView] = field(default_factory=list)  # stopping jobs; their slots are free soon
    refused: dict[JobId, Reason] = field(default_factory=dict)  # jobs that cannot be started now
    wake_at: Seconds | None = None  # when one of `refused` or `pinned` can be started or changed

    def release(self, slots: Sequence[SlotId]) -> None:
        """Mark slots as free because their job gives them up."""
        for slot in slots:
            self.free[node_of(slot)].append(slot)


def partition_of(view: ClusterView, now: Seconds) -> Partition:
    """Sort the slots and jobs of `view` into a partition; both keep their order."""
    held: set[SlotId] = set()
    for job in view.jobs.values():
        held.update(job.running_on)
    free, firm = _free(view, held)
    partition = Partition(view, now, free, room=sum(map(len, free.values())))
    for job in view.jobs.values():
        if job.running_on:
            _sort_running(partition, job, firm)
        elif job.movable:
            _sort_waiting(partition, job)
        else:
            partition.leaving.append(job)
    return partition


def gang_size(job: JobView, partition: Partition) -> int:
    """Return the slots of a gang: those it has, or else those it wants, if they are useful."""
    if job.running_on:
        return len(job.running_on)
    return min(job.wanted, max(job.least, useful_slots(job, partition)))


def useful_slots(job: JobView, partition: Partition) -> int:
    """Return the most slots that a job can use; a slot without a sample would be wasted."""
    return min(job.most, len(partition.view.slots), job.batch_size)


def compose_plan(
    partition: Partition,
    placed: Mapping[JobId, dict[SlotId, int]],
    why: Why,
    *,
    restart: tuple[JobId, ...] = (),
    wake_at: Seconds | None = None,
) -> Plan:
    """Return the plan in which each job has its `placed` local batches, with reasons for changes.

    `running` and `waiting` jobs without an entry wait; `why` explains the slots of a job.
    """
    local_batch = {job.job: dict(job.running_on) for job in partition.pinned}
    reasons = dict(partition.refused)
    for job in (*partition.running, *partition.waiting):
        target = placed.get(job.job)
        if target:
            local_batch[job.job] = target
        if target != job.running_on or not target:
            reasons[job.job] = _reason(job, target or {}, why, again=job.job in restart)
    times = [at for at in (partition.wake_at, wake_at) if at is not None]
    return Plan(
        based_on=partition.view.version,
        local_batch=local_batch,
        reasons=reasons,
        restart=restart,
        wake_at=min(times, default=None),
    )


def slots_in_words(many: int) -> str:
    """Return "1 slot" or "N slots"."""
    return f"{many} slot{'s' * (many != 1)}"


def _free(
    view: ClusterView, held: set[SlotId]
) -> tuple[dict[NodeId, list[SlotId]], set[SlotId] | None]:
    """Return the free slots by node, and the held slots that can be handed over; None: all."""
    free: dict[NodeId, list[SlotId]] = {}
    leaving: list[SlotId] = []
    firm: set[SlotId] = set()
    for slot in view.slots:
        name = slot.slot
        node_slots = free.get(slot.node)
        if node_slots is None:
            node_slots = free[slot.node] = []
        if name in held:
            if slot.up:
                firm.add(name)
        elif slot.usable:
            node_slots.append(name)
        elif slot.leaving:
            leaving.append(name)
    for name in leaving:
        free[node_of(name)].append(name)
    return free, None if len(firm) == len(held) else firm


def _sort_running(partition: Partition, job: JobView, firm: set[SlotId] | None) -> None:
    late = job.retry_at > partition.now
    if late:
        partition.wake_at = min(job.retry_at, partition.wake_at or job.retry_at)
    if late or not job.movable or (firm is not None and not job.running_on.keys() <= firm):
        partition.pinned.append(job)
    else:
        partition.running.append(job)
        partition.room += len(job.running_on)


def _sort_waiting(partition: Partition, job: JobView) -> None:
    if job.least > len(partition.view.slots):
        partition.refused[job.job] = too_large(job.least, len(partition.view.slots))
    elif job.ready_at > partition.now:
        partition.refused[job.job] = backs_off(job.ready_at, partition.now)
        partition.wake_at = min(job.ready_at, partition.wake_at or job.ready_at)
    else:
        partition.waiting.append(job)


def _reason(job: JobView, target: Mapping[SlotId, int], why: Why, *, again: bool) -> Reason:
    before, after = len(job.running_on), len(target)
    words, numbers = why(job, after)
    numbers = {"slots_now": float(before), "slots_then": float(after), **numbers}
    if not after:
        if before:
            return Reason("pause", f"paused: {words}", numbers)
        return Reason("waits", f"waits: {words}", numbers)
    if not before:
        verb = "resumes on" if job.epoch or job.samples_done else "starts on"
        code = "resume" if job.epoch or job.samples_done else "start"
        return Reason(code, f"{verb} {slots_in_words(after)}: {words}", numbers)
    if again:
        return Reason("restart", f"stops to resume with {slots_in_words(after)}: {words}", numbers)
    if after != before:
        code, verb = ("grow", "grows") if after > before else ("shrink", "shrinks")
        return Reason(code, f"{verb} to {slots_in_words(after)}: {words}", numbers)
    if target.keys() != job.running_on.keys():
        return Reason("pack", f"moves to other slots: {words}", numbers)
    batch = sum(target.values())
    return Reason("batch", f"batch {batch}: {words}", {**numbers, "batch_then": float(batch)})
