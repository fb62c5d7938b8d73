"""Users stop, pause, resume and delete trials of a sweep, and add some."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.sweep_orders import carry_out
from controlplane.core.inputs import SweepChangeRequested
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep
from controlplane.sweeps.orders import Order
from schemas.messages.feed import Detail


def on_sweep_change_requested(ctx: HandlerContext, event: SweepChangeRequested) -> None:
    """A user changes one trial, or adds one; the same key a second time does nothing.

    Args:
        event: the job, and what is wanted. Nothing happens to a job that has ended, and to a trial
            that there is not.

    Raises:
        UnknownJobError: if there is no such job.
    """
    job = ctx.state.job(event.job)
    sweep = job.sweep
    if sweep is None or job.ended:
        return
    key = f"{event.user}/{event.key}" if event.key else ""
    if key and key in sweep.keys:
        return
    many = len(sweep.engine.state.trials)
    number = many if event.change == "add" else event.trial
    known = event.parent if event.change == "add" else event.trial
    if number is None or (known is not None and not 0 <= known < many):
        return
    carry_out(ctx, job, sweep, _orders(ctx, sweep, event, number))
    if key:
        sweep.keys[key] = number
    _announce(ctx, job, event, number)


def _orders(
    ctx: HandlerContext, sweep: JobSweep, event: SweepChangeRequested, number: int
) -> list[Order]:
    engine = sweep.engine
    why = f"{event.change}{'ped' if event.change == 'stop' else 'd'} by {event.user}"
    match event.change:
        case "add":
            return engine.add(event.values, ctx.now, event.parent)
        case "stop":
            return engine.stop(number, why, ctx.now)
        case "delete":
            return engine.delete(number, why, ctx.now)
        case "pause":
            return engine.pause(number)
        case "resume":
            return engine.resume(number, ctx.now)


def _announce(ctx: HandlerContext, job: Job, event: SweepChangeRequested, number: int) -> None:
    ctx.changed_jobs[job.job] = None
    ctx.ask = True
    detail: Detail = {"trial": number, "change": event.change, "user": event.user}
    ctx.announce("sweep.changed", job, detail)
