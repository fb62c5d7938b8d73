"""Dispatch of nodes' reports about workers, and the handlers of common reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from controlplane.core.handler_context import HandlerContext, place
from controlplane.core.handlers import (
    epochs,
    exits,
    lifecycle,
    recovery,
    rescale,
    start,
    sweep_units,
)
from controlplane.core.history import ProcessStarted
from controlplane.core.inputs import NodeReported
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Rescaling, Running, Starting
from controlplane.core.model.node import Node
from controlplane.core.model.report_bounds import clamp_numbers
from controlplane.core.model.rescale import RescalePhase, RescaleTrigger
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger, data_problem
from schemas.ids import WorkerId, node_of, worker_id
from schemas.nodes import ResumePoint
from schemas.sweeps import printable
from schemas.wire.agent import (
    SUSPEND,
    EpochReported,
    GroupBroken,
    GroupFormed,
    JobCleared,
    JoinFailed,
    NodeHealth,
    NodeNoticed,
    Quiesced,
    ScriptFailed,
    ScriptReport,
    SlotAwaited,
    StoreOpened,
    Suspended,
    SweepWorkerReady,
    TrainingFinished,
    UnitEnded,
    UnitFailed,
    UnitStarted,
    WorkerEvent,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerStarted,
)
from schemas.wire.feed import Detail
from schemas.wire.sweeps import StateCopied, StateNotCopied


def on_suspended(ctx: HandlerContext, job: Job, worker: Worker, event: Suspended) -> None:
    """Pause a job after its state was saved in a checkpoint. All its workers are about to exit."""
    status = job.status
    if not isinstance(status, Rescaling) or event.group != status.change.group.version:
        return
    change = status.change
    if change.kind != SUSPEND or change.phase is not RescalePhase.SWITCHING:
        ctx.ignore(job, worker, "suspended")
        return
    progress = job.progress
    if job.sweep is None:  # a sweep keeps its own states
        progress.checkpoint = ResumePoint(epoch=event.epoch, version=event.group)
        progress.epoch, progress.step = event.epoch, event.step
        progress.samples_done = event.samples_done
    where = f"at step {event.step}" if job.sweep is None else "its workers stop their units"
    lifecycle.suspended(ctx, job, status, f"{change.reason}, {where}", {"epoch": event.epoch})


ACTIVE_PHASES: Final = frozenset({WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.RETIRING})


def on_node_reported(ctx: HandlerContext, event: NodeReported) -> None:
    """Handle the next event of a node's stream.

    Events of another boot and events that were handled before are ignored.
    """
    node = ctx.state.nodes.get(event.node)
    if node is None or node.boot != event.boot or event.seq <= node.committed:
        return
    node.committed = event.seq
    report = event.event
    if isinstance(report, NodeHealth):
        lifecycle.record_problems(ctx, node, report.problems)
        return
    if isinstance(report, NodeNoticed):
        lifecycle.take_notice(ctx, node, report)
        return
    job = ctx.state.jobs.get(report.job)
    if isinstance(report, WorkerEvent) and job is not None and report.journal != job.journal:
        job = None  # another job with the same name
    if isinstance(report, JobCleared):
        _release_foreign(ctx, node, _cleared(node, report))
        if job is not None:
            exits.on_job_cleared(ctx, job, node, report)
    elif isinstance(report, StateCopied | StateNotCopied):
        if job is not None:
            sweep_units.on_state_report(ctx, job, node, report)
    else:
        _handle_worker_report(ctx, node, job, report)


def _handle_worker_report(
    ctx: HandlerContext, node: Node, job: Job | None, report: WorkerEvent
) -> None:
    """Handle a report about one worker. Ignore a report about a worker on another node.

    For an unknown worker, only exits, refusals and finished epochs are handled.
    """
    name = worker_id(report.job, report.version, report.rank)
    worker = job.workers.get(name) if job is not None else None
    if job is None or worker is None:
        if isinstance(report, WorkerExited | WorkerRefused):
            _release_foreign(ctx, node, {name})
        elif (
            job is not None
            and isinstance(report, EpochReported)
            and _may_be_late(job, node, report)
        ):
            epochs.on_epoch_reported(ctx, job, report, by_member=False)
    elif node_of(worker.slot) == node.node and _is_new(worker, report):
        active = worker.phase in ACTIVE_PHASES and job.group is not None
        if isinstance(report, EpochReported):
            epochs.on_epoch_reported(ctx, job, report, by_member=active)
        elif active or type(report) not in MEMBER_REPORTS:
            ctx.changed_jobs[job.job] = None
            HANDLERS[type(report)](ctx, job, worker, report)


def _may_be_late(job: Job, node: Node, report: EpochReported) -> bool:
    """Return whether a worker that the state no longer has may have finished this epoch."""
    known = report.version <= job.version and report.group <= job.version
    return known and node.node in job.nodes


def _is_new(worker: Worker, report: WorkerEvent) -> bool:
    """Return True unless the report is a repetition. Record the report as handled."""
    if not isinstance(report, ScriptReport):
        return True
    new = report.index > worker.reports
    worker.reports = max(worker.reports, report.index)
    return new


def _cleared(node: Node, event: JobCleared) -> set[WorkerId]:
    """Return the foreign workers of a job that the node has no longer."""
    gone = set()
    for name in node.foreign_workers.values():
        job, _, place = name.rpartition(".v")
        if job == event.job and int(place.partition(".r")[0]) < event.version:
            gone.add(name)
    return gone


def _release_foreign(ctx: HandlerContext, node: Node, gone: set[WorkerId]) -> None:
    if gone.isdisjoint(node.foreign_workers.values()):
        return
    slots = list(node.foreign_workers)
    node.foreign_workers = {
        slot: name for slot, name in node.foreign_workers.items() if name not in gone
    }
    ctx.state.slot_index.touch_node(node.node)
    for slot in slots:
        exits.grant_reserved_slot(ctx, slot)
    ctx.plan_needed = True


def on_worker_started(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerStarted) -> None:
    """Record that the process of a worker has started."""
    record_process(ctx, job, worker, event.pid)


def record_process(ctx: HandlerContext, job: Job, worker: Worker, pid: int) -> None:
    """Record that a worker's process exists, unless it is already recorded."""
    if worker.pid is None:
        worker.pid = pid
        where = node_of(worker.slot)
        ctx.records.append(ProcessStarted(job=job.job, worker=worker.worker, node=where))
        ctx.advance_worker(job, worker, WorkerTrigger.STARTED)
        ctx.announce("worker.started", job, {**place(worker), "pid": pid})


