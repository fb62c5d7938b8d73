"""Handlers of failed changes and lost members, which abandon a change or recover the group.

A recovery is a change without newcomers. The survivors quiesce and report their positions, form a
new group, and all take the state of the survivor that is furthest ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from controlplane.core import desired_state
from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import (
    fail,
    forget_exited,
    restart_from_checkpoint,
    withdraw,
)
from controlplane.core.handlers.start import (
    CLUSTER,
    make_group,
    record_order,
    share_batch,
    trains_on,
)
from controlplane.core.inputs import JoinStalled, RescaleExpired, Straggler
from controlplane.core.model import rescale as rescales
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobTrigger, Rescaling, Running, Starting
from controlplane.core.model.rescale import QuiescePoint, Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from controlplane.core.state import RETRY_LONGEST_S, pause_before
from controlplane.policy.api import Reason
from schemas.ids import NodeId, Seconds, SlotId, node_of
from schemas.nodes import Group, Member
from schemas.wire.agent import JOIN, RECOVER, SUSPEND, GroupBroken, JoinFailed, Quiesced

MAX_STRAGGLERS: Final = 3  # that a reason names
MAX_RECOVERIES: Final = 5  # recoveries in a row without a formed group
STOPPING: Final = frozenset({WorkerPhase.LEAVING, WorkerPhase.EXITED})


# --- abandoned changes


def abandon(ctx: HandlerContext, job: Job, trigger: RescaleTrigger, reason: str) -> None:
    """Abandon the change of a job, if any. The current group continues."""
    status = job.status
    if not isinstance(status, Rescaling):
        return
    change, group = status.change, status.group
    rescales.advance(job.job, change, trigger)
    for member in change.group.members:
        worker = job.workers[member.worker]
        if group.member(member.worker) is None and worker.phase not in STOPPING:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    status.script.error, status.script.refused = "", False
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "abandoned")
    if trigger is not RescaleTrigger.SUPERSEDED:
        _back_off(ctx, job)
    running = Running(group=group, script=status.script)
    ctx.advance(job, JobTrigger.RESCALE_ABANDONED, running, f"{trains_on(group)}: {reason}")
    ctx.send_to(job, change.notified_nodes)
    forget_exited(ctx, job)
    _release_reservations(ctx, group)
    ctx.plan_needed = True
    version = change.group.version
    if _has_switched(job, change):
        recover(ctx, job, f"a worker switched to the abandoned version {version}")


def _has_switched(job: Job, change: Rescale) -> bool:
    """Return whether a member of the current group has passed the boundary of `change`."""
    version, group = change.group.version, job.group
    return group is not None and any(
        worker.group_version == version > group.version for worker in job.group_workers()
    )


def _release_reservations(ctx: HandlerContext, group: Group) -> None:
    """Abandon changes of other jobs if they wait for slots that the members of `group` keep."""
    kept = {member.slot for member in group.members}
    waiting = [
        job for slot, (job, _) in ctx.state.slot_index.reservations().items() if slot in kept
    ]
    for job in {job.job: job for job in waiting}.values():
        if job.change is not None and job.change.phase is RescalePhase.PREPARING:
            abandon(ctx, job, RescaleTrigger.EXPIRED, "the reserved slots are not given up")


def _back_off(ctx: HandlerContext, job: Job) -> None:
    """Delay the job's next change, because changes might have caused the failure."""
    job.attempts.changes += 1
    job.attempts.next_change_at = Seconds(ctx.now + pause_before(job.attempts.changes))


# --- lost members


