"""Handlers of reports about a sweep's units and states, and the epochs of a sweep.

Policies measure a job's speed by its epochs, and move a job after an epoch. An epoch of a sweep
ends after as many units as there are partitions, whichever trials these units train. Units do not
wait for each other, so the speed of a sweep is the speed of a unit times the number of workers.
"""

from __future__ import annotations

from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.sweep_orders import carry_out
from controlplane.core.history import EpochFinished
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Running
from controlplane.core.model.node import Node
from controlplane.core.model.report_bounds import clamp_unit_ended, clamp_unit_started
from controlplane.core.model.sweep import JobSweep
from controlplane.core.model.worker import Worker
from controlplane.sweeps.orders import Attempt, StateName, UnitReport
from controlplane.sweeps.sweep_state import Lease
from controlplane.sweeps.trial_changes import Fault
from schemas.ids import node_of
from schemas.sweeps import printable
from schemas.wire.agent import SweepWorkerReady, UnitEnded, UnitFailed, UnitStarted
from schemas.wire.client import EpochInfo, LedgerUnit
from schemas.wire.feed import Detail
from schemas.wire.sweeps import StateCopied, StateNotCopied


def count_unit(ctx: HandlerContext, job: Job, sweep: JobSweep, samples: int, took_s: float) -> None:
    """Add a unit that finished for the first time to the job's progress.

    If the unit completes an epoch of the sweep, announce the epoch. `took_s` is the time in user
    code.
    """
    progress, group = job.progress, job.group
    sweep.units_done += 1
    progress.samples_done += samples
    sweep.epoch_samples += samples
    sweep.epoch_s += took_s
    if group is None or group.version != sweep.epoch_group or not isinstance(job.status, Running):
        sweep.epoch_group = None
    if sweep.units_done % sweep.engine.state.partitions:
        return
    whole, workers = sweep.epoch_group is not None, len(sweep.engine.state.workers)
    if sweep.epoch_s > 0.0:
        progress.samples_per_s = sweep.epoch_samples / sweep.epoch_s * workers
    sweep.epoch_samples, sweep.epoch_s = 0, 0.0
    sweep.epoch_group = group.version if group is not None else None
    progress.epoch += 1
    progress.epoch_at = ctx.now
    if group is not None:
        _announce(ctx, job, whole=whole)


def _announce(ctx: HandlerContext, job: Job, *, whole: bool) -> None:
    progress, group = job.progress, job.group
    if group is None:
        return
    slots = [member.slot for member in group.members]
    info = EpochInfo(
        epoch=progress.epoch,
        time=ctx.now,
        step=0,
        global_batch=group.global_batch,
        lr=0.0,
        samples_per_s=progress.samples_per_s,
        train_loss=None,
        metrics=dict(progress.metrics),
        slots=len(slots),
        nodes=len({node_of(slot) for slot in slots}),
        whole=whole,
        samples_done=progress.samples_done,
        epoch_samples=progress.epoch_samples,
    )
    ctx.records.append(EpochFinished(job=job.job, epoch=info))
    detail: Detail = {
        **progress.metrics,
        "epoch": progress.epoch,
        "samples_per_s": progress.samples_per_s,
        "global_batch": group.global_batch,
    }
    ctx.announce("job.epoch", job, detail)
    ctx.plan_needed = True


MAX_REASON_CHARACTERS: Final = 2000  # longest reason of a failed unit
FAULTS: dict[str, Fault] = {"trial": "trial", "state": "state", "data": "data", "disk": "disk"}


def on_sweep_worker_ready(
    _: HandlerContext, job: Job, worker: Worker, event: SweepWorkerReady
) -> None:
    """Record the address of a worker, which takes units once it is a member of its group."""
    if job.sweep is not None:
        job.sweep.addresses[worker.worker] = event.address


def on_unit_started(ctx: HandlerContext, job: Job, worker: Worker, event: UnitStarted) -> None:
    """Handle the start of a unit. The unit's worker has received the state and the data."""
    sweep, event = job.sweep, clamp_unit_started(event)
    lease = _lease(sweep, worker, event.attempt)
    if sweep is None or lease is None:
        return
    name = lease.order.state
    if name is not None:
        own = sweep.newest_in_memory.get(name.trial) == (name.version, worker.worker)
        history = ctx.totals.sweep(job.job)
        history.unit_begun(name.trial, event.waited_s, hops=not own)
    attempt = Attempt(event.attempt)
    carry_out(ctx, job, sweep, sweep.engine.unit_begun(attempt, event.samples, ctx.now))
    progress = job.progress
    progress.epoch_samples = round(sweep.unit_samples * sweep.engine.state.partitions)


