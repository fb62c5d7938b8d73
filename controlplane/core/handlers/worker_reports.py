"""What nodes report of workers: each report goes to the one handler of its subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from controlplane.core.handler_context import HandlerContext, place
from controlplane.core.handlers import (
    group_recovery,
    group_rescale,
    group_start,
    late_epochs,
    node_health,
    suspend,
    sweep_units,
    training_epochs,
    worker_exits,
)
from controlplane.core.history_records import ProcessStarted
from controlplane.core.inputs import NodeReported
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import Rescaling, Running, Starting
from controlplane.core.model.node import Node
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from schemas.ids import WorkerId, node_of, worker_id
from schemas.messages.agent import (
    EpochReported,
    GroupBroken,
    GroupFormed,
    HopperOpened,
    JobCleared,
    JoinFailed,
    NodeHealth,
    Quiesced,
    ScriptFailed,
    ScriptReport,
    SlotAwaited,
    StoreOpened,
    Suspended,
    TrainingFinished,
    UnitBegun,
    UnitEnded,
    UnitFailed,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerStarted,
)
from schemas.messages.hopping import StateCopied, StateNotCopied

SPEAKING: Final = frozenset({WorkerPhase.READY, WorkerPhase.MEMBER, WorkerPhase.RETIRING})


def on_node_reported(ctx: HandlerContext, event: NodeReported) -> None:
    """The next event of a node's stream; one that was taken before changes nothing.

    Args:
        event: the node, its boot, the sequence number and the report. One of another boot, or one
            that was taken before, is not handled; of an unknown process only its end counts.
    """
    node = ctx.state.nodes.get(event.node)
    if node is None or node.boot != event.boot or event.seq <= node.committed:
        return
    node.committed = event.seq
    report = event.event
    if isinstance(report, NodeHealth):
        node_health.note_problems(ctx, node, report.problems)
        return
    job = ctx.state.jobs.get(report.job)
    if isinstance(report, JobCleared):
        if job is not None:
            worker_exits.on_job_cleared(ctx, job, node, report)
        return
    if isinstance(report, StateCopied | StateNotCopied):
        if job is not None:
            sweep_units.on_state_report(ctx, job, node, report)
        return
    name = worker_id(report.job, report.version, report.rank)
    worker = job.workers.get(name) if job else None
    if job is None or worker is None:
        if isinstance(report, WorkerExited | WorkerRefused):
            _forget_foreign(ctx, node, name)
        if job is not None and isinstance(report, EpochReported) and node.node in job.nodes:
            late_epochs.on_late_epoch(ctx, job, report)
        return
    if node_of(worker.slot) != node.node:
        return  # a node speaks for its own workers only
    if isinstance(report, ScriptReport):
        if report.index <= worker.reports:
            return
        worker.reports = report.index
    kind = type(report)
    unheard = isinstance(report, EpochReported) and report.epoch in job.progress.unheard
    silent = worker.phase not in SPEAKING or job.group is None
    if unheard or (kind in FROM_MEMBERS and silent):
        if isinstance(report, EpochReported):
            late_epochs.on_late_epoch(ctx, job, report)
        return
    ctx.changed_jobs[job.job] = None
    HANDLERS[kind](ctx, job, worker, report)


def _forget_foreign(ctx: HandlerContext, node: Node, name: WorkerId) -> None:
    """A process of an unknown job has exited: its slots may be used."""
    if name not in node.foreign.values():
        return
    was = list(node.foreign)
    node.foreign = {slot: other for slot, other in node.foreign.items() if other != name}
    ctx.state.slot_index.touch_node(node.node)
    for slot in was:
        worker_exits.slot_freed(ctx, slot)
    ctx.ask = True


def on_worker_started(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerStarted) -> None:
    """A process exists.

    Args:
        worker: that was ordered.
    """
    note_process(ctx, job, worker, event.pid)


def note_process(ctx: HandlerContext, job: Job, worker: Worker, pid: int) -> None:
    """Take down that a worker's process was seen, if that is news.

    Args:
        worker: that was ordered.
    """
    if worker.pid is None:
        worker.pid = pid
        where = node_of(worker.slot)
        ctx.records.append(ProcessStarted(job=job.job, worker=worker.worker, node=where))
        ctx.advance_worker(job, worker, WorkerTrigger.STARTED)
        ctx.announce("worker.started", job, {**place(worker), "pid": pid})


def on_worker_ready(ctx: HandlerContext, job: Job, worker: Worker, event: WorkerReady) -> None:
    """A worker has built everything and waits for its group.

    Args:
        job: of the worker; it may form its group or switch to it now.
        event: the samples of an epoch, and the port of the store that it would serve.
    """
    if worker.phase is WorkerPhase.ORDERED:
        ctx.advance_worker(job, worker, WorkerTrigger.STARTED)
    if not ctx.hear_worker(job, worker, WorkerTrigger.READY) or job.group is None:
        return
    worker.store_port = event.store_port
    if job.sweep is None:  # whose units tell
        job.progress.epoch_samples = event.epoch_samples
        if isinstance(job.status, Starting) and worker.rank == 0:  # the others take its state
            late_epochs.on_resumed(ctx, job, event.resumed_epoch)
    ctx.announce("worker.ready", job, place(worker))
    if isinstance(job.status, Starting):
        group_start.form_when_ready(ctx, job, job.status)
    elif isinstance(job.status, Rescaling):
        group_rescale.switch_when_prepared(ctx, job, job.status)


def on_slot_awaited(_ctx: HandlerContext, _job: Job, worker: Worker, _: SlotAwaited) -> None:
    """A newcomer beside a slot's owner has built what it can; see `handlers.swaps`."""
    worker.waits = True


