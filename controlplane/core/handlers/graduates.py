"""Trials that leave their sweep: each is a job of its own, whose epochs the sweep still counts."""

from __future__ import annotations

from typing import Final

from controlplane.core.desired_sweep import sources
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.new_jobs import accept
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep
from controlplane.sweeps.orders import Graduate
from schemas.jobs import KEEP, SWEEP_SCRIPT, JobSpec, StopRule
from schemas.messages.agent import EpochReported
from schemas.messages.feed import Detail
from schemas.sweeps import SweepSpec, TrialSpec

LONGEST_STEM: Final = 38  # of a name: `-tN` follows


def submit(ctx: HandlerContext, job: Job, sweep: JobSweep, order: Graduate) -> None:
    """A trial goes on as a job, of the same user and from the same snapshot.

    Args:
        order: the trial and the state that it goes on from.
    """
    spec = job.spec.stated_sweep
    if spec is None or spec.graduate_batch is None:
        return
    having = tuple(one.address for one in sources(ctx.state, job, sweep, order.state))
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
        sources=having,
    )
    new = accept(ctx, _spec_of(job.spec, spec, trial), job.snapshot, job.user, job.project)
    why = f"goes on as job {new.job}, from epoch {order.epochs}"
    ctx.totals.sweep(job.job).trial_ended(order.trial, why)
    detail: Detail = {"trial": order.trial, "how": "graduated", "reason": why, "as": new.job}
    ctx.announce("sweep.trial_ended", job, detail)


def _spec_of(spec: JobSpec, sweep: SweepSpec, trial: TrialSpec) -> JobSpec:
    batch = sweep.graduate_batch or 1
    return JobSpec(
        name=f"{spec.name[:LONGEST_STEM]}-t{trial.trial}",
        script=SWEEP_SCRIPT,
        batch_size=batch,
        max_batch_size=KEEP,
        slots=(1, min(spec.slots[1], batch)),
        python=spec.python,
        stop=StopRule(epochs=trial.epochs - trial.epochs_done),
        priority=spec.priority,
        retries=spec.retries,
        env=spec.env,
        trial=trial,
    )


def epoch_reported(ctx: HandlerContext, job: Job, event: EpochReported) -> None:
    """A job that was a trial finished an epoch: its sweep has the score, even if it has ended.

    Args:
        job: nothing happens if it is no such job.
    """
    trial = job.spec.stated_trial
    former = ctx.state.jobs.get(trial.sweep) if trial is not None else None
    if trial is None or former is None or former.sweep is None:
        return
    metrics = metrics_of(event)
    former.sweep.engine.graduate_ended_epoch(trial.trial, metrics)
    ctx.totals.sweep(former.job).epoch_ended(trial.trial, metrics, ctx.now)


def metrics_of(event: EpochReported) -> dict[str, float]:
    """What the trial's functions returned: `loss` travels as the training loss of jobs."""
    loss = {} if event.train_loss is None else {"loss": event.train_loss}
    return {**loss, **event.metrics}