def recover(ctx: HandlerContext, job: Job, reason: str) -> None:
    """Start the recovery of a job that lost a member, and order the survivors to quiesce.

    The job restarts from its checkpoint instead if it is starting, if no worker has the state, or
    after `MAX_RECOVERIES` recoveries in a row. A rigid job begins again, or is paused if it was
    about to be. A job without a group is left alone.
    """
    status = job.status
    if not isinstance(status, Running | Rescaling | Starting):
        return
    change, attempts = status.change, job.attempts
    if job.spec.rigid:  # its other workers cannot continue
        if change is not None and change.kind == SUSPEND:
            withdraw(ctx, job, "suspended", JobTrigger.SUSPENDED, f"{change.reason}; {reason}")
        else:
            restart_from_checkpoint(ctx, job, reason)
        return
    if change is not None:
        rescales.advance(job.job, change, RescaleTrigger.MEMBER_LOST)
        ctx.conclude(job, "broken")
    survivors = _survivors(job, status.group, change)
    attempts.recoveries += 1
    if attempts.changes:  # the first loss since an epoch needs no pause
        _back_off(ctx, job)
    else:
        attempts.changes = 1
    never_trained = isinstance(status, Starting)
    if attempts.recoveries > MAX_RECOVERIES or not survivors or never_trained:
        restart_from_checkpoint(ctx, job, reason)
        return
    for worker in job.workers.values():
        going = worker.phase in STOPPING or worker.phase is WorkerPhase.RETIRING
        if worker not in survivors and not going:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    recovery = _quiesce(ctx, job, status.group, survivors, reason)
    workers = "1 worker continues" if len(survivors) == 1 else f"{len(survivors)} workers continue"
    reason = f"{reason}; {workers}"
    rescaling = Rescaling(group=status.group, change=recovery, script=status.script)
    ctx.advance(job, JobTrigger.MEMBER_LOST, rescaling, reason)
    ctx.send_to(job, recovery.notified_nodes)
    _release_reservations(ctx, recovery.group)


def _quiesce(
    ctx: HandlerContext, job: Job, group: Group, survivors: list[Worker], reason: str
) -> Rescale:
    """Record the order of a recovery with the survivors as the next group. Return the recovery."""
    before, version = job.version, job.next_version
    recovery = Rescale(
        group=make_group(job, version, share_batch(survivors, group.global_batch)),
        kind=RECOVER,
        before=before,
        phase=RescalePhase.QUIESCING,
        reason=reason,
        started_at=ctx.now,
        notified_nodes=dict.fromkeys(
            node_of(worker.slot)
            for worker in job.workers.values()
            if worker.phase is not WorkerPhase.EXITED
        ),
    )
    record_order(ctx, job, recovery.group, RECOVER, Reason("lost", reason), by=CLUSTER)
    ctx.state.deadlines.expect_rescale(job, recovery, ctx.now)
    return recovery


def _survivors(job: Job, group: Group, change: Rescale | None) -> list[Worker]:
    """Return the workers that may have the full state, in rank order, newcomers last.

    The result is empty if no worker is a member.
    """
    switching = change is not None and change.phase is not RescalePhase.PREPARING
    phases = {WorkerPhase.MEMBER, WorkerPhase.READY} if switching else {WorkerPhase.MEMBER}
    found = [job.workers[member.worker] for member in job.members()]
    found = [worker for worker in found if worker.phase in phases]
    has_state = any(worker.phase is WorkerPhase.MEMBER for worker in found)
    return found if has_state and group.members else []


def on_quiesced(ctx: HandlerContext, job: Job, worker: Worker, event: Quiesced) -> None:
    """Record the position of a survivor. Ignore late reports for another group."""
    change = job.change
    if change is None or change.phase is not RescalePhase.QUIESCING:
        return
    if event.group != change.group.version or change.group.member(worker.worker) is None:
        return
    change.quiesce_points[worker.worker] = QuiescePoint(
        step=event.step, epoch=event.epoch, has_full_state=event.has_full_state, port=event.port
    )
    rejoin_when_quiesced(ctx, job, change)


def rejoin_when_quiesced(ctx: HandlerContext, job: Job, change: Rescale) -> None:
    """Let the survivors that have the full state form a group, once all survivors have reported.

    If no survivor has the full state, restart the job from its checkpoint.
    """
    survivors = [
        job.workers[member.worker]
        for member in change.group.members
        if job.workers[member.worker].phase not in STOPPING
    ]
    if any(worker.worker not in change.quiesce_points for worker in survivors):
        return
    full = [worker for worker in survivors if change.quiesce_points[worker.worker].has_full_state]
    if not full:
        rescales.advance(job.job, change, RescaleTrigger.NO_FULL_STATE)
        restart_from_checkpoint(ctx, job, f"{change.reason}, and no survivor had the full state")
        return
    for worker in survivors:
        if worker not in full:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    rescales.advance(job.job, change, RescaleTrigger.QUIESCED)
    change.prepared_at = ctx.now
    points = [change.quiesce_points[worker.worker] for worker in full]
    places = [(point.step, point.epoch) for point in points]
    change.source = None if len(set(places)) == 1 else places.index(max(places))
    version = change.group.version
    change.group = make_group(job, version, share_batch(full, change.group.global_batch))
    ctx.state.slot_index.touch(job.job)
    ctx.changed_jobs[job.job] = None
    ctx.state.deadlines.expect_rescale(job, change, ctx.now)
    if len(full) > 1:
        change.store = desired_state.address_of(ctx.state, full[0], points[0].port)
    ctx.send_to(job, change.notified_nodes)


