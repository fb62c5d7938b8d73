"""Users submit jobs and cancel them."""

from __future__ import annotations

from controlplane.core.commands import Accept
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import sweep_orders
from controlplane.core.handlers.job_ends import end
from controlplane.core.inputs import CancelRequested, JobSubmitted
from controlplane.core.model.job import Accounting, Job
from controlplane.core.model.job_phases import JobTrigger
from controlplane.core.model.job_sweep import new_sweep
from schemas.ids import JobId


def on_job_submitted(ctx: HandlerContext, event: JobSubmitted) -> None:
    """A user asks for a job; the same key a second time is the same job.

    Args:
        ctx: of this input.
        event: the job's description, its snapshot and user; without a key it is always a new job.
    """
    state = ctx.state
    key = f"{event.user}/{event.key}" if event.key else ""
    known = state.keys.get(key)
    if known is not None:
        ctx.out.append(Accept(known))
        return
    state.jobs_accepted += 1
    name = JobId(f"{event.spec.name}-{state.jobs_accepted}")
    job = Job(
        job=name,
        spec=event.spec,
        snapshot=event.snapshot,
        user=event.user,
        submitted_at=ctx.now,
        accounting=Accounting(since=ctx.now),
    )
    state.jobs[name] = job
    if (spec := event.spec.stated_sweep) is not None:
        job.sweep = new_sweep(spec)
        state.sweeps[name] = None
        sweep_orders.carry_out(ctx, job, job.sweep, job.sweep.engine.begin(ctx.now))
    state.active[name] = None
    ctx.changed_jobs[name] = None
    if key:
        state.keys[key] = name
    ctx.announce("job.submitted", job, {"name": event.spec.name, "user": event.user})
    ctx.out.append(Accept(name))
    ctx.ask = True


def on_cancel_requested(ctx: HandlerContext, event: CancelRequested) -> None:
    """A user ends a job.

    Args:
        ctx: of this input.
        event: the job, and who asks. Nothing happens to a job that has ended.

    Raises:
        UnknownJobError: if there is no such job.
    """
    job = ctx.state.job(event.job)
    if not job.ended:
        end(ctx, job, JobTrigger.CANCELLED, f"cancelled by {event.user}")
