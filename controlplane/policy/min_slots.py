"""Adapter that keeps every job at its minimum slots, and the plan used when no policy replies.

A group that loses a member continues without that member. If slots are free, the policy sees the
job as growing back onto them and immovable. If no slots are free, the policy sees the job as
waiting, with slots that become free soon: either the policy gives the job its minimum, or the job
stops and waits in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from controlplane.policy.api import (
    Budget,
    ClusterView,
    JobView,
    Plan,
    Policy,
    PolicyEvent,
    Reason,
    SearchStats,
    SlotView,
)
from controlplane.policy.placement.slot_partition import (
    backs_off,
    consolidate,
    slots_in_words,
    split,
    too_large,
)
from schemas.ids import JobId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class ExpandedView:
    """View for a policy, and the jobs that the view shows in another state than their real one."""

    view: ClusterView
    short: Mapping[JobId, JobView] = field(default_factory=dict)  # jobs in their real state
    wake_at: Seconds | None = None  # when another job that lost members can be changed again


def expand_view(view: ClusterView, now: Seconds, *, gangs: bool = False) -> ExpandedView:
    """Return the view in which jobs that lost members are growing back, or waiting.

    A job stays as it is if it is changing, if it waits after a failed change, or if one of its
    nodes is not up. With `gangs`, jobs get their wanted slots again if enough slots are free.
    """
    due = {name: _due(job, view, gangs=gangs) for name, job in view.jobs.items() if job.running_on}
    short = [view.jobs[name] for name in due if len(view.jobs[name].running_on) < due[name]]
    if not short:
        return ExpandedView(view, {})
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    slots = {slot.slot: slot for slot in view.slots}
    free = [slot for slot in view.slots if slot.usable and slot.slot not in held]
    expanded: dict[JobId, JobView] = {}
    waits = [job.retry_at for job in short if job.movable and job.retry_at > now]
    for job in sorted(short, key=lambda job: job.submitted_at):  # stable: the view is in order
        up = all(slot in slots and slots[slot].up for slot in job.running_on)
        if not job.movable or job.retry_at > now or not up:
            continue
        size = _restored_size(job, due[job.job], len(free))
        if size:
            new = _nearby_slots(job, free, size - len(job.running_on))
            free = [slot for slot in free if slot.slot not in new]
            expanded[job.job] = _grown(job, new)
        elif len(job.running_on) < job.least:
            expanded[job.job] = msgspec.structs.replace(
                job, running_on={}, ready_at=Seconds(0.0), retry_at=Seconds(0.0)
            )
    now_held = {slot for job in expanded.values() for slot in job.running_on}
    given_up = {slot for name in expanded for slot in view.jobs[name].running_on} - now_held
    changed = msgspec.structs.replace(
        view,
        slots=tuple(_adapted_slot(slot, now_held, given_up) for slot in view.slots),
        jobs={name: expanded.get(name, job) for name, job in view.jobs.items()},
    )
    return ExpandedView(
        changed, {name: view.jobs[name] for name in expanded}, min(waits, default=None)
    )


def merge_plan(expanded: ExpandedView, plan: Plan) -> Plan:
    """Return the plan with accurate reasons for the jobs that lost members."""
    if not expanded.short and expanded.wake_at is None:
        return plan
    reasons = dict(plan.reasons)
    for name, job in expanded.short.items():
        reasons[name] = _reason(job, plan.local_batch.get(name, {}), plan.reasons.get(name))
    times = [at for at in (plan.wake_at, expanded.wake_at) if at is not None]
    return msgspec.structs.replace(plan, reasons=reasons, wake_at=min(times, default=None))


def _due(job: JobView, view: ClusterView, *, gangs: bool) -> int:
    useful = min(job.wanted, len(view.slots), job.batch_size)
    return max(job.least, useful) if gangs else job.least


def _restored_size(job: JobView, due: int, free: int) -> int:
    """Return `due` if it exceeds the job's size and fits, else `job.least` if that does, else 0."""
    have = len(job.running_on)
    return next((size for size in (due, job.least) if have < size <= have + free), 0)


def _nearby_slots(job: JobView, free: list[SlotView], many: int) -> list[SlotId]:
    """Return `many` free slots: first on the job's nodes, then on as few others as possible."""
    nodes = {node_of(slot) for slot in job.running_on}
    near = [slot for slot in free if slot.node in nodes][:many]
    far = [slot for slot in free if slot.node not in nodes]
    return [slot.slot for slot in (*near, *consolidate(far, many - len(near)))]


