"""Handlers of node drains.

A drain moves all jobs away from a node. After every input each job on a draining node is checked. A
running job grows to free slots on other nodes and then leaves the node. Without free slots it
shrinks to the slots that it has on other nodes, or pauses. A starting job is withdrawn. At the
deadline the remaining workers are stopped.

A planned maintenance is a drain whose deadline is its begin, and which ends by itself. A
reservation of projects and users is the same for the jobs of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers import recovery
from controlplane.core.handlers.lifecycle import (
    announce_node,
    clear_strikes,
    end_drain,
    start_drain,
    track_drains,
    withdraw,
)
from controlplane.core.handlers.rescale import order_change
from controlplane.core.handlers.start import OPERATOR
from controlplane.core.inputs import (
    DrainDue,
    DrainExpired,
    DrainRequested,
    NodesReserved,
    ReservationCancelled,
    UndrainRequested,
)
from controlplane.core.model.job import Job, batch_limit, local_limit
from controlplane.core.model.job_phases import JobTrigger, Rescaling, Running, Starting
from controlplane.core.model.node import Drain, Node
from controlplane.core.model.rescale import RescalePhase, RescaleTrigger
from controlplane.core.state import State
from controlplane.policy.api import Reason
from controlplane.policy.placement.slot_partition import split
from schemas.ids import JobId, NodeId, Seconds, SlotId, node_of
from schemas.nodes import Group, Member, Reservation

LEAD_S: Final = 60.0  # from the start of the drain to the maintenance, at least


# --- requests of operators


def on_drain_requested(ctx: HandlerContext, event: DrainRequested) -> None:
    """Start the drain of a node. A second request replaces the reason and the deadline."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    if event.begin is not None and event.end is not None:
        window = Reservation(begin=event.begin, end=event.end, user=event.user, reason=event.reason)
        _reserve(ctx, [node.node], window)
        return
    deadline = None if event.within_s is None else Seconds(ctx.now + event.within_s)
    drain = Drain(
        user=event.user,
        reason=event.reason,
        since=ctx.now,
        deadline=deadline,
        cordon=event.cordon,
    )
    start_drain(ctx, node, drain, event.within_s)


def on_nodes_reserved(ctx: HandlerContext, event: NodesReserved) -> None:
    """Reserve nodes under one id."""
    ctx.state.reservations += 1
    window = replace(event.reservation, id=f"r-{ctx.state.reservations}")
    _reserve(ctx, event.nodes, window)


def _reserve(ctx: HandlerContext, nodes: Iterable[NodeId], window: Reservation) -> None:
    for node in (ctx.state.nodes[name] for name in nodes if name in ctx.state.nodes):
        node.windows = sorted([*node.windows, window], key=lambda one: one.begin)
        ctx.state.planned[node.node] = None
        kept = window.projects or window.users
        what = "node.reserved" if kept else "node.maintenance_planned"
        announce_node(ctx, node, what, {"reason": window.text})


def on_reservation_cancelled(ctx: HandlerContext, event: ReservationCancelled) -> None:
    """Cancel a reservation on all its nodes."""
    for node in (ctx.state.nodes[name] for name in ctx.state.planned if name in ctx.state.nodes):
        for window in [one for one in node.windows if one.id == event.id]:
            node.windows = [one for one in node.windows if one is not window]
            announce_node(ctx, node, "node.reservation_ended", {"reason": window.text})
        for drain in node.drains:
            if drain.window is not None and drain.window.id == event.id:
                _end(ctx, node, drain, event.user)


def _end(ctx: HandlerContext, node: Node, drain: Drain, user: str) -> None:
    if drain is node.drain:
        end_drain(ctx, node, user)
    else:
        node.keeps = [one for one in node.keeps if one is not drain]
        track_drains(ctx.state, node)
        announce_node(ctx, node, "node.reservation_ended", {"reason": drain.reason})


def on_undrain_requested(ctx: HandlerContext, event: UndrainRequested) -> None:
    """Return a drained node to service. Without a drain, cancel its reservations."""
    node = ctx.state.nodes.get(event.node)
    if node is None or not (node.drains or node.is_suspected or node.windows):
        return
    clear_strikes(ctx, [node.node])
    if node.drain is None:
        node.windows, node.keeps = [], []
    end_drain(ctx, node, event.user)


