"""What of a view a search may decide about: jobs, slots, and how many there are to share out."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.policy.api import ClusterView, JobView
from schemas.ids import JobId, Seconds, SlotId


@dataclass(frozen=True, slots=True)
class SlotSupply:
    """What there is to share out, for everybody alike."""

    capacity: int  # slots in play: free, soon free, or of a job that may be moved
    idle: int  # of them that nobody has, or that are soon free
    contended: bool  # whether a job waits that would fit
    now: Seconds


@dataclass(frozen=True, slots=True)
class InPlay:
    """Jobs and slots of one view, sorted by what may be done with them."""

    jobs: dict[JobId, JobView]  # that may be started or changed, and fit into the cluster
    kept: dict[JobId, dict[SlotId, int]]  # that nobody may move now, with their local batches
    backing_off: dict[JobId, Seconds]  # waits before its next try, until then
    too_large: dict[JobId, int]  # wants at least so many slots, which the cluster has not
    free_now: tuple[int, ...]  # places of slots that are free
    free_soon: tuple[int, ...]  # whose processes are leaving
    supply: SlotSupply


def in_play(view: ClusterView, now: Seconds) -> InPlay:
    """Sort the jobs and slots of `view`; both stay in its order.

    Args:
        now: seconds on the controller's clock.
    """
    movable: dict[JobId, JobView] = {}
    backing_off: dict[JobId, Seconds] = {}
    kept: dict[JobId, dict[SlotId, int]] = {}
    up = {slot.slot for slot in view.slots if slot.up}
    for name, job in view.jobs.items():
        stuck = not job.movable or job.retry_at > now or not job.running_on.keys() <= up
        if job.running_on and stuck:  # slots of a node that is away can be handed to nobody
            kept[name] = dict(job.running_on)
        elif job.movable and not job.running_on and job.ready_at > now:
            backing_off[name] = job.ready_at
        elif job.movable:
            movable[name] = job
    mine = {slot for job in movable.values() for slot in job.running_on}
    closed = {slot for placed in kept.values() for slot in placed} | mine
    free_now = [n for n, s in enumerate(view.slots) if s.usable and s.slot not in closed]
    free_soon = [n for n, s in enumerate(view.slots) if s.leaving and s.slot not in closed]
    too_large = {
        name: job.least
        for name, job in movable.items()
        if not job.running_on and job.least > len(view.slots)
    }
    jobs = {name: job for name, job in movable.items() if name not in too_large}
    idle = len(free_now) + len(free_soon)
    contended = any(not job.running_on for job in jobs.values())
    return InPlay(
        jobs=jobs,
        kept=kept,
        backing_off=backing_off,
        too_large=too_large,
        free_now=tuple(free_now),
        free_soon=tuple(free_soon),
        supply=SlotSupply(capacity=len(mine) + idle, idle=idle, contended=contended, now=now),
    )