# --- reports and deadlines


def on_group_broken(ctx: HandlerContext, job: Job, _: Worker, event: GroupBroken) -> None:
    """Handle the report that a collective operation of a group failed.

    A starting job restarts, or fails if its script raised. Any other job recovers. Late reports of
    older groups are ignored. While the survivors quiesce, all reports are ignored.
    """
    status, version, reason = job.status, event.group, event.error
    if isinstance(status, Starting):
        if version == status.group.version:
            _handle_failed_start(ctx, job, status, reason)
        elif version > status.group.version:
            recover(ctx, job, f"the group lost a member: {reason}")
    elif isinstance(status, Running):
        if version >= status.group.version:
            recover(ctx, job, f"the group lost a member: {reason}")
    elif isinstance(status, Rescaling) and status.change.phase is RescalePhase.REJOINING:
        if version == status.change.group.version:
            recover(ctx, job, f"the group could not be recovered: {reason}")
    elif isinstance(status, Rescaling):
        quiescing = status.change.phase is RescalePhase.QUIESCING
        if not quiescing and version >= status.group.version:
            recover(ctx, job, f"the group lost a member: {reason}")


def _handle_failed_start(ctx: HandlerContext, job: Job, status: Starting, reason: str) -> None:
    """Fail the job if its script raised, even if a process still lives. Otherwise restart it."""
    if status.script.error:
        fail(ctx, job, status.script.error)
    else:
        restart_from_checkpoint(ctx, job, f"the group could not form: {reason}")


def on_join_failed(ctx: HandlerContext, job: Job, _: Worker, event: JoinFailed) -> None:
    """Handle the report of a member that could not build the new group.

    A starting job restarts, or fails if its script raised. A job that switches abandons its change
    and keeps the old group. A job that rejoins recovers again. Reports of other versions are
    ignored.
    """
    status, version, reason = job.status, event.group, event.error
    if isinstance(status, Starting) and version == status.group.version:
        _handle_failed_start(ctx, job, status, reason)
    elif isinstance(status, Rescaling) and version == status.change.group.version:
        if status.change.phase is RescalePhase.SWITCHING:
            reason = f"the new group could not be built: {reason}"
            abandon(ctx, job, RescaleTrigger.JOIN_FAILED, reason)
        elif status.change.phase is RescalePhase.REJOINING:
            recover(ctx, job, f"the group could not be recovered: {reason}")


def on_rescale_expired(ctx: HandlerContext, event: RescaleExpired) -> None:
    """End what a change waits for in vain, or abandon the change. Ignore ended changes.

    Stragglers are ended and the others recover. If the stragglers are unknown, the job recovers
    with all members, which takes another deadline if one of them hangs.
    """
    job = ctx.state.jobs.get(event.job)
    status = job.status if job is not None else None
    if job is None or not isinstance(status, Rescaling):
        return
    change = status.change
    if change.group.version != event.version:
        return
    took = f"{ctx.now - change.started_at:.0f} s"
    stragglers, ends_ranks = event.stragglers or (), event.stragglers is not None
    if change.phase is RescalePhase.PREPARING:
        unready = _not_ready(job, change)
        reason = f"not ready after {took}: {', '.join(unready) or 'the store of the new group'}"
        abandon(ctx, job, RescaleTrigger.EXPIRED, reason)
    elif change.phase is RescalePhase.SWITCHING:
        joins = any(status.group.member(m.worker) is None for m in change.group.members)
        reason = f"the group did not switch within {took}"
        if joins and not (ends_ranks and _has_switched(job, change)):
            abandon(ctx, job, RescaleTrigger.EXPIRED, reason)
        else:
            ended = _end_stragglers(ctx, job, stragglers)
            recover(ctx, job, _describe(ended) or reason)
    elif change.phase is RescalePhase.QUIESCING and ends_ranks and change.quiesce_points:
        _leave_behind(ctx, job, change, stragglers)
    else:
        rescales.advance(job.job, change, RescaleTrigger.EXPIRED)
        why = _describe(stragglers)
        lost = f"{change.reason}; {why}" if why else change.reason
        reason = f"{lost}, and the survivors did not form a group within {took}"
        restart_from_checkpoint(ctx, job, reason)


