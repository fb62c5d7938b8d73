"""Messages between the controller and the search process, over two pipes.

The search process receives the full view once, and afterwards only differences (`ViewDelta`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress, filterfalse
from operator import is_not
from typing import Any, Final

import msgspec

from controlplane.policy.api import ClusterView, JobView, Plan, PolicyEvent, SearchStats, SlotView
from schemas.ids import JobId, Seconds, SlotId


class StartSearch(msgspec.Struct, frozen=True, kw_only=True, tag="start_search"):
    """Start the policy with these options. The policy first observes the history."""

    policy: str
    options: dict[str, Any]
    seed: int
    history: list[tuple[Seconds, PolicyEvent]]


class FullView(msgspec.Struct, frozen=True, kw_only=True, tag="full_view"):
    """The full view of the cluster."""

    view: ClusterView


class ViewDelta(msgspec.Struct, frozen=True, kw_only=True, tag="view_delta"):
    """Difference from the previous view."""

    version: int
    slots: dict[SlotId, SlotView]
    jobs: dict[JobId, JobView]
    removed: list[JobId]


class EventObserved(msgspec.Struct, frozen=True, kw_only=True, tag="event_observed"):
    """An event for the policy."""

    event: PolicyEvent
    at: Seconds


class FindPlan(msgspec.Struct, frozen=True, kw_only=True, tag="find_plan"):
    """Find a plan for the current view. The reply is `PlanFound`."""

    number: int
    now: Seconds


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The history has been processed."""


class PlanFound(msgspec.Struct, frozen=True, kw_only=True, tag="plan_found"):
    """A plan for the request `number`. Number 0 marks an unrequested, better plan."""

    number: int
    plan: Plan
    stats: SearchStats


class BatchesChosen(msgspec.Struct, frozen=True, kw_only=True, tag="batches_chosen"):
    """New batch sizes for some jobs on their present slots, unrequested. Other jobs continue."""

    plan: Plan


class Converged(msgspec.Struct, frozen=True, kw_only=True, tag="converged"):
    """The search has nothing more to improve, and sleeps until the next message."""

    stats: SearchStats


ToSearch = StartSearch | FullView | ViewDelta | EventObserved | FindPlan
FromSearch = Ready | PlanFound | BatchesChosen | Converged
TO_SEARCH: Final[msgspec.msgpack.Decoder[ToSearch]] = msgspec.msgpack.Decoder(ToSearch)
FROM_SEARCH: Final[msgspec.msgpack.Decoder[FromSearch]] = msgspec.msgpack.Decoder(FromSearch)


def view_delta(before: ClusterView, after: ClusterView) -> ViewDelta | None:
    """Return the difference between two views, or None if only the full view can describe it.

    The full view is needed if the set of slots or the order of the jobs differs.
    """
    if len(before.slots) != len(after.slots):
        return None
    # Most slots and jobs are the same objects, which itertools skips in C.
    pairs = zip(before.slots, after.slots, strict=True)
    changed = list(compress(pairs, map(is_not, before.slots, after.slots)))
    if any(old.slot != new.slot for old, new in changed):
        return None
    slots = {new.slot: new for old, new in changed if old != new}
    known = before.jobs
    differs = map(is_not, map(known.get, after.jobs), after.jobs.values())
    jobs = {n: job for n, job in compress(after.jobs.items(), differs) if known.get(n) != job}
    removed = list(filterfalse(after.jobs.__contains__, known))
    order = [*filter(after.jobs.__contains__, known), *filterfalse(known.__contains__, after.jobs)]
    if order != list(after.jobs):  # a job returned to the middle of the order
        return None
    return ViewDelta(version=after.version, slots=slots, jobs=jobs, removed=removed)


def apply_delta(view: ClusterView, delta: ViewDelta) -> ClusterView:
    """Apply `delta` to the view that it was made from. Jobs keep their order of arrival.

    The result shares all unchanged parts with `view`.
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