def on_drain_expired(ctx: HandlerContext, event: DrainExpired) -> None:
    """Stop the remaining workers of a draining node at its deadline. Their jobs leave the node."""
    node = ctx.state.nodes.get(event.node)
    for drain in [] if node is None else node.drains:
        if node is None or not _expired(drain, ctx.now):
            continue
        drain.deadline_passed = True
        for job in ctx.state.slot_index.jobs_on(node.node):
            if drain.concerns(job.owner):
                recovery.lose_node(ctx, job, node.node, f"node {node.node} is {drain.text}")
                ctx.send_to(job, [node.node])
        ctx.plan_needed = True


def on_drain_due(ctx: HandlerContext, event: DrainDue) -> None:
    """Begin or end a reservation of a node. Other changes are retried by `reconcile_all`."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    for drain in node.drains:
        if _over(drain, ctx.now):
            _end(ctx, node, drain, drain.user)
    if not _begins(ctx.state, node, ctx.now):
        return
    window, *node.windows = node.windows
    drain = Drain(
        user=window.user,
        reason=window.text,
        since=ctx.now,
        deadline=window.begin,
        until=window.end,
        window=window,
    )
    if window.projects or window.users:
        node.keeps = [*node.keeps, drain]
        track_drains(ctx.state, node)
        announce_node(ctx, node, "node.reservation_began", {"reason": window.text})
        return
    if node.drain is not None:  # what an operator drained stays drained
        drain.until = drain.window = None
    start_drain(ctx, node, drain, max(0.0, window.begin - ctx.now))


def _begins(state: State, node: Node, now: Seconds) -> bool:
    """True if jobs of a node must leave now for its next reservation."""
    if not node.windows:
        return False
    window, jobs = node.windows[0], state.slot_index.jobs_on(node.node)
    leave = (job.spec for job in jobs if job.spec.rigid and not window.admits(*job.owner))
    return now >= window.begin - max((LEAD_S, *(spec.grace_limit_s for spec in leave)))


# --- execution of drains


def reconcile_all(ctx: HandlerContext) -> None:
    """Order the next step for every job on a draining node."""
    state, busy = ctx.state, ctx.state.slot_index.jobs_by_node()
    unchecked, changed = state.unchecked_drains, state.slots_of_drains
    unchecked |= {node: None for node in map(node_of, changed.slots) if node in state.draining}
    changed.slots = {}
    if not unchecked:
        return
    for name in [one for one in state.draining if one in unchecked]:
        if not busy.get(name):
            del unchecked[name]
        node = ctx.state.nodes[name]
        for drain in node.drains:
            jobs = [j for j in ctx.state.slot_index.jobs_on(name) if drain.concerns(j.owner)]
            for job in jobs:
                _reconcile_job(ctx, job, drain)
            drain.moved = {job: at for job, at in drain.moved.items() if job in _names(jobs)}
            if drain.announced_empty and jobs:
                drain.announced_empty = False
            elif not drain.announced_empty and not jobs and drain is node.drain:
                drain.announced_empty = True
                ctx.announce("node.drained", node=node, detail={"took_s": ctx.now - drain.since})


def _names(jobs: Iterable[Job]) -> set[JobId]:
    return {job.job for job in jobs}


def _reconcile_job(ctx: HandlerContext, job: Job, drain: Drain) -> None:
    status, why = job.status, drain.text
    if isinstance(status, Starting) and _on_draining(ctx.state, job, status.group.members):
        why = f"its node is {why} while the job was starting"
        withdraw(ctx, job, "drained", JobTrigger.SUSPENDED, why)
    elif isinstance(status, Rescaling):
        change = status.change
        new = [m for m in change.group.members if status.group.member(m.worker) is None]
        if change.phase is RescalePhase.PREPARING and _on_draining(ctx.state, job, new):
            recovery.abandon(ctx, job, RescaleTrigger.SUPERSEDED, f"a newcomer's node is {why}")
    elif isinstance(status, Running) and _movable(ctx.state, job, ctx.now):
        _move_away(ctx, job, status, drain)


def _move_away(ctx: HandlerContext, job: Job, status: Running, drain: Drain) -> None:
    group = status.group
    current = [member.slot for member in group.members]
    leaving = set(_on_draining(ctx.state, job, group.members))
    stay = [slot for slot in current if slot not in leaving]
    fixed = job.spec.rigid or job.job in drain.moved
    new = [] if fixed else _find_slots(ctx.state, job, current, len(leaving))
    if new:
        drain.moved[job.job] = group.version
        target, what = [*current, *new], "grows elsewhere first"
    elif stay and len(stay) >= job.spec.slots[0]:
        target, what = stay, f"keeps {len(stay)} of {len(current)} slots"
    else:
        target, what = [], "pauses until slots are free elsewhere"
    batch = max(len(target), min(group.global_batch, local_limit(job) * len(target)))
    reason = Reason("drain", f"{', '.join(sorted({node_of(s) for s in leaving}))} is {drain.text}")
    reason = Reason(reason.code, f"{reason.text}; {what}")
    order_change(ctx, job, split(batch, target) if target else {}, reason, by=OPERATOR)


def _find_slots(state: State, job: Job, current: list[SlotId], count: int) -> list[SlotId]:
    """Return up to `count` free slots for a job, from nodes with the most free slots first."""
    promised = {slot for swap in state.swaps for slot in swap.slots()}
    fits = state.fit(job).slots
    free = [slot for slot in state.slot_index.available().free if slot not in promised]
    free = [slot for slot in free if fits is None or slot in fits]
    count = min(count, batch_limit(job) - len(current))
    room: dict[NodeId, int] = {}
    for slot in free:
        room[node_of(slot)] = room.get(node_of(slot), 0) + 1
    return sorted(free, key=lambda slot: (-room[node_of(slot)], node_of(slot)))[: max(0, count)]


def _on_draining(state: State, job: Job, members: Iterable[Member]) -> list[SlotId]:
    return [member.slot for member in members if _drains(state, job, node_of(member.slot))]


def _drains(state: State, job: Job, node: NodeId) -> list[Drain]:
    """Return the drains for which a job leaves a node."""
    drains = state.nodes[node].drains if node in state.draining else []
    return [drain for drain in drains if drain.concerns(job.owner)]


def _movable(state: State, job: Job, now: Seconds) -> bool:
    """True if the job runs on a draining node and can be changed now."""
    status = job.status
    if (
        not isinstance(status, Running)
        or status.script.finished
        or job.attempts.next_change_at > now
    ):
        return False
    if job.spec.rigid and not _term_is_due(state, job, status.group, now):
        return False
    trading = any(job.job in swap.targets for swap in state.swaps)
    return not trading and bool(_on_draining(state, job, status.group.members))


def _term_is_due(state: State, job: Job, group: Group, now: Seconds) -> bool:
    """True if a rigid job must get TERM now, to have ended by the deadline of a drain."""
    drains = [drain for one in group.members for drain in _drains(state, job, node_of(one.slot))]
    ends = [drain.deadline for drain in drains if drain.deadline is not None]
    return bool(ends) and now >= min(ends) - job.spec.grace_limit_s


def _expired(drain: Drain, now: Seconds) -> bool:
    return drain.deadline is not None and drain.deadline <= now and not drain.deadline_passed


def _over(drain: Drain, now: Seconds) -> bool:
    return drain.until is not None and drain.until <= now


def _has_time(drain: Drain) -> bool:
    """True if the drain ends, or has a deadline that has not passed."""
    return drain.until is not None or (drain.deadline is not None and not drain.deadline_passed)


def due(state: State, now: Seconds) -> list[DrainExpired | DrainDue]:
    """Return inputs for drains that end, pass their deadline, begin, or can move a job now."""
    planned = [state.nodes[name] for name in state.planned if name in state.nodes]
    found: list[DrainExpired | DrainDue] = [
        DrainDue(node=node.node) for node in planned if _begins(state, node, now)
    ]
    idle, busy = state.idle_drains, state.slot_index.jobs_by_node()
    for name in [one for one in state.draining if one not in idle or busy.get(one)]:
        drains = state.nodes[name].drains
        if not busy.get(name) and not any(map(_has_time, drains)):
            idle.add(name)
        over = any(_over(drain, now) for drain in drains)
        if not over and any(_expired(drain, now) for drain in drains):
            found.append(DrainExpired(node=name))
        elif over or any(_movable(state, job, now) for job in state.slot_index.jobs_on(name)):
            found.append(DrainDue(node=name))
    return found
