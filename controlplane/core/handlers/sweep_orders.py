"""What a sweep orders is written down, announced, and sent to its nodes."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.core.desired_sweep import desired_sweep, unit_order
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import graduates
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep, PlacedUnit
from controlplane.core.model.node import NodePhase
from controlplane.sweeps.orders import (
    CopyState,
    DataRefused,
    DropState,
    Graduate,
    Order,
    ReleaseWorker,
    RunUnit,
    StateDiffers,
    StopUnit,
    TrialEnded,
    TrialScored,
)
from controlplane.sweeps.trials import best
from schemas.messages.feed import Detail
from schemas.messages.hopping import SweepDelta


def carry_out(ctx: HandlerContext, job: Job, sweep: JobSweep, orders: Iterable[Order]) -> None:
    """Write down what the sweep ordered; nodes are told at the end of the input.

    Args:
        orders: in their order.
    """
    engine = sweep.engine.state
    ctx.changed_jobs[job.job] = None
    for order in orders:
        match order:
            case RunUnit(worker=worker):
                node = engine.workers[worker].node
                told = unit_order(ctx.state, job, sweep, order)
                sweep.units[worker] = PlacedUnit(node=node, order=told)
                sweep.stale[node] = None
            case StopUnit(worker=worker):
                sweep.stopping[worker] = None
            case CopyState(target=node) | DropState(node=node):
                sweep.stale[node] = None
            case TrialScored():
                _scored(ctx, job, sweep, order)
            case TrialEnded():
                _ended(ctx, job, sweep, order)
            case StateDiffers(state=name):
                detail: Detail = {"trial": name.trial, "version": name.version}
                ctx.announce("sweep.state_differs", job, detail)
            case DataRefused(node=node, partition=partition, why=why):
                refused: Detail = {"node": node, "partition": partition, "reason": why}
                ctx.announce("sweep.data_refused", job, refused)
            case Graduate():
                graduates.submit(ctx, job, sweep, order)
            case ReleaseWorker():
                pass  # it leaves by itself, or is killed
    for worker, unit in list(sweep.units.items()):
        if unit.order.attempt not in engine.leases:
            del sweep.units[worker]
            sweep.stale[unit.node] = None


def _scored(ctx: HandlerContext, job: Job, sweep: JobSweep, order: TrialScored) -> None:
    ctx.totals.sweep(job.job).epoch_ended(order.trial, order.metrics, ctx.now)
    detail: Detail = {**order.metrics, "trial": order.trial, "epoch": order.epoch}
    ctx.announce("sweep.trial_scored", job, detail)
    score = best_score(sweep)
    if score is not None:
        job.progress.metrics = {sweep.engine.state.spec.metric: score}


def best_score(sweep: JobSweep) -> float | None:
    """The best that any trial reached, as it was reported."""
    state = sweep.engine.state
    counted = [trial for trial in state.trials if trial.number not in state.deleted]
    scores = [max(trial.scores) for trial in counted if trial.scores]
    if not scores:
        return None
    return max(scores) if state.spec.mode == "max" else -max(scores)


def best_trial(sweep: JobSweep) -> int | None:
    """The trial that reached it; None: nobody has a score."""
    state = sweep.engine.state
    found = best(trial for trial in state.trials if trial.number not in state.deleted)
    return None if found is None else found[0]


def _ended(ctx: HandlerContext, job: Job, sweep: JobSweep, order: TrialEnded) -> None:
    ctx.totals.sweep(job.job).trial_ended(order.trial, order.why)
    if order.how == "failed":
        sweep.first_failure = sweep.first_failure or f"trial {order.trial}: {order.why}"
    if not job.ended:
        detail: Detail = {"trial": order.trial, "how": order.how, "reason": order.why}
        ctx.announce("sweep.trial_ended", job, detail)


def send_stale(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    """Tell nodes what changed for them; a lost one hears of it when it greets."""
    for node in sweep.stale:
        known = ctx.state.nodes.get(node)
        sweep.told[node] = None
        if known is not None and known.phase is not NodePhase.LOST:
            sweep.revision += 1
            delta: SweepDelta = desired_sweep(ctx.state, job, sweep, node)
            ctx.send_sweep(node, delta)
    sweep.stale = {}
