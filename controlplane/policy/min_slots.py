"""No job trains on below its least slots: what a policy is shown of one that lost members.

A group that loses a member goes on with the others. Where slots are free, the job is shown as one
that grows back on them, and that nobody may move; where none are, as one that waits, and whose
slots are free soon: the policy gives it its least, or it stops and waits in line.

Any policy, with jobs that lost members brought back to their least slots.

Greedy plan while the policy does not answer: running jobs go on, free slots are filled.
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
from controlplane.policy.placement.slot_partition import backs_off, consolidate, split, too_large
from schemas.ids import JobId, Seconds, SlotId, node_of

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class ShownWhole:
    """A view for a policy, and which of its jobs are shown as they are not."""

    view: ClusterView
    short: Mapping[JobId, JobView] = field(default_factory=dict)  # as they are
    wake_at: Seconds | None = None  # when one of the others may be changed again


def show_whole(view: ClusterView, now: Seconds, *, gangs: bool = False) -> ShownWhole:
    """Show jobs that lost members as they should be.

    A job that changes just now, that waits after a failed change, or whose slots are on a node
    that is not up is left as it is.

    Args:
        now: seconds on the controller's clock.
        gangs: whether jobs should have their wanted slots again, where so many are free.
    """
    due = {name: _due(job, view, gangs=gangs) for name, job in view.jobs.items() if job.running_on}
    short = [view.jobs[name] for name in due if len(view.jobs[name].running_on) < due[name]]
    if not short:
        return ShownWhole(view, {})
    held = {slot for job in view.jobs.values() for slot in job.running_on}
    slots = {slot.slot: slot for slot in view.slots}
    free = [slot for slot in view.slots if slot.usable and slot.slot not in held]
    shown: dict[JobId, JobView] = {}
    waits = [job.retry_at for job in short if job.movable and job.retry_at > now]
    for job in sorted(short, key=lambda job: job.submitted_at):  # stable: the view is in order
        up = all(slot in slots and slots[slot].up for slot in job.running_on)
        if not job.movable or job.retry_at > now or not up:
            continue
        size = _fits(job, due[job.job], len(free))
        if size:
            new = _close_to(job, free, size - len(job.running_on))
            free = [slot for slot in free if slot.slot not in new]
            shown[job.job] = _grown(job, new)
        elif len(job.running_on) < job.least:
            shown[job.job] = msgspec.structs.replace(
                job, running_on={}, ready_at=Seconds(0.0), retry_at=Seconds(0.0)
            )
    now_held = {slot for job in shown.values() for slot in job.running_on}
    given_up = {slot for name in shown for slot in view.jobs[name].running_on} - now_held
    changed = msgspec.structs.replace(
        view,
        slots=tuple(_as_shown(slot, now_held, given_up) for slot in view.slots),
        jobs={name: shown.get(name, job) for name, job in view.jobs.items()},
    )
    return ShownWhole(changed, {name: view.jobs[name] for name in shown}, min(waits, default=None))


def tell_whole(shown: ShownWhole, plan: Plan) -> Plan:
    """The plan, with what becomes of jobs that lost members said in their own words."""
    if not shown.short and shown.wake_at is None:
        return plan
    reasons = dict(plan.reasons)
    for name, job in shown.short.items():
        reasons[name] = _reason(job, plan.local_batch.get(name, {}), plan.reasons.get(name))
    times = [at for at in (plan.wake_at, shown.wake_at) if at is not None]
    return msgspec.structs.replace(plan, reasons=reasons, wake_at=min(times, default=None))


def _due(job: JobView, view: ClusterView, *, gangs: bool) -> int:
    useful = min(job.wanted, len(view.slots), job.batch_size)
    return max(job.least, useful) if gangs else job.least


def _fits(job: JobView, due: int, free: int) -> int:
    """What it is due, else its least, else 0: more than it has, and not more than are free."""
    have = len(job.running_on)
    return next((size for size in (due, job.least) if have < size <= have + free), 0)


def _close_to(job: JobView, free: list[SlotView], many: int) -> list[SlotId]:
    """So many free slots: on the nodes that it is on first, then on as few others as possible."""
    nodes = {node_of(slot) for slot in job.running_on}
    near = [slot for slot in free if slot.node in nodes][:many]
    far = [slot for slot in free if slot.node not in nodes]
    return [slot.slot for slot in (*near, *consolidate(far, many - len(near)))]


def _grown(job: JobView, new: list[SlotId]) -> JobView:
    slots = [*job.running_on, *new]
    roomy = min(job.batch_size, job.local_limit * len(slots))
    batch = max(sum(job.running_on.values()), roomy, len(slots))
    return msgspec.structs.replace(job, running_on=split(batch, slots), movable=False)


def _as_shown(slot: SlotView, held: set[SlotId], given_up: set[SlotId]) -> SlotView:
    if slot.slot in held and slot.usable:
        return msgspec.structs.replace(slot, usable=False)
    if slot.slot in given_up:
        return msgspec.structs.replace(slot, leaving=True)
    return slot


def _reason(job: JobView, placed: Mapping[SlotId, int], why: Reason | None) -> Reason:
    have, then = len(job.running_on), len(placed)
    numbers = {"slots_now": float(have), "slots_then": float(then), "least": float(job.least)}
    left = f"{have} of its least {job.least} slots left"
    if not then:
        waits = f"; {why.text}" if why is not None else ""
        return Reason(
            "pause", f"paused: it lost members, {left}, and no others are free{waits}", numbers
        )
    if have < job.least:
        return Reason("restore", f"grows back to {then} slots: it lost members, {left}", numbers)
    return Reason("restore", f"grows back to {then} slots: it lost members, {have} left", numbers)


class RestoringPolicy(Policy):
    """What `policy` decides about a cluster in which no job trains on below its least slots.

    No policy has to think of losses: it is shown jobs that lost members as they should be
    (`planning/least_slots`), and decides about all others around them.

    Args:
        gangs: whether it gives jobs their wanted slots and never another number: then they get
            these again where they are free.
    """

    def __init__(self, policy: Policy, *, gangs: bool = False) -> None:
        self.policy = policy
        self._gangs = gangs

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Hand it on."""
        self.policy.observe(event, now)

    def improve(self, view: ClusterView, budget: Budget, rng: Generator, now: Seconds) -> bool:
        """Let it think about the jobs as they should be."""
        return self.policy.improve(self._shown(view, now).view, budget, rng, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Its plan, in which jobs that lost members grow back or stop."""
        shown = self._shown(view, now)
        return tell_whole(shown, self.policy.plan(shown.view, now))

    def batches(self, view: ClusterView, now: Seconds) -> Plan:
        """Its batches; jobs that lost members are none of its business."""
        shown = self._shown(view, now)
        return self.policy.batches(shown.view, now)

    def stats(self) -> SearchStats:
        """Those of the policy."""
        return self.policy.stats()

    def _shown(self, view: ClusterView, now: Seconds) -> ShownWhole:
        return show_whole(view, now, gangs=self._gangs)


def fallback_plan(view: ClusterView, now: Seconds, *, admits: bool = False) -> Plan:
    """Keep every running job as it is; start waiting ones on their least slots, oldest first.

    Args:
        now: seconds on the controller's clock.
        admits: whether the search decides which jobs start at all: one that states its utility
            and never started waits for that, since it could not be rejected afterwards.
    """
    shown = show_whole(view, now)  # but one that lost members grows back to its least, or stops
    return tell_whole(shown, _filled(shown.view, now, admits=admits))


def _filled(view: ClusterView, now: Seconds, *, admits: bool) -> Plan:
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
            reasons[job.job] = Reason(
                "waits", "waits to be admitted; the policy does not answer yet"
            )
            continue
        if job.least > len(free):
            needs = f"{job.least} slot{'s' * (job.least != 1)}"
            text = f"waits for {needs}, {len(free)} free; the policy does not answer yet"
            reasons[job.job] = Reason("waits", text, {"needs": job.least, "free": len(free)})
            continue
        chosen: list[SlotId] = [slot.slot for slot in consolidate(free, job.least)]
        free = [slot for slot in free if slot.slot not in chosen]
        placed[job.job] = split(job.batch_size, chosen)
        reasons[job.job] = Reason("fill", "takes free slots until the policy answers")
    return Plan(based_on=view.version, local_batch=placed, reasons=reasons, wake_at=wake_at)
