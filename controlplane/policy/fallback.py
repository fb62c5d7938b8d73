"""Greedy plan while the policy does not answer: running jobs go on, free slots are filled."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, Plan, Reason
from controlplane.policy.planning.least_slots import show_whole, tell_whole
from controlplane.policy.planning.packing import consolidate, split
from controlplane.policy.planning.wait_reasons import backs_off, too_large
from schemas.ids import JobId, Seconds, SlotId


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