def on_group_formed(ctx: HandlerContext, job: Job, worker: Worker, event: GroupFormed) -> None:
    """A worker takes its steps in a group.

    Args:
        job: of the worker. It recovers if the group is one that was abandoned.
        event: the version of the group, and the step that it begins at.
    """
    if not ctx.hear_worker(job, worker, WorkerTrigger.FORMED) or job.group is None:
        return
    worker.formed, worker.formed_step = event.group, event.step
    status = job.status
    if isinstance(status, Rescaling):
        group_rescale.on_group_formed(ctx, job, status, event)
    elif isinstance(status, Starting):
        group_start.on_group_formed(ctx, job, status, event)
    elif event.group > job.group.version:
        group_recovery.recover(ctx, job, f"a worker went on to the abandoned version {event.group}")


def on_script_failed(ctx: HandlerContext, job: Job, worker: Worker, event: ScriptFailed) -> None:
    """The script raised; its process is about to exit.

    Args:
        job: remembers the error, to say it when the process has ended.
        worker: one that was ordered to stop is not blamed.
        event: the error in words, and where in the script it was.
    """
    if worker.phase is not WorkerPhase.LEAVING and isinstance(
        job.status, Starting | Running | Rescaling
    ):
        where = f" ({event.where})" if event.where else ""
        script = job.status.script
        if script.error and ctx.state.rules:
            return  # what other workers raise later may be a consequence
        script.error = f"{event.error}{where}"
        script.refused = event.refused


HANDLERS: Final[Mapping[type, Callable[[HandlerContext, Job, Worker, Any], None]]] = {
    WorkerStarted: on_worker_started,
    WorkerReady: on_worker_ready,
    SlotAwaited: on_slot_awaited,
    StoreOpened: group_rescale.on_store_opened,
    GroupFormed: on_group_formed,
    JoinFailed: group_recovery.on_join_failed,
    GroupBroken: group_recovery.on_group_broken,
    Quiesced: group_recovery.on_quiesced,
    Suspended: suspend.on_suspended,
    EpochReported: training_epochs.on_epoch_reported,
    TrainingFinished: training_epochs.on_training_finished,
    HopperOpened: sweep_units.on_hopper_opened,
    UnitBegun: sweep_units.on_unit_begun,
    UnitEnded: sweep_units.on_unit_ended,
    UnitFailed: sweep_units.on_unit_failed,
    ScriptFailed: on_script_failed,
    WorkerExited: worker_exits.on_worker_exited,
    WorkerRefused: worker_exits.on_worker_refused,
}
FROM_MEMBERS: Final = frozenset(  # what counts only of a worker that may train
    {JoinFailed, GroupBroken, Quiesced, Suspended, EpochReported, TrainingFinished}
)
