"""Handlers of requests about jobs and trials, of rules of sharing, and of chosen policies."""

from __future__ import annotations

from typing import Final

from controlplane.core.commands import Accept
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import relations, sweep_orders
from controlplane.core.handlers.lifecycle import accept, end
from controlplane.core.handlers.sweep_orders import carry_out
from controlplane.core.inputs import (
    CancelRequested,
    JobSubmitted,
    PolicyChosen,
    SchedulingPaused,
    SharingChanged,
    SweepChangeRequested,
)
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger
from controlplane.core.model.sweep import JobSweep, new_sweep
from controlplane.sweeps.orders import Order
from schemas.wire.feed import Detail

MAX_CHANGE_KEYS: Final = 1000  # of the latest changes of a sweep


def on_job_submitted(ctx: HandlerContext, event: JobSubmitted) -> None:
    """Accept a job and reply with its name.

    If the user has submitted the same non-empty key before, reply with the name of that job
    instead.
    """
    state = ctx.state
    key = f"{event.user}/{event.key}" if event.key else ""
    known = state.submission_keys.get(key) or state.left_submission_keys.get(key)
    if known is not None:
        ctx.out.append(Accept(known))
        return
    job = accept(ctx, event.spec, event.snapshot, event.user, event.project)
    if (spec := event.spec.stated_sweep) is not None:
        job.sweep = new_sweep(spec, event.spec.slots[1], event.states_key)
        state.sweeps[job.job] = None
        sweep_orders.carry_out(ctx, job, job.sweep, job.sweep.engine.begin(ctx.now))
    if key:
        state.submission_keys[key] = job.job
        job.key = key
    relations.bind(ctx, job, event.outcomes)
    ctx.out.append(Accept(job.job))


def on_cancel_requested(ctx: HandlerContext, event: CancelRequested) -> None:
    """Cancel a job, unless it has ended."""
    job = ctx.state.job(event.job)
    if not job.ended:
        end(ctx, job, JobTrigger.CANCELLED, f"cancelled by {event.user}")


def on_sharing_changed(ctx: HandlerContext, event: SharingChanged) -> None:
    """Set the rules of sharing. The usage up to now decays with the new half-life from now on."""
    former = ctx.state.sharing
    if former is not None:
        for usage in ctx.state.usage.values():
            usage.add(0, ctx.now, ctx.now, former.half_life_s)
    ctx.state.sharing = event.sharing
    if not event.user:
        ctx.state.sharing_file = event.sharing
    ctx.announce("policy.sharing", detail={"by": event.user or "the settings file"})
    ctx.plan_needed = True


def on_scheduling_paused(ctx: HandlerContext, event: SchedulingPaused) -> None:
    """Pause all starts and growths, or resume them. Running jobs continue, shrink and end."""
    why = f": {event.reason}" if event.reason else ""
    ctx.state.scheduling_paused = f"paused by {event.user}{why}" if event.paused else ""
    name = "policy.paused" if event.paused else "policy.resumed"
    ctx.announce(name, detail={"by": event.user, "reason": event.reason})
    ctx.plan_needed = True


def on_policy_chosen(ctx: HandlerContext, event: PolicyChosen) -> None:
    """Record the policy that plans from now on. Its first plan changes only what differs."""
    former = ctx.state.policy
    ctx.state.policy, ctx.state.policy_since = event, ctx.now
    if not event.user:
        ctx.state.policy_file = event
    detail: Detail = {"policy": event.name, "by": event.user or "the settings file"}
    ctx.announce("policy.chosen", detail={**detail, "former": former.name if former else ""})
    ctx.plan_needed = True


def on_sweep_change_requested(ctx: HandlerContext, event: SweepChangeRequested) -> None:
    """Change a trial of a sweep, or add one.

    The request is ignored if its key was used before, the job has ended, or a trial is unknown.
    """
    job = ctx.state.job(event.job)
    sweep = job.sweep
    if sweep is None or job.ended:
        return
    key = f"{event.user}/{event.key}" if event.key else ""
    if key and key in sweep.keys:
        return
    count = len(sweep.engine.state.trials)
    number = count if event.change == "add" else event.trial
    known = event.parent if event.change == "add" else event.trial
    if number is None or (known is not None and not 0 <= known < count):
        return
    carry_out(ctx, job, sweep, _orders(ctx, sweep, event, number))
    if key:
        sweep.keys[key] = number
        while len(sweep.keys) > MAX_CHANGE_KEYS:
            del sweep.keys[next(iter(sweep.keys))]
    _announce(ctx, job, event, number)


def _orders(
    ctx: HandlerContext, sweep: JobSweep, event: SweepChangeRequested, number: int
) -> list[Order]:
    engine = sweep.engine
    reason = f"{event.change}{'ped' if event.change == 'stop' else 'd'} by {event.user}"
    match event.change:
        case "add":
            return engine.add(event.values, ctx.now, event.parent)
        case "stop":
            return engine.stop(number, reason, ctx.now)
        case "delete":
            return engine.delete(number, reason, ctx.now)
        case "pause":
            return engine.pause(number)
        case "resume":
            return engine.resume(number, ctx.now)


def _announce(ctx: HandlerContext, job: Job, event: SweepChangeRequested, number: int) -> None:
    ctx.changed_jobs[job.job] = None
    ctx.plan_needed = True
    detail: Detail = {"trial": number, "change": event.change, "user": event.user}
    ctx.announce("sweep.changed", job, detail)
