"""Handlers for messages from nodes, for silent nodes, and for the controller's start."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import exits, lifecycle, recovery, sweeps
from controlplane.core.handlers.reports import record_process
from controlplane.core.history import ProcessStarted
from controlplane.core.inputs import (
    CommitsResumed,
    ControllerStarted,
    InputSkipped,
    NodeForgotten,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeSuspected,
)
from controlplane.core.model import node as nodes
from controlplane.core.model.job import Job
from controlplane.core.model.node import Node, NodePhase, NodeTrigger
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from schemas.ids import JobId, Version, node_of, slot_id, stated_number, worker_id
from schemas.wire.agent import WorkerExited, WorkerSeen
from schemas.wire.feed import Detail

FORMER_BOOTS: Final = 8
LOST_VERSIONS: Final = 1000  # maximum number of versions of a job that a journal may have lost
LOST_JOBS: Final = 1_000_000  # numbers of jobs that a hello may skip


def on_controller_started(ctx: HandlerContext, event: ControllerStarted) -> None:
    """Begin the term of a new controller. Every node has to greet this controller again."""
    state = ctx.state
    state.term, state.journal = event.term, event.journal
    state.jobs_accepted = max(state.jobs_accepted, event.jobs)
    state.loss_accepted = event.restored
    if event.restored:
        state.outdated = ""
        for name in state.active:
            job = state.jobs[name]
            job.version_floor = Version(job.version + LOST_VERSIONS)
    ctx.announce("controller.started", detail={"term": event.term, "release": event.release})
    for node in state.nodes.values():
        nodes.advance(node, NodeTrigger.CONTROLLER_STARTED, ctx.now)
    state.slot_index.touch_all()
    state.deadlines.restart(ctx.now)
    sweeps.on_controller_started(ctx)
    ctx.plan_needed = True


def on_node_greeted(ctx: HandlerContext, event: NodeGreeted) -> None:
    """Update a node from its agent's hello, and send the node its desired state.

    A hello from an earlier boot comes from an agent that was replaced and has now returned.
    """
    node = ctx.state.nodes.get(event.node)
    wiped = node is not None and "" != node.run_id != event.run_id != ""
    if node is None:
        node = Node(node=event.node, spec=event.spec, boot=event.boot, since=ctx.now)
        ctx.state.nodes[event.node] = node
        ctx.announce("node.joined", node=node, detail={"slots": len(event.spec.slots)})
    else:
        if node.boot != event.boot:
            former = {**node.former_boots, node.boot: node.committed}
            node.boot, node.committed = event.boot, former.pop(event.boot, 0)
            node.strikes, node.is_suspected = {}, False
            if node.drain is not None and node.drain.noticed:
                lifecycle.end_drain(ctx, node, "restart of its agent")
            node.former_boots = dict(list(former.items())[-FORMER_BOOTS:])
        node.spec = event.spec
        _advance(ctx, node, NodeTrigger.GREETED, "node.up")
    node.run_id = event.run_id or node.run_id
    _compare_with_journal(ctx, node, event)
    lifecycle.record_problems(ctx, node, event.problems)
    sent = _reconcile(ctx, node, event.workers, wiped=wiped)
    sweeps.on_node_greeted(ctx, node.node)
    _send_desired(ctx, node, [name for name in dict.fromkeys(event.jobs) if name not in sent])
    ctx.plan_needed = True


def _compare_with_journal(ctx: HandlerContext, node: Node, event: NodeGreeted) -> None:
    """Refuse new jobs if a node knows inputs that the journal lost, until an admin accepts this.

    Job numbers that the node names are not used again.
    """
    state, accepted, known = ctx.state, ctx.state.jobs_accepted, node.committed
    names = [*(seen.job for seen in event.workers), *event.jobs]
    named = max(map(stated_number, names), default=0)
    highest = max(named, event.highest_job)
    node.committed = max(known, event.events_dropped)
    state.jobs_accepted = max(accepted, min(highest, accepted + LOST_JOBS))
    if event.term > state.term:
        lacks = f"term {event.term}"
    elif event.events_dropped > known:
        lacks = f"its events {known + 1} to {event.events_dropped}"
    elif named > accepted:
        lacks = f"job number {named}"
    else:
        return
    if not (state.loss_accepted or state.outdated):
        state.outdated = f"the journal is older than node {node.node}, and lacks {lacks}"


def _journal_of(state: State, job: JobId) -> str | None:
    """Return the id of the journal in which a job was accepted, or None for an unknown job."""
    known = state.jobs.get(job) or state.left_jobs.get(job)
    return known.journal if known is not None else None


def _reconcile(
    ctx: HandlerContext, node: Node, seen: Iterable[WorkerSeen], *, wiped: bool
) -> Container[JobId]:
    """Compare the workers on a node with the desired ones, and send the node its desired state.

    Return the jobs in the desired state that was sent.
    """
    state = ctx.state
    found_there = {worker_id(s.job, s.version, s.rank): s for s in seen}
    present = {name: s for name, s in found_there.items() if s.journal == _journal_of(state, s.job)}
    ordered = {worker.worker for _, worker in state.slot_index.workers_on(node.node)}
    node.foreign_workers = {
        slot_id(node.node, s.slot): name
        for name, s in found_there.items()
        if not s.ended and not (name in present and name in ordered)
    }
    state.slot_index.touch_node(node.node)
    for slot in [slot_id(node.node, s.index) for s in node.spec.slots]:
        exits.grant_reserved_slot(ctx, slot)
    workers = state.slot_index.workers_on(node.node)
    for job, worker in workers:
        if (found := present.get(worker.worker)) is not None:
            if found.pid is not None:
                record_process(ctx, job, worker, found.pid)
            # The agent reports an exit separately, after the worker's earlier reports.
        else:
            _reconcile_absent(ctx, job, worker, wiped=wiped)
    touched = {s.job: None for s in present.values()} | {job.job: None for job, _ in workers}
    for one in present.values():
        _restart_if_changed(ctx, one)
    _send_desired(ctx, node, touched)
    return touched


def _restart_if_changed(ctx: HandlerContext, seen: WorkerSeen) -> None:
    """Restart a job if a worker belongs to a later group than the journal knows.

    A node is believed only if the journal has lost inputs.
    """
    job = ctx.state.jobs.get(seen.job)
    if job is None or not (ctx.state.outdated or ctx.state.loss_accepted):
        return
    if job.group is not None and seen.version > job.version and not seen.ended:
        reason = "a later change of its group was lost with the journal"
        lifecycle.restart_from_checkpoint(ctx, job, reason)


def _send_desired(ctx: HandlerContext, node: Node, names: Iterable[JobId]) -> None:
    """Send a node its desired state of these jobs: for an ended job, it should run nothing."""
    for name in names:
        if name in ctx.state.jobs:
            ctx.send_to(ctx.state.jobs[name], [node.node])
        elif (left := ctx.state.left_jobs.get(name)) is not None:
            lifecycle.resend_stop(ctx, name, left, node.node)


def _reconcile_absent(ctx: HandlerContext, job: Job, worker: Worker, *, wiped: bool) -> None:
    """Handle a worker that is missing on its node. If the worker had started, it has exited.

    A worker without any report has not started, so its order or its cancellation is sent again. But
    if the node lost its folders, such a worker may have run without a trace, so it is treated as
    exited.
    """
    unreported = worker.phase in {WorkerPhase.ORDERED, WorkerPhase.LEAVING} and worker.pid is None
    if unreported and not wiped:
        return
    if unreported:
        node = node_of(worker.slot)
        lost = ProcessStarted(job=job.job, worker=worker.worker, node=node, confirmed=False)
        ctx.records.append(lost)
    exited = WorkerExited(
        job=job.job, version=worker.version, rank=worker.rank, code=None, signal=None
    )
    exits.on_worker_exited(ctx, job, worker, exited)


def on_node_heard(ctx: HandlerContext, event: NodeHeard) -> None:
    """Mark a suspect node as up, because it sent a message."""
    _advance(ctx, ctx.state.nodes[event.node], NodeTrigger.HEARD, "node.up")
    ctx.plan_needed = True


def on_node_suspected(ctx: HandlerContext, event: NodeSuspected) -> None:
    """Mark a node as suspect after some silence. No new workers are started on it."""
    detail: Detail = {"silent_s": event.silent_s}
    node = ctx.state.nodes[event.node]
    _advance(ctx, node, NodeTrigger.SUSPECTED, "node.suspect", detail)
    ctx.plan_needed = True


def on_node_lost(ctx: HandlerContext, event: NodeLost) -> None:
    """Mark a node as lost after a long silence. Its jobs continue without this node."""
    detail: Detail = {"silent_s": event.silent_s}
    node = ctx.state.nodes[event.node]
    if not _advance(ctx, node, NodeTrigger.LOST, "node.lost", detail):
        return
    reason = f"node {node.node} has been silent for {event.silent_s:.0f} s"
    for job in ctx.state.slot_index.jobs_on(node.node):
        recovery.lose_node(ctx, job, node.node, reason)
    ctx.plan_needed = True


def on_node_forgotten(ctx: HandlerContext, event: NodeForgotten) -> None:
    """Remove a lost node and its slots; processes that it may still have count as exited.

    A node that is not lost, or no longer lost, is not removed.
    """
    state, node = ctx.state, ctx.state.nodes.get(event.node)
    if node is None or node.phase is not NodePhase.LOST:
        return
    for job, worker in state.slot_index.workers_on(node.node):
        exited = WorkerExited(
            job=job.job, version=worker.version, rank=worker.rank, code=None, signal=None
        )
        exits.on_worker_exited(ctx, job, worker, exited)
    del state.nodes[node.node]
    state.draining.pop(node.node, None)
    state.unchecked_drains.pop(node.node, None)
    state.reserved_nodes.pop(node.node, None)
    state.slot_index.touch_node(node.node)
    state.slot_index.touch_all()
    ctx.announce("node.forgotten", node=node, detail={"user": event.user})
    ctx.plan_needed = True


def on_commits_resumed(ctx: HandlerContext, event: CommitsResumed) -> None:
    """Announce that the journal accepts inputs again."""
    lasted_s = round(max(0.0, ctx.now - event.since), 3)
    ctx.announce("controller.stalled", detail={"reason": event.reason, "lasted_s": lasted_s})


def on_input_skipped(ctx: HandlerContext, event: InputSkipped) -> None:
    """Mark a failed input as handled in its node's stream. Ignore inputs of other boots."""
    node = ctx.state.nodes.get(event.node) if event.node else None
    if node is not None and node.boot == event.boot:
        node.committed = max(node.committed, event.seq)


def _advance(
    ctx: HandlerContext,
    node: Node,
    trigger: NodeTrigger,
    announced: str,
    detail: Detail | None = None,
) -> bool:
    phase_before = node.phase
    changed = nodes.advance(node, trigger, ctx.now)
    if changed:
        ctx.state.slot_index.touch_node(node.node)
        if NodePhase.LOST in {phase_before, node.phase}:
            ctx.state.slot_index.touch_all()
        ctx.announce(announced, node=node, detail=detail)
    return changed