def _leave_behind(
    ctx: HandlerContext, job: Job, change: Rescale, stragglers: Sequence[Straggler]
) -> None:
    """End the survivors that have not quiesced in time. Those that have form a group."""
    missing = [
        member
        for member in change.group.members
        if member.worker not in change.quiesce_points
        and job.workers[member.worker].phase not in STOPPING
    ]
    for member in missing:
        ctx.advance_worker(job, job.workers[member.worker], WorkerTrigger.DISMISSED)
    late = {member.worker for member in missing}
    ranks = ", ".join(f"{_shown_rank(job, member)}" for member in missing)
    plural = "s" if len(missing) > 1 else ""
    known = _describe([one for one in stragglers if one.worker in late])
    change.reason = f"{change.reason}; {known or f'rank{plural} {ranks} did not stop training'}"
    rejoin_when_quiesced(ctx, job, change)


def on_join_stalled(ctx: HandlerContext, event: JoinStalled) -> None:
    """End newcomers for which all incumbents wait, and let the others recover.

    Ignore changes that have ended. The next change waits for the longest pause, because each
    attempt costs the members the time that they have waited.
    """
    job = ctx.state.jobs.get(event.job)
    status = job.status if job is not None else None
    if job is None or not isinstance(status, Rescaling):
        return
    change = status.change
    if change.phase is not RescalePhase.SWITCHING or change.kind != JOIN:
        return
    if change.group.version != event.version:
        return
    newcomers = [one for one in event.stragglers if status.group.member(one.worker) is None]
    if ended := _end_stragglers(ctx, job, newcomers):
        recover(ctx, job, _describe(ended))
        job.attempts.next_change_at = Seconds(ctx.now + RETRY_LONGEST_S)


def _end_stragglers(
    ctx: HandlerContext, job: Job, stragglers: Sequence[Straggler]
) -> list[Straggler]:
    """Order the stragglers that are members to stop. Return those that were not stopping."""
    members = {member.worker for member in job.members()}
    ended = []
    for one in stragglers:
        worker = job.workers.get(one.worker)
        if worker is None or one.worker not in members:
            continue
        if worker.phase in {WorkerPhase.READY, WorkerPhase.MEMBER}:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
            ended.append(one)
    return ended


def _describe(stragglers: Sequence[Straggler]) -> str:
    """Return what is known of stragglers, for the reason of a change. Empty if there are none."""
    texts = []
    for one in stragglers[:MAX_STRAGGLERS]:
        at = f", at {one.at}" if one.at else ""
        stuck = "made no step" if one.answers else "did not answer"
        texts.append(f"rank {one.rank} {stuck} for {one.idle_s:.0f} s{at}")
    if more := len(stragglers) - len(texts):
        texts.append(f"and {more} more")
    return "; ".join(texts)


def _shown_rank(job: Job, member: Member) -> int:
    now = job.group.member(member.worker) if job.group is not None else None
    return member.rank if now is None else now.rank


def _not_ready(job: Job, change: Rescale) -> list[SlotId]:
    members = [job.workers[member.worker] for member in change.group.members]
    ready = {WorkerPhase.READY, WorkerPhase.MEMBER}
    return [worker.slot for worker in members if worker.phase not in ready]


def lose_node(ctx: HandlerContext, job: Job, node: NodeId, reason: str) -> None:
    """Continue a job without a lost or drained node. Order its workers on the node to stop.

    The processes on a lost node may still be running.
    """
    on_node = [
        worker
        for worker in job.workers.values()
        if node_of(worker.slot) == node and worker.phase is not WorkerPhase.EXITED
    ]
    if not on_node or job.group is None:
        return
    members = {member.worker for member in job.members()}
    affected = [worker for worker in on_node if worker.worker in members]
    if isinstance(job.status, Starting) and affected:
        restart_from_checkpoint(ctx, job, reason)
        return
    incumbent = any(job.group.member(worker.worker) for worker in affected)
    for worker in on_node:
        if worker.phase is not WorkerPhase.LEAVING:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    change = job.change
    if change is not None and change.phase is RescalePhase.QUIESCING and affected:
        if any(worker.phase is WorkerPhase.MEMBER for worker in job.workers.values()):
            rejoin_when_quiesced(ctx, job, change)
        else:
            restart_from_checkpoint(ctx, job, reason)
    elif incumbent or (affected and change is not None and change.kind == RECOVER):
        recover(ctx, job, reason)
    elif affected:
        abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, reason)
