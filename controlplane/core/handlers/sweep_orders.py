"""Functions that record and announce the orders of a sweep, and send them to its nodes.

A trial that graduates becomes a separate job. Its epochs are still recorded as the sweep's scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from controlplane.core.desired_state import desired_sweep, sources, unit_order
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import accept
from controlplane.core.model.job import Job
from controlplane.core.model.node import NodePhase
from controlplane.core.model.sweep import JobSweep, PlacedUnit
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
from schemas.jobs import KEEP, SWEEP_SCRIPT, JobSpec, StopRule
from schemas.sweeps import SweepSpec, TrialSpec
from schemas.wire.agent import EpochReported
from schemas.wire.feed import Detail
from schemas.wire.sweeps import SweepDelta

MAX_STEM_CHARACTERS: Final = 38  # characters of a job's name before `-tN`


def submit_trial(ctx: HandlerContext, job: Job, sweep: JobSweep, order: Graduate) -> None:
    """Submit a graduated trial as a new job with the user and the snapshot of the sweep's job."""
    spec = job.spec.stated_sweep
    if spec is None or spec.graduate_batch is None:
        return
    addresses = tuple(one.address for one in sources(ctx.state, job, sweep, order.state))
    trial = TrialSpec(
        sweep=job.job,
        trial=order.trial,
        values=dict(order.values),
        functions=spec.functions,
        partitions=spec.partitions,
        seed=spec.search.seed,
        epochs=spec.search.epochs,
        epochs_done=order.epochs,
        version=order.state.version,
        digest=order.digest,
        sources=addresses,
    )
    new = accept(ctx, _spec_of(job.spec, spec, trial), job.snapshot, job.user, job.project)
    why = f"continues as job {new.job} from epoch {order.epochs}"
    ctx.totals.sweep(job.job).trial_ended(order.trial, why, graduated_as=new.job)
    detail: Detail = {
        "trial": order.trial,
        "how": "graduated",
        "reason": why,
        "graduated_as": new.job,
    }
    ctx.announce("sweep.trial_ended", job, detail)


def _spec_of(spec: JobSpec, sweep: SweepSpec, trial: TrialSpec) -> JobSpec:
    batch = sweep.graduate_batch or 1
    return JobSpec(
        name=f"{spec.name[:MAX_STEM_CHARACTERS]}-t{trial.trial}",
        script=SWEEP_SCRIPT,
        batch_size=batch,
        max_batch_size=KEEP,
        slots=(1, min(spec.slots[1], batch)),
        python=spec.python,
        requirements=spec.requirements,
        image=spec.image,
        stop=StopRule(epochs=trial.epochs - trial.epochs_done),
        priority=spec.priority,
        retries=spec.retries,
        job_class=spec.job_class,
        env=spec.env,
        secret_env=spec.secret_env,
        trial=trial,
    )


def epoch_reported(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """Record an epoch of a graduated trial as a score of its sweep, even if the sweep has ended.

    Jobs that are not graduated trials are left alone.
    """
    trial = job.spec.stated_trial
    former = ctx.state.jobs.get(trial.sweep) if trial is not None else None
    if trial is None or former is None or former.sweep is None:
        return
    metrics = metrics_of(event)
    former.sweep.engine.graduate_ended_epoch(trial.trial, metrics)
    ctx.totals.sweep(former.job).epoch_ended(trial.trial, metrics, ctx.now)


def metrics_of(event: EpochReported) -> dict[str, float]:
    """Return the metrics of the trial's functions. `loss` is by default the job's training loss."""
    facts = event.facts
    loss = {} if facts.train_loss is None else {"loss": facts.train_loss}
    return {**loss, **facts.metrics}


def carry_out(ctx: HandlerContext, job: Job, sweep: JobSweep, orders: Iterable[Order]) -> None:
    """Apply the orders of a sweep to the state. The nodes are notified at the end of the input."""
    engine = sweep.engine.state
    ctx.changed_jobs[job.job] = None
    for order in orders:
        match order:
            case RunUnit(worker=worker):
                node = engine.workers[worker].node
                message = unit_order(ctx.state, job, sweep, order)
                sweep.units[worker] = PlacedUnit(node=node, order=message)
                sweep.stale_nodes[node] = None
            case StopUnit(worker=worker):
                sweep.stopping[worker] = None
            case CopyState(target=node) | DropState(node=node):
                sweep.stale_nodes[node] = None
            case TrialScored():
                _record_score(ctx, job, sweep, order)
            case TrialEnded():
                _record_trial_end(ctx, job, sweep, order)
            case StateDiffers(state=name):
                detail: Detail = {"trial": name.trial, "version": name.version}
                ctx.announce("sweep.state_differs", job, detail)
            case DataRefused(node=node, partition=partition, reason=why):
                refused: Detail = {"node": node, "partition": partition, "reason": why}
                ctx.announce("sweep.data_refused", job, refused)
            case Graduate():
                submit_trial(ctx, job, sweep, order)
            case ReleaseWorker():
                pass  # the worker exits by itself, or is killed
    for worker, unit in list(sweep.units.items()):
        if unit.order.attempt not in engine.leases:
            del sweep.units[worker]
            sweep.stale_nodes[unit.node] = None


def _record_score(ctx: HandlerContext, job: Job, sweep: JobSweep, order: TrialScored) -> None:
    ctx.totals.sweep(job.job).epoch_ended(order.trial, order.metrics, ctx.now)
    detail: Detail = {**order.metrics, "trial": order.trial, "epoch": order.epoch}
    ctx.announce("sweep.trial_scored", job, detail)
    score = best_score(sweep)
    if score is not None:
        job.progress.metrics = {sweep.engine.state.spec.metric: score}


def best_score(sweep: JobSweep) -> float | None:
    """Return the best value of the sweep's metric, as reported, or None if no trial has a score.

    Deleted trials are left out.
    """
    state = sweep.engine.state
    counted = [trial for trial in state.trials if trial.number not in state.deleted]
    scores = [max(trial.scores) for trial in counted if trial.scores]
    if not scores:
        return None
    return max(scores) if state.spec.mode == "max" else -max(scores)


def best_trial(sweep: JobSweep) -> int | None:
    """Return the number of the trial with the best score, or None if no trial has a score.

    Deleted trials are left out.
    """
    state = sweep.engine.state
    found = best(trial for trial in state.trials if trial.number not in state.deleted)
    return None if found is None else found[0]


def _record_trial_end(ctx: HandlerContext, job: Job, sweep: JobSweep, order: TrialEnded) -> None:
    ctx.totals.sweep(job.job).trial_ended(order.trial, order.reason)
    if order.how == "failed":
        sweep.first_failure = sweep.first_failure or f"trial {order.trial}: {order.reason}"
    if not job.ended:
        detail: Detail = {"trial": order.trial, "how": order.how, "reason": order.reason}
        ctx.announce("sweep.trial_ended", job, detail)


def send_stale(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    """Send a delta to each node that needs one. A lost node gets its delta when it greets."""
    for node in sweep.stale_nodes:
        known = ctx.state.nodes.get(node)
        sweep.notified_nodes[node] = None
        if known is not None and known.phase is not NodePhase.LOST:
            sweep.revision += 1
            delta: SweepDelta = desired_sweep(ctx.state, job, sweep, node)
            ctx.send_sweep(node, delta)
    sweep.stale_nodes = {}