def on_unit_ended(ctx: HandlerContext, job: Job, worker: Worker, event: UnitEnded) -> None:
    """Handle a finished unit. The resulting state is on the disk of the unit's node.

    If the sweep has given up the attempt, the report only keeps the worker from being killed.
    """
    sweep, event = job.sweep, clamp_unit_ended(event)
    if sweep is None:
        return
    lease = _lease(sweep, worker, event.attempt)
    if lease is None:
        sweep.stopping.pop(worker.worker, None)
        return
    sweep.stale_nodes[node_of(worker.slot)] = None
    if not lease.ignored:
        _add_to_ledger(ctx, job, worker, lease, event)
        _count(ctx, job, sweep, lease, event)
    report = UnitReport(event.metrics, event.samples, event.seconds, event.scores, event.digest)
    orders = sweep.engine.unit_done(Attempt(event.attempt), report, ctx.now)
    carry_out(ctx, job, sweep, orders)


def _add_to_ledger(
    ctx: HandlerContext, job: Job, worker: Worker, lease: Lease, event: UnitEnded
) -> None:
    """Add a finished unit to the ledger. Call this before `unit_done`."""
    order = lease.order
    unit = LedgerUnit(
        trial=lease.trial,
        values_of=order.trial,
        version=order.result.version,
        epoch=order.epoch,
        partition=order.partition,
        digest=event.digest,
        node=node_of(worker.slot),
        slot=worker.slot,
        ended=ctx.now,
        seconds=event.seconds,
        metrics=event.metrics,
        samples=event.samples,
    )
    ctx.totals.sweep(job.job).unit_ended(unit, event.size, again=lease.again)


def _count(ctx: HandlerContext, job: Job, sweep: JobSweep, lease: Lease, event: UnitEnded) -> None:
    """Add the results of a finished unit to the job. Call this before `unit_done`."""
    order = lease.order
    sweep.newest_in_memory[lease.trial] = (order.result.version, order.worker)
    job.attempts.losses, job.attempts.changes, job.attempts.recoveries = 0, 0, 0
    if lease.again:
        return
    count_unit(ctx, job, sweep, event.samples, event.seconds)


def on_unit_failed(ctx: HandlerContext, job: Job, worker: Worker, event: UnitFailed) -> None:
    """Handle a failed unit. The worker stays and takes another unit."""
    sweep = job.sweep
    if sweep is None:
        return
    if _lease(sweep, worker, event.attempt) is None:
        sweep.stopping.pop(worker.worker, None)
        return
    sweep.stale_nodes[node_of(worker.slot)] = None
    fault, why = FAULTS.get(event.fault, "trial"), printable(event.reason)[:MAX_REASON_CHARACTERS]
    detail: Detail = {
        "attempt": event.attempt,
        "fault": fault,
        "reason": why,
        "slot": worker.slot,
    }
    ctx.announce("sweep.unit_failed", job, detail)
    orders = sweep.engine.unit_failed(Attempt(event.attempt), why, fault, ctx.now)
    carry_out(ctx, job, sweep, orders)


def _lease(sweep: JobSweep | None, worker: Worker, attempt: int) -> Lease | None:
    """Return the lease of an attempt, or None if it has ended or belongs to another worker."""
    lease = sweep.engine.state.leases.get(Attempt(attempt)) if sweep is not None else None
    return lease if lease is not None and lease.order.worker == worker.worker else None


def on_state_report(
    ctx: HandlerContext, job: Job, node: Node, event: StateCopied | StateNotCopied
) -> None:
    """Handle a node's report that it copied a state to its disk, or could not copy it."""
    sweep = job.sweep
    if sweep is None or job.ended:
        return
    engine, name = sweep.engine, StateName(event.trial, event.version)
    ctx.changed_jobs[job.job] = None
    if isinstance(event, StateCopied):
        sweep.stale_nodes |= {node.node: None} if (name, node.node) in engine.state.copying else {}
        carry_out(ctx, job, sweep, engine.state_stored(name, node.node, ctx.now))
        return
    sweep.stale_nodes[node.node] = None
    detail: Detail = {"trial": event.trial, "version": event.version, "reason": event.reason}
    ctx.announce("sweep.state_not_copied", job, detail, node)
    carry_out(ctx, job, sweep, engine.state_missing(name, node.node, ctx.now))
