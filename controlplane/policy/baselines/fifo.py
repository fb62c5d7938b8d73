"""First come, first served: gangs of the wanted size, oldest job first."""

from __future__ import annotations

from controlplane.policy.api import ClusterView, ImmediatePolicy, Plan, PolicyEvent, Reason
from controlplane.policy.options import Options
from controlplane.policy.placement.free_slots import with_user_batches
from controlplane.policy.placement.placers import PlacerName, make_placer
from controlplane.policy.placement.slot_partition import Partition, slots_in_words, too_large
from schemas.ids import JobId, NodeId, Seconds, SlotId


class FifoOptions(Options, frozen=True):
    """Options of policy `fifo`, table `[policy.options]` of the controller's settings."""

    placer: PlacerName = "roomiest"


class Fifo(ImmediatePolicy):
    """Policy that gives waiting jobs their wanted slots in order of arrival.

    Running jobs are never moved. If the first job of the queue does not fit, all jobs behind it
    wait, so that no job starves. A job that can never fit is passed over.
    """

    def __init__(self, options: FifoOptions | None = None) -> None:
        self.options = options or FifoOptions()
        self._placer = make_placer(self.options.placer)

    def observe(self, event: PolicyEvent, now: Seconds) -> None:
        """Pass the event to the placer."""
        self._placer.observe(event, now)

    def plan(self, view: ClusterView, now: Seconds) -> Plan:
        """Return a plan that keeps running jobs and starts the oldest waiting jobs that fit."""
        kept = {name: job.running_on for name, job in view.jobs.items() if job.running_on}
        waiting = [job for job in view.jobs.values() if not job.running_on and job.movable]
        partition = _free_now(view, now)
        left = partition.room
        sizes: dict[JobId, int] = {}
        reasons: dict[JobId, Reason] = {}
        wake_at: Seconds | None = None
        ahead = 0  # number of waiting jobs before this one
        for job in sorted(waiting, key=lambda job: job.submitted_at):  # stable: keeps order
            useful = min(len(view.slots), job.batch_size)  # a slot without a sample is wasted
            size = min(job.wanted, max(job.least, useful))
            if job.least > len(view.slots):
                reasons[job.job] = too_large(job.least, len(view.slots))
            elif job.ready_at > now:
                wake_at = min(job.ready_at, wake_at or job.ready_at)
                reasons[job.job] = Reason("backing_off", "waits before the next attempt")
            elif ahead or size > left:
                behind = f" behind {ahead} job{'s' * (ahead != 1)}" if ahead else ""
                text = f"waits for {slots_in_words(size)}{behind}, {left} free"
                numbers: dict[str, float] = {"needs": size, "free": left, "ahead": ahead}
                reasons[job.job] = Reason("waits", text, numbers)
                ahead += 1
            else:
                sizes[job.job] = size
                left -= size
                reasons[job.job] = Reason("next_in_line", "its turn by arrival", {"slots": size})
        placed = with_user_batches(partition, self._placer.place(partition, sizes))
        return Plan(
            based_on=view.version, local_batch=kept | placed, reasons=reasons, wake_at=wake_at
        )


def _free_now(view: ClusterView, now: Seconds) -> Partition:
    """Return a partition of the slots that are free now, because a gang waits for all its slots."""
    # A job that is changing may still need a slot after its process has exited.
    held = {slot for job in view.jobs.values() if not job.movable for slot in job.running_on}
    free: dict[NodeId, list[SlotId]] = {slot.node: [] for slot in view.slots}
    for slot in view.slots:
        if slot.usable and slot.slot not in held:
            free[slot.node].append(slot.slot)
    return Partition(view, now, free, room=sum(map(len, free.values())))
