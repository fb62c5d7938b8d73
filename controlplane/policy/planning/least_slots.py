"""No job trains on below its least slots: what a policy is shown of one that lost members.

A group that loses a member goes on with the others. Where slots are free, the job is shown as one
that grows back on them, and that nobody may move; where none are, as one that waits, and whose
slots are free soon: the policy gives it its least, or it stops and waits in line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from controlplane.policy.planning.packing import consolidate, split
from schemas.ids import JobId, Seconds, SlotId, node_of


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
