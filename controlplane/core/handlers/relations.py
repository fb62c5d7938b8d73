"""Handlers of gates, which keep a job from starting: a hold by a user, or an earliest start."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.inputs import HoldRequested, ReleaseRequested
from controlplane.core.model.job import Job


def bind(ctx: HandlerContext, job: Job) -> None:
    """Set the gates of a new job that its spec states."""
    job.attempts.next_start_at = job.spec.earliest_start(ctx.now)


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
