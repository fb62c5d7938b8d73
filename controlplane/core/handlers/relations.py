"""Gates, which keep a job from starting: a hold, an earliest start, and jobs that it waits for.

The end of a job opens the gates of the jobs that wait for it, in the same input. A job that waits
in vain is cancelled. An array is a job without slots. Its indices become jobs, its elements, when
they might start soon, so that the indices that wait cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import accept, end
from controlplane.core.inputs import HoldRequested, ReleaseRequested, StartDue
from controlplane.core.model.array import JobArray
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Phase
from controlplane.core.state import State
from schemas.ids import JobId, Seconds
from schemas.relations import WAITS_TO, ArrayElement, is_met, time_text

ELEMENTS_PER_SLOT: Final = 2  # of an array, so that a policy always has some to start
PASSIVE: Final = {"cancelled": "was cancelled", "rejected": "was rejected"}


def bind(ctx: HandlerContext, job: Job, outcomes: Mapping[JobId, str]) -> None:
    """Set the gates of a new job that its spec states. Cancel it if a parent ended otherwise.

    `outcomes` are the final states of parents that have ended, and may have left the state.
    """
    state = ctx.state
    starts_at = job.spec.earliest_start(ctx.now)
    if starts_at > ctx.now:
        job.starts_at = starts_at
        state.early[job.job] = None
    if (indices := job.spec.indices) is not None:
        first, last, most = indices
        job.array = JobArray(first=first, last=last, following=first, most=most)
        state.arrays[job.job] = None
    for parent in job.spec.parents:
        known = state.jobs.get(parent.job)
        if known is not None and not known.ended:
            job.waits_for[parent.job] = parent.condition
            state.children.setdefault(parent.job, {})[job.job] = None
            continue
        outcome = outcomes.get(parent.job)
        if outcome is None or not is_met(parent.condition, outcome):
            _cancel(ctx, job, parent.job, parent.condition, outcome)
            return


def reconcile(ctx: HandlerContext) -> None:
    """Carry out what follows from the ends of jobs, and turn indices of arrays into jobs.

    A repeated call has no effect.
    """
    for job in ctx.ended:  # grows with the jobs that are cancelled here
        for parent in job.waits_for:
            siblings = ctx.state.children[parent]
            del siblings[job.job]
            if not siblings:
                del ctx.state.children[parent]
        job.waits_for = {}
        for child in [ctx.state.jobs[name] for name in ctx.state.children.pop(job.job, {})]:
            _parent_ended(ctx, child, job)
        for element in list(job.array.live) if job.array is not None else ():
            end(ctx, ctx.state.jobs[element], JobTrigger.CANCELLED, job.reason)
        _element_ended(ctx, job)
    for name in list(ctx.state.arrays):
        _add_elements(ctx, ctx.state.jobs[name])


def _add_elements(ctx: HandlerContext, job: Job) -> None:
    """Turn as many indices of an array into jobs as its limit and the cluster's size allow."""
    array = job.array
    if array is None or job.held_by or job.waits_for or job.starts_at:
        return
    most = ELEMENTS_PER_SLOT * len(ctx.state.slot_index.slots())
    most = min(most, array.most or most)
    while len(array.live) < most and array.following <= array.last:
        index = array.following
        array.following += 1
        latest = job.spec.latest_end(job.submitted_at)
        spec = replace(
            job.spec, name=f"{job.spec.name}_{index}", array=UNSET, after=UNSET, not_before=UNSET,
            deadline=UNSET if latest is None else time_text(latest),
            element=ArrayElement(array=job.job, index=index),
        )  # fmt: skip
        element = accept(ctx, spec, job.snapshot, job.user, job.project)
        array.live[element.job] = index
    if array.following > array.last:
        del ctx.state.arrays[job.job]


def _element_ended(ctx: HandlerContext, job: Job) -> None:
    """Count an ended element, and end its array after the last one."""
    place = job.spec.stated_element
    owner = None if place is None else ctx.state.jobs.get(place.array)
    array = None if owner is None else owner.array
    if owner is None or array is None or array.live.pop(job.job, None) is None:
        return  # not an element, or one that was submitted again
    array.ended[job.phase.value] = array.ended.get(job.phase.value, 0) + 1
    if job.phase is not Phase.SUCCEEDED and not array.failure:
        array.failure = f"{job.job} {job.phase.value}: {job.reason}"
        owner.attempts.exit_code = job.attempts.exit_code
    if owner.ended or not array.complete:
        return
    if array.failure:
        failed = array.size - array.ended.get(Phase.SUCCEEDED.value, 0)
        reason = f"{failed} of {array.size} elements did not succeed, first {array.failure}"
        end(ctx, owner, JobTrigger.GAVE_UP, reason)
    else:
        owner.attempts.exit_code = 0
        end(ctx, owner, JobTrigger.FINISHED, f"all {array.size} elements succeeded")


def _parent_ended(ctx: HandlerContext, job: Job, parent: Job) -> None:
    condition = job.waits_for.pop(parent.job)
    if not is_met(condition, parent.phase.value):
        _cancel(ctx, job, parent.job, condition, parent.phase.value)
        return
    _gate_changed(ctx, job)
    if not job.waits_for:
        phase = parent.phase.value
        job.reason = f"{parent.job} {PASSIVE.get(phase, f'has {phase}')}"
        ctx.announce("job.eligible", job, {"reason": job.reason})


def _cancel(
    ctx: HandlerContext, job: Job, parent: JobId, condition: str, outcome: str | None
) -> None:
    ended = "which is not known any more"
    if outcome is not None:
        ended = f"which {PASSIVE.get(outcome, outcome)}"
    end(ctx, job, JobTrigger.CANCELLED, f"waited for {parent} {WAITS_TO[condition]}, {ended}")


def next_start(state: State, job: Job, _now: Seconds) -> Seconds:
    """Return the earliest start of a job, if that is still to come."""
    return job.starts_at if job.job in state.early else Seconds(math.inf)


def on_start_due(ctx: HandlerContext, event: StartDue) -> None:
    """Let a job start whose earliest start has come."""
    if event.job in ctx.state.early:
        del ctx.state.early[event.job]
        job = ctx.state.jobs[event.job]
        job.starts_at = Seconds(0.0)
        _gate_changed(ctx, job)


def on_hold_requested(ctx: HandlerContext, event: HoldRequested) -> None:
    """Hold a job: it goes on if it has slots, and gets no new ones. An ended job is left alone.

    A hold of an array holds its elements, too.
    """
    for job in _with_elements(ctx, ctx.state.job(event.job)):
        _set_holder(ctx, job, event.user, "job.held", event.user)


def on_release_requested(ctx: HandlerContext, event: ReleaseRequested) -> None:
    """Release a job that is held."""
    for job in _with_elements(ctx, ctx.state.job(event.job)):
        if job.held_by:
            _set_holder(ctx, job, "", "job.released", event.user)


def _with_elements(ctx: HandlerContext, job: Job) -> list[Job]:
    return [job, *(ctx.state.jobs[name] for name in (job.array.live if job.array else ()))]


def _set_holder(ctx: HandlerContext, job: Job, holder: str, announced: str, user: str) -> None:
    if job.ended:
        return
    job.held_by = holder
    _gate_changed(ctx, job)
    if job.group is None:
        job.reason = f"{'held' if holder else 'released'} by {user}"
    ctx.announce(announced, job, {"user": user})


def _gate_changed(ctx: HandlerContext, job: Job) -> None:
    """Make plans and orders consider the job again."""
    job.changed_version = ctx.state.version
    ctx.changed_jobs[job.job] = None
    ctx.plan_needed = True
