"""Handlers of group changes during training, with joins, leaves and new batches.

The change is the "shadow join" of ONES section 3.3: newcomers are prepared while the old group
trains, and all members switch to the new group at one agreed step.
"""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.core import desired_state
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import forget_exited
from controlplane.core.handlers.start import (
    POLICY,
    add_workers,
    make_group,
    names_of,
    nodes_of,
    record_order,
    trains_on,
)
from controlplane.core.model import rescale as rescales
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Rescaling, Running
from controlplane.core.model.report_bounds import clamp_numbers
from controlplane.core.model.rescale import Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from controlplane.policy.api import Reason
from schemas.ids import Rank, SlotId, Version, WorkerId, node_of, worker_id
from schemas.nodes import Group
from schemas.wire.agent import JOIN, SUSPEND, GroupFormed, StoreOpened

FORMING = frozenset({RescalePhase.SWITCHING, RescalePhase.REJOINING})


def order_change(
    ctx: HandlerContext,
    job: Job,
    placed: Mapping[SlotId, int],
    reason: Reason,
    by: str = POLICY,
) -> None:
    """Order a change of a running job to these slots and local batches. Ignore other jobs.

    A move that both adds and removes slots takes two changes. The caller first orders the union of
    the old and new slots, and orders the target after the first change has settled.

    Args:
        placed: slot -> local batch, samples per step. An empty mapping suspends the job.
    """
    status = job.status
    if not isinstance(status, Running):
        return
    before, version = job.version, job.next_version
    rows, newcomers = _next_members(job, status.group, placed, version)
    change = Rescale(
        group=make_group(job, version, rows),
        kind=JOIN if rows else SUSPEND,
        before=before,
        phase=RescalePhase.PREPARING,
        reason=reason.text,
        started_at=ctx.now,
    )
    record_order(ctx, job, change.group, change.kind, reason, by=by)
    _add_newcomers(ctx, job, change, newcomers)
    if newcomers < len(rows) and _needs_store(status.group, change.group):
        change.notified_nodes[node_of(change.group.members[0].slot)] = None
    ctx.state.deadlines.expect_rescale(job, change, ctx.now)
    _announce_order(ctx, job, status, change)


def _announce_order(ctx: HandlerContext, job: Job, status: Running, change: Rescale) -> None:
    rescaling = Rescaling(group=status.group, change=change, script=status.script)
    why = f"{change.reason}: {_sizes(status.group, change.group)}"
    ctx.advance(job, JobTrigger.RESCALE_ORDERED, rescaling, why)
    ctx.send_to(job, change.notified_nodes)
    switch_when_prepared(ctx, job, rescaling)


def _next_members(
    job: Job, old: Group, placed: Mapping[SlotId, int], version: Version
) -> tuple[list[tuple[WorkerId, SlotId, int]], int]:
    """Return the members of the next group, staying members first, and the number of newcomers."""
    stay = [member for member in old.members if member.slot in placed]
    kept = {member.slot for member in stay}
    new = [slot for slot in placed if slot not in kept]
    rows = [(member.worker, member.slot, placed[member.slot]) for member in stay]
    for rank, slot in enumerate(new, start=len(stay)):
        rows.append((worker_id(job.job, version, Rank(rank)), slot, placed[slot]))
    return rows, len(new)


def _add_newcomers(ctx: HandlerContext, job: Job, change: Rescale, count: int) -> None:
    """Add workers for the last `count` members to `job`. Slots that have an owner are reserved."""
    owners = ctx.state.slot_index.owners()
    members = change.group.members[len(change.group.members) - count :]
    add_workers(job, members, change.group.version)
    for member in members:
        job.workers[member.worker].reserved = member.slot in owners
        change.notified_nodes[node_of(member.slot)] = None


def switch_when_prepared(ctx: HandlerContext, job: Job, status: Rescaling) -> None:
    """Order the switch once every newcomer is ready and the store of the new group is known."""
    change = status.change
    if change.phase is not RescalePhase.PREPARING:
        return
    for member in change.group.members:
        if job.workers[member.worker].phase not in {WorkerPhase.READY, WorkerPhase.MEMBER}:
            return
    if not change.store and _needs_store(status.group, change.group):
        first = job.workers[change.group.members[0].worker]
        if first.version != change.group.version or not first.store_port:
            return
        change.store = desired_state.address_of(ctx.state, first, first.store_port)
    rescales.advance(job.job, change, RescaleTrigger.PREPARED)
    change.prepared_at = ctx.now
    ctx.state.deadlines.expect_rescale(job, change, ctx.now)
    change.notified_nodes |= dict.fromkeys([*nodes_of(change.group), *nodes_of(status.group)])
    ctx.send_to(job, change.notified_nodes)


def on_store_opened(ctx: HandlerContext, job: Job, worker: Worker, event: StoreOpened) -> None:
    """Record the store that a member of the old group opened as rank 0 of the new group."""
    status = job.status
    if not isinstance(status, Rescaling) or event.group != status.change.group.version:
        return
    members = status.change.group.members
    if members and members[0].worker == worker.worker:
        status.change.store = desired_state.address_of(ctx.state, worker, event.port)
        switch_when_prepared(ctx, job, status)


def on_group_formed(ctx: HandlerContext, job: Job, status: Rescaling, event: GroupFormed) -> None:
    """Record a member's times. Settle the change once every member trains in the new group."""
    change = status.change
    if event.group != change.group.version or change.phase not in FORMING:
        return
    clamped = clamp_numbers(event)
    change.switched_at = change.switched_at or ctx.now
    change.connect_ms = max(change.connect_ms, clamped.connect_ms)
    if clamped.pause_ms > change.pause_ms:
        change.pause_ms, change.step_ms = clamped.pause_ms, max(0.0, clamped.step_ms)
    if all(job.workers[m.worker].group_version == event.group for m in change.group.members):
        _settle(ctx, job, status)


def _settle(ctx: HandlerContext, job: Job, status: Rescaling) -> None:
    """Make the new group the current group. Old members that are not in it are about to exit."""
    change, old, group = status.change, status.group, status.change.group
    rescales.advance(job.job, change, RescaleTrigger.FORMED)
    shares = {member.worker: member.local_batch for member in group.members}
    for worker in job.workers.values():
        if worker.worker in shares:
            worker.local_batch = shares[worker.worker]
        elif worker.phase is WorkerPhase.MEMBER:
            ctx.advance_worker(job, worker, WorkerTrigger.RETIRED)
    job.attempts.recoveries = 0
    if names_of(old) == names_of(group):
        job.accounting.batch_changes += 1
        ctx.totals.batch_changes += 1
    else:
        job.accounting.rescales += 1
        ctx.totals.rescales += 1
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "formed", numbers={**change.pause, **change.phases(ctx.now)})
    ctx.advance(
        job,
        JobTrigger.GROUP_FORMED,
        Running(group=group, script=status.script),
        f"{trains_on(group)}: {change.reason}",
        {
            "slots": len(group.members),
            "batch": group.global_batch,
            "took_s": ctx.now - change.started_at,
            **change.pause,
        },
    )
    ctx.send_to(job, dict.fromkeys([*nodes_of(old), *nodes_of(group), *change.notified_nodes]))
    forget_exited(ctx, job)
    ctx.plan_needed = True


def _needs_store(old: Group, new: Group) -> bool:
    """True if the members of the new group need a store for their rendezvous."""
    return len(new.members) > 1 and names_of(old) != names_of(new)


def _sizes(old: Group, new: Group) -> str:
    slots = f"{len(old.members)} -> {len(new.members)} slots"
    return f"{slots}, batch {old.global_batch} -> {new.global_batch}"
