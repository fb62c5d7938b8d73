"""Reconciliation of each sweep with the workers, the nodes and the end of its job.

After every input, the sweeps that it may concern are compared with their jobs. These are the sweep
of the job that the input names, the sweeps of changed jobs, and all sweeps after an input about a
node. So this module alone defines what a start, a change, a pause, a loss or the end of a job means
for its sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import lifecycle
from controlplane.core.handlers.lifecycle import MAX_ENDED_SWEEPS, end
from controlplane.core.handlers.sweep_orders import (
    best_score,
    best_trial,
    carry_out,
    send_stale,
)
from controlplane.core.inputs import (
    ControllerStarted,
    Input,
    NodeGreeted,
    NodeHeard,
    NodeLost,
    NodeReported,
    NodeSuspected,
    UnitExpired,
)
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Rescaling, Running
from controlplane.core.model.node import NodePhase
from controlplane.core.model.rescale import RescalePhase
from controlplane.core.model.sweep import JobSweep
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from schemas.ids import JobId, NodeId, Seconds, WorkerId, node_of

SWITCHED: Final = frozenset({RescalePhase.SWITCHING, RescalePhase.REJOINING})
NODE_INPUTS: Final = (ControllerStarted, NodeGreeted, NodeHeard, NodeSuspected, NodeLost)
GONE_PHASES: Final = frozenset({WorkerPhase.EXITED, WorkerPhase.LEAVING})


def reconcile(ctx: HandlerContext, event: Input) -> None:
    """Update all sweeps that an input may concern, and notify nodes of changes."""
    if isinstance(event, NODE_INPUTS):
        reconcile_sweeps(ctx, list(ctx.state.sweeps))
        return
    about = event.event if isinstance(event, NodeReported) else event
    concerned = {getattr(about, "job", None), *ctx.changed_jobs}
    if not concerned.isdisjoint(ctx.state.sweeps):
        reconcile_sweeps(ctx, [name for name in ctx.state.sweeps if name in concerned])


def reconcile_sweeps(ctx: HandlerContext, names: Sequence[JobId]) -> None:
    """Update these sweeps to match their jobs, and notify nodes. A repetition changes nothing."""
    for name in names:
        job = ctx.state.jobs[name]
        sweep = job.sweep
        if sweep is None:
            continue
        if not job.ended:
            _follow_nodes(ctx, job, sweep)
            _follow_workers(ctx, job, sweep)
            _end_when_over(ctx, job, sweep)
        if job.ended and not sweep.closed:
            sweep.closed = True
            carry_out(ctx, job, sweep, sweep.engine.close(job.reason))
            sweep.stale_nodes |= sweep.notified_nodes
        if sweep.stale_nodes:
            before = len(ctx.out)
            send_stale(ctx, job, sweep)
            if job.ended:  # a node needs its list of kept states before it forgets the job
                ctx.out[:] = [*ctx.out[before:], *ctx.out[:before]]
        if name in ctx.changed_jobs:
            _request_plan_if_slots_change(ctx, job, sweep)
        if sweep.closed:
            _move_to_ended(ctx, name)


def _move_to_ended(ctx: HandlerContext, name: JobId) -> None:
    """Move a closed sweep to `ended_sweeps`. Its deltas are sent only to returning nodes."""
    ended = ctx.state.ended_sweeps
    del ctx.state.sweeps[name]
    ended.pop(name, None)
    ended[name] = None
    while len(ended) > MAX_ENDED_SWEEPS:
        del ended[next(iter(ended))]
    lifecycle.schedule_leave(ctx, ctx.state.jobs[name])


def _follow_nodes(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    """Remove the states of lost nodes from the sweep, and restore those of returning nodes."""
    engine = sweep.engine
    for node in sweep.notified_nodes:
        known = ctx.state.nodes.get(node)
        lost = known is None or known.phase is NodePhase.LOST
        if lost and node not in engine.state.lost_states:
            sweep.workers_by_node = {}  # so that partitions are assigned again
            carry_out(ctx, job, sweep, engine.node_lost(node, ctx.now))
        elif not lost and node in engine.state.lost_states:
            sweep.stale_nodes[node] = None
            carry_out(ctx, job, sweep, engine.node_back(node, ctx.now))


def _follow_workers(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    """Add new members to the sweep as workers, revoke leaving workers, and remove exited ones."""
    engine, spec = sweep.engine, job.spec.stated_sweep
    serving = {worker.worker: worker for worker in job.workers.values() if _serves(job, worker)}
    for name, place in list(engine.state.workers.items()):
        worker = job.workers.get(name)
        if worker is None or worker.phase in GONE_PHASES:
            reason, fault = sweep.exits.get(name, ("", False))
            orders = engine.worker_gone(name, ctx.now, reason, fault=fault)
            carry_out(ctx, job, sweep, orders)
        elif name not in serving and not place.revoked:
            within_s = spec.revoke_s if spec is not None else 0.0
            carry_out(ctx, job, sweep, engine.worker_revoked(name, ctx.now, within_s))
        elif name in serving and place.revoked:
            carry_out(ctx, job, sweep, engine.worker_kept(name, ctx.now))
    sweep.exits = {}
    for kept in (sweep.addresses, sweep.stopping):
        for name in [name for name in kept if name not in job.workers]:
            del kept[name]
    _share_partitions(ctx, job, sweep, serving)
    for name, worker in serving.items():
        if name not in engine.state.workers:
            orders = engine.worker_came(name, node_of(worker.slot), ctx.now)
            carry_out(ctx, job, sweep, orders)


def _serves(job: Job, worker: Worker) -> bool:
    """True if a worker can take units, as a member that stays a member in the next group."""
    sweep, status = job.sweep, job.status
    if sweep is None or worker.phase is not WorkerPhase.MEMBER:
        return False
    if worker.worker not in sweep.addresses or worker.worker in sweep.stopping:
        return False
    if isinstance(status, Rescaling) and status.change.phase in SWITCHED:
        return status.change.group.member(worker.worker) is not None
    return isinstance(status, Running | Rescaling)


def _share_partitions(
    ctx: HandlerContext, job: Job, sweep: JobSweep, serving: dict[WorkerId, Worker]
) -> None:
    """Assign every partition to nodes with workers, if the workers or the refused data changed."""
    spec = job.spec.stated_sweep
    workers: dict[NodeId, int] = dict(Counter(node_of(one.slot) for one in serving.values()))
    faults = sum(sweep.engine.state.data.failed.values())
    if spec is None or not workers or (workers, faults) == (sweep.workers_by_node, sweep.faults):
        return
    sweep.workers_by_node, sweep.faults = workers, faults
    orders = sweep.engine.share_partitions(workers, spec.replicas, ctx.now)
    carry_out(ctx, job, sweep, orders)


def _end_when_over(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    engine = sweep.engine
    if engine.state.stuck_reason:
        end(ctx, job, JobTrigger.GAVE_UP, engine.state.stuck_reason)
    elif engine.over:
        score, number = best_score(sweep), best_trial(sweep)
        if score is not None:
            metric = engine.state.spec.metric
            reason = f"best: trial {number} with {metric} {score:.6g}"
            end(ctx, job, JobTrigger.FINISHED, reason, {"trial": number, metric: score})
        elif sweep.first_failure:
            count = len(engine.state.trials)
            reason = f"none of {count} trials finished an epoch; {sweep.first_failure}"
            end(ctx, job, JobTrigger.GAVE_UP, reason)
        else:
            end(ctx, job, JobTrigger.CANCELLED, "every trial was stopped before it had a score")


def _request_plan_if_slots_change(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    can_train = 0 if job.ended else sweep.engine.trainable
    if can_train != sweep.trainable:
        least, most = job.spec.slots
        bounded = [max(least, min(most, count)) for count in (sweep.trainable, can_train)]
        sweep.trainable = can_train
        ctx.changed_jobs[job.job] = None
        if bounded[0] != bounded[1]:
            ctx.plan_needed = True


def on_unit_expired(ctx: HandlerContext, event: UnitExpired) -> None:
    """Give up the units of a sweep that took too long."""
    job = ctx.state.jobs.get(event.job)
    if job is not None and job.sweep is not None and not job.ended:
        carry_out(ctx, job, job.sweep, job.sweep.engine.deadline_passed(ctx.now))
        ctx.changed_jobs[job.job] = None


def on_controller_started(ctx: HandlerContext) -> None:
    """Restart the timers of all sweeps.

    While the controller was down, no message could reach it, so this silence does not count.
    """
    for name in ctx.state.sweeps:
        sweep = ctx.state.jobs[name].sweep
        if sweep is not None:
            sweep.engine.restart_timers(ctx.now)


def on_node_greeted(ctx: HandlerContext, node: NodeId) -> None:
    """Schedule a new delta for the node from every sweep that has sent one to this node.

    Also send the node the trial states that it must keep for sweeps which are no longer here.
    """
    for name in (*ctx.state.sweeps, *ctx.state.ended_sweeps):
        sweep = ctx.state.jobs[name].sweep
        if sweep is not None and node in sweep.notified_nodes:
            sweep.stale_nodes[node] = None
            ctx.state.sweeps[name] = None
    lifecycle.resend_kept_states(ctx, node)


def expired_units(state: State, now: Seconds) -> list[UnitExpired]:
    """Return one input for each sweep with a unit that has passed its deadline by `now`."""
    found = []
    for name in state.sweeps:
        sweep = state.jobs[name].sweep
        deadline = sweep.engine.deadline if sweep is not None else None
        if deadline is not None and deadline <= now:
            found.append(UnitExpired(job=name))
    return found