def on_worker_ready(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerReady) -> None:
    """Record that a worker is ready. If all workers are, order the group to form or to switch."""
    if worker.phase is WorkerPhase.ORDERED:
        ctx.advance_worker(job, worker, WorkerTrigger.STARTED)
    if not ctx.advance_reported(job, worker, WorkerTrigger.READY) or job.group is None:
        return
    worker.store_port, worker.data_digest = event.store_port, printable(event.data_digest)
    first = isinstance(job.status, Starting) and worker.rank == 0  # the others copy its state
    elastic = job.sweep is None and not job.spec.rigid  # a sweep gets these numbers from units
    if elastic and first:
        job.progress.epoch_samples = event.epoch_samples
        epochs.on_resumed(ctx, job, event.resumed_epoch)
    detail: Detail = place(worker)
    if (imports_s := clamp_numbers(event).imports_s) > 0.0:
        detail["imports_s"] = imports_s
    ctx.announce("worker.ready", job, detail)
    if isinstance(job.status, Starting):
        start.form_when_ready(ctx, job, job.status)
    elif isinstance(job.status, Rescaling):
        incumbent = job.workers[job.status.group.members[0].worker]
        if problem := data_problem(worker, incumbent):
            recovery.abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, problem)
        else:
            rescale.switch_when_prepared(ctx, job, job.status)


def on_slot_awaited(_ctx: HandlerContext, _job: Job, worker: Worker, _: SlotAwaited) -> None:
    """Record that a newcomer is prepared and waits for its slot, as `handlers.plans` describes."""
    worker.awaits_slot = True


def on_group_formed(ctx: HandlerContext, job: Job, worker: Worker, event: GroupFormed) -> None:
    """Record that a worker trains in a group. Recover the job if this group was abandoned."""
    if not ctx.advance_reported(job, worker, WorkerTrigger.FORMED) or job.group is None:
        return
    worker.group_version, worker.group_first_step = event.group, event.step
    status = job.status
    if isinstance(status, Rescaling):
        rescale.on_group_formed(ctx, job, status, event)
    elif isinstance(status, Starting):
        start.on_group_formed(ctx, job, status, event)
    elif event.group > job.group.version:
        recovery.recover(ctx, job, f"a worker switched to the abandoned version {event.group}")


def on_script_failed(_: HandlerContext, job: Job, worker: Worker, event: ScriptFailed) -> None:
    """Record the error of a script. The script's process is about to exit.

    The report is ignored if the worker was ordered to stop.
    """
    if worker.phase is not WorkerPhase.LEAVING and isinstance(
        job.status, Starting | Running | Rescaling
    ):
        where = f" ({event.where})" if event.where else ""
        script = job.status.script
        if script.error:
            return  # later errors of other workers may be consequences
        script.error = f"{event.error}{where}"
        script.refused = event.refused


HANDLERS: Final[Mapping[type, Callable[[HandlerContext, Job, Worker, Any], None]]] = {
    WorkerStarted: on_worker_started,
    WorkerReady: on_worker_ready,
    SlotAwaited: on_slot_awaited,
    StoreOpened: rescale.on_store_opened,
    GroupFormed: on_group_formed,
    JoinFailed: recovery.on_join_failed,
    GroupBroken: recovery.on_group_broken,
    Quiesced: recovery.on_quiesced,
    Suspended: on_suspended,
    TrainingFinished: epochs.on_training_finished,
    SweepWorkerReady: sweep_units.on_sweep_worker_ready,
    UnitStarted: sweep_units.on_unit_started,
    UnitEnded: sweep_units.on_unit_ended,
    UnitFailed: sweep_units.on_unit_failed,
    ScriptFailed: on_script_failed,
    WorkerExited: exits.on_worker_exited,
    WorkerRefused: exits.on_worker_refused,
}
MEMBER_REPORTS: Final = frozenset(  # reports that are ignored unless the worker may train
    {JoinFailed, GroupBroken, Quiesced, Suspended, TrainingFinished}
)
