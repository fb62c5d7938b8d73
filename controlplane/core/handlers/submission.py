"""Users submit jobs and cancel them."""

from __future__ import annotations

from controlplane.core.commands import Accept
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import sweep_orders
from controlplane.core.handlers.job_ends import end
from controlplane.core.handlers.new_jobs import accept
from controlplane.core.inputs import CancelRequested, JobSubmitted
from controlplane.core.model.job_phases import JobTrigger
from controlplane.core.model.job_sweep import new_sweep


def on_job_submitted(ctx: HandlerContext, event: JobSubmitted) -> None:
    """A user asks for a job; the same key a second time is the same job.

    Args:
        event: the job's description, its snapshot and user; without a key it is always a new job.
    """
    state = ctx.state
    key = f"{event.user}/{event.key}" if event.key else ""
    known = state.keys.get(key) or state.left_keys.get(key)
    if known is not None:
        ctx.out.append(Accept(known))
        return
    job = accept(ctx, event.spec, event.snapshot, event.user, event.project)
    if (spec := event.spec.stated_sweep) is not None:
        job.sweep = new_sweep(spec, event.spec.slots[1])
        state.sweeps[job.job] = None
        sweep_orders.carry_out(ctx, job, job.sweep, job.sweep.engine.begin(ctx.now))
    if key:
        state.keys[key] = job.job
        job.key = key
    ctx.out.append(Accept(job.job))


def on_cancel_requested(ctx: HandlerContext, event: CancelRequested) -> None:
    """A user ends a job.

    Args:
        event: the job, and who asks. Nothing happens to a job that has ended.

    Raises:
        UnknownJobError: if there is no such job.
    """
    job = ctx.state.job(event.job)
    if not job.ended:
        end(ctx, job, JobTrigger.CANCELLED, f"cancelled by {event.user}")
