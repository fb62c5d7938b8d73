"""Gates, which keep a job from starting: a hold, an earliest start, and jobs that it waits for.

The end of a job opens the gates of the jobs that wait for it, in the same input. A job that waits
in vain is cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import end
from controlplane.core.inputs import HoldRequested, ReleaseRequested
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger
from schemas.ids import JobId
from schemas.relations import WAITS_TO, is_met

PASSIVE: Final = {"cancelled": "was cancelled", "rejected": "was rejected"}


def bind(ctx: HandlerContext, job: Job, outcomes: Mapping[JobId, str]) -> None:
    """Set the gates of a new job that its spec states. Cancel it if a parent ended otherwise.

    `outcomes` are the final states of parents that have ended, and may have left the state.
    """
    state = ctx.state
    job.attempts.next_start_at = job.spec.earliest_start(ctx.now)
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
    """Decide about the jobs that wait for jobs which this input ended, and for those in turn.

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


def on_hold_requested(ctx: HandlerContext, event: HoldRequested) -> None:
    """Hold a job: it goes on if it has slots, and gets no new ones. An ended job is left alone.

    Raises:
        UnknownJobError: if there is no such job.
    """
    _set_holder(ctx, ctx.state.job(event.job), event.user, "job.held", event.user)


def on_release_requested(ctx: HandlerContext, event: ReleaseRequested) -> None:
    """Release a job that is held.

    Raises:
        UnknownJobError: if there is no such job.
    """
    job = ctx.state.job(event.job)
    if job.held_by:
        _set_holder(ctx, job, "", "job.released", event.user)


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
