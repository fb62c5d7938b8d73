"""First come, first served: gangs of the wanted size, oldest job first."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, JobView, Plan, Reason
from controlplane.policy.immediate_policy import ImmediatePolicy
from controlplane.policy.planning.packing import consolidate, split
from controlplane.policy.planning.wait_reasons import too_large
from schemas.ids import JobId, Seconds, SlotId


class Fifo(ImmediatePolicy):
    """Give each waiting job its wanted slots in order of arrival; never move a running job.

    A job at the head of the line that does not fit holds back those behind it, so nothing
    starves; one that can never fit is passed over.
    """

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Keep what runs, then place the oldest waiting jobs on the slots left over."""
        kept = {name: job.running_on for name, job in view.jobs.items() if job.running_on}
        waiting = _waiting(view)
        if not waiting:
            return Plan(based_on=view.version, local_batch=kept)
        # A job that changes may count on a slot whose process is gone already.
        held = {slot for job in view.jobs.values() if not job.movable for slot in job.running_on}
        free = [slot for slot in view.slots if slot.usable and slot.slot not in held]
        placed: dict[JobId, dict[SlotId, int]] = {}
        reasons: dict[JobId, Reason] = {}
        wake_at: Seconds | None = None
        ahead = 0  # jobs that wait in front
        for job in waiting:
            useful = min(len(view.slots), job.batch_size)  # a slot without a sample is wasted
            size = min(job.wanted, max(job.least, useful))
            if job.least > len(view.slots):
                reasons[job.job] = too_large(job.least, len(view.slots))
            elif job.ready_at > now:
                wake_at = min(job.ready_at, wake_at or job.ready_at)
                reasons[job.job] = Reason("backing_off", "waits before its next try")
            elif ahead or size > len(free):
                reasons[job.job] = _waits(size, len(free), ahead)
                ahead += 1
            else:
                chosen = [slot.slot for slot in consolidate(free, size)]
                gone = set(chosen)
                free = [slot for slot in free if slot.slot not in gone]
                placed[job.job] = split(job.batch_size, chosen)
                reasons[job.job] = Reason("next_in_line", "its turn by arrival", {"slots": size})
        return Plan(
            based_on=view.version, local_batch=kept | placed, reasons=reasons, wake_at=wake_at
        )


def _waiting(view: ClusterView) -> list[JobView]:
    waiting = [job for job in view.jobs.values() if not job.running_on and job.movable]
    return sorted(waiting, key=lambda job: job.submitted_at)  # stable: the view is in order


def _waits(size: int, free: int, ahead: int) -> Reason:
    behind = f" behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
    text = f"waits for {size} slot{'s' * (size != 1)}{behind}, {free} free"
    return Reason("waits", text, {"needs": size, "free": free, "ahead": ahead})