def _grown(job: JobView, new: list[SlotId]) -> JobView:
    slots = [*job.running_on, *new]
    roomy = min(job.batch_size, job.local_limit * len(slots))
    batch = max(sum(job.running_on.values()), roomy, len(slots))
    return msgspec.structs.replace(job, running_on=split(batch, slots), movable=False)


def _adapted_slot(slot: SlotView, held: set[SlotId], given_up: set[SlotId]) -> SlotView:
    if slot.slot in held and slot.usable:
        return msgspec.structs.replace(slot, usable=False)
    if slot.slot in given_up:
        return msgspec.structs.replace(slot, leaving=True)
    return slot


def _reason(job: JobView, placed: Mapping[SlotId, int], why: Reason | None) -> Reason:
    have, then = len(job.running_on), len(placed)
    numbers = {"slots_now": float(have), "slots_then": float(then), "least": float(job.least)}
    lacks = have < job.least or not then
    lost = f"it lost members, {have} {f'of at least {job.least} slots ' if lacks else ''}left"
    if then:
        return Reason("restore", f"grows back to {then} slots: {lost}", numbers)
    waits = f"; {why.text}" if why is not None else ""
    return Reason("pause", f"paused: {lost}, and no others are free{waits}", numbers)


class MinSlotsPolicy(Policy):
    """Wrapper that lets `policy` decide about a cluster without jobs below their minimum slots.

    The policy sees the affected jobs as growing back or waiting (`expand_view`). With `gangs`, they
    get their wanted slots again if enough slots are free.
    """

    def __init__(self, policy: Policy, *, gangs: bool = False) -> None:
        self.policy = policy
        self._gangs = gangs

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the wrapped policy."""
        self.policy.observe(event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Let the wrapped policy search with the expanded view."""
        expanded = expand_view(view, now, gangs=self._gangs)
        return self.policy.improve(expanded.view, budget, rng, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the wrapped policy's plan, in which jobs that lost members grow back or stop."""
        expanded = expand_view(view, now, gangs=self._gangs)
        return merge_plan(expanded, self.policy.plan(expanded.view, now))

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Return the wrapped policy's batches for the expanded view."""
        expanded = expand_view(view, now, gangs=self._gangs)
        return self.policy.batches(expanded.view, now)

    def stats(self) -> SearchStats:
        """Return the statistics of the wrapped policy."""
        return self.policy.stats()


def fallback_plan(view: ClusterView, now: Seconds, *, admits: bool = False) -> Plan:
    """Keep every running job; start waiting jobs on their minimum slots, oldest first.

    Jobs that lost members grow back to their minimum, or stop. With `admits` the policy decides
    which jobs start at all. A job that states its utility and never started then waits, because a
    started job can no longer be rejected.
    """
    expanded = expand_view(view, now)
    return merge_plan(expanded, _fill_free_slots(expanded.view, now, admits=admits))


def _fill_free_slots(view: ClusterView, now: Seconds, *, admits: bool) -> Plan:
    placed = {job.job: dict(job.running_on) for job in view.jobs.values() if job.running_on}
    taken = {slot for slots in placed.values() for slot in slots}
    free = [slot for slot in view.slots if slot.usable and slot.slot not in taken]
    reasons: dict[JobId, Reason] = {}
    wake_at: Seconds | None = None
    waiting = [job for job in view.jobs.values() if job.movable and not job.running_on]
    for job in sorted(waiting, key=lambda job: job.submitted_at):
        if job.least > len(view.slots):
            reasons[job.job] = too_large(job.least, len(view.slots))
            continue
        if job.ready_at > now:
            reasons[job.job] = backs_off(job.ready_at, now)
            wake_at = min(job.ready_at, wake_at or job.ready_at)
            continue
        if admits and job.undecided:
            text = "waits to be admitted; the policy does not answer yet"
            reasons[job.job] = Reason("waits", text)
            continue
        if job.least > len(free):
            needs = slots_in_words(job.least)
            text = f"waits for {needs}, {len(free)} free; the policy does not answer yet"
            reasons[job.job] = Reason("waits", text, {"needs": job.least, "free": len(free)})
            continue
        chosen: list[SlotId] = [slot.slot for slot in consolidate(free, job.least)]
        free = [slot for slot in free if slot.slot not in chosen]
        placed[job.job] = split(job.batch_size, chosen)
        reasons[job.job] = Reason("fill", "takes free slots until the policy answers")
    return Plan(based_on=view.version, local_batch=placed, reasons=reasons, wake_at=wake_at)
