"""What changed from one view to the next: the search process hears of nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.policy.api import ClusterView, JobView
from controlplane.service.planner.search_messages import ViewDelta
from schemas.ids import JobId


def view_delta(before: ClusterView, after: ClusterView) -> ViewDelta | None:
    """What changed from one view to the next.

    Returns:
        None where only the whole view will do: other slots, or a job that came back in the middle.
    """
    if len(before.slots) != len(after.slots):
        return None
    slots = {}
    for old, new in zip(before.slots, after.slots, strict=True):
        if old.slot != new.slot:
            return None
        if old != new:
            slots[new.slot] = new
    jobs = {name: job for name, job in after.jobs.items() if before.jobs.get(name) != job}
    removed = [name for name in before.jobs if name not in after.jobs]
    order = [name for name in before.jobs if name in after.jobs]
    order += [name for name in after.jobs if name not in before.jobs]
    if order != list(after.jobs):  # one came back in the middle
        return None
    return ViewDelta(version=after.version, slots=slots, jobs=jobs, removed=removed)


def apply_delta(view: ClusterView, delta: ViewDelta) -> ClusterView:
    """The view after `delta`; jobs keep the order in which they arrived.

    Args:
        view: the one that `delta` was made from.

    Returns:
        A view that shares with `view` whatever did not change.
    """
    slots = view.slots
    if delta.slots:
        slots = tuple(delta.slots.get(slot.slot, slot) for slot in slots)
    jobs: Mapping[JobId, JobView] = view.jobs
    if delta.jobs or delta.removed:
        removed = set(delta.removed)
        jobs = {n: delta.jobs.get(n, job) for n, job in view.jobs.items() if n not in removed}
        jobs |= {n: job for n, job in delta.jobs.items() if n not in jobs}
    return ClusterView(version=delta.version, slots=slots, jobs=jobs)
