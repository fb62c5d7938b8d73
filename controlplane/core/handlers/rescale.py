"""What makes a group of workers become the next one: joins, leaves, recoveries and pauses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controlplane.core.handler_context import HandlerContext
from controlplane.core.handlers.lifecycle import (
    CLUSTER,
    POLICY,
    add_workers,
    conclude,
    conclude_version,
    drop_gone,
    end,
    fail,
    note_version,
    pause_before,
    restart_from_checkpoint,
    start_formed,
    trains_on,
)
from controlplane.core.model import rescale as rescales
from controlplane.core.model import worker as workers
from controlplane.core.model.exit_cause import ExitCause, exit_cause
from controlplane.core.model.job import Job, JobTrigger, Phase, settle_time
from controlplane.core.model.rescale import QuiescePoint, Rescale, RescalePhase, RescaleTrigger
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from controlplane.policy.api import Reason
from schemas.groups import Group, Member, ResumePoint
from schemas.ids import NodeId, Rank, Seconds, SlotId, Version, WorkerId, node_of, worker_id
from schemas.messages.agent import (
    ABANDONED,
    JOIN,
    RECOVER,
    SETTLED,
    SUSPEND,
    GroupFormed,
    Quiesced,
    StoreOpened,
    Suspended,
    WorkerExited,
)

# --- join, leave, batch


def order(
    ctx: HandlerContext, job: Job, placed: Mapping[SlotId, int], reason: Reason, by: str = POLICY
) -> None:
    """Begin to bring a training job to these slots and local batches; none pauses it.

    Newcomers and leavers at once are two changes, grow then shrink: the caller gives the union
    first, and comes back when it has settled.
    """
    old = job.group
    if old is None or job.change is not None:
        return
    version = Version(job.version + 1)
    stay = [member for member in old.members if member.slot in placed]
    new = [slot for slot in placed if slot not in {member.slot for member in stay}]
    names = [member.worker for member in stay]
    names += [worker_id(job.job, version, Rank(len(stay) + i)) for i in range(len(new))]
    slots = [*(member.slot for member in stay), *new]
    members = _members(
        [(name, slot, placed[slot]) for name, slot in zip(names, slots, strict=True)]
    )
    before = job.version
    job.version = version
    job.change = change = Rescale(
        group=_group(job, version, members),
        kind=JOIN if members else SUSPEND,
        before=before,
        phase=RescalePhase.PREPARING,
        why=reason.text,
        began=ctx.now,
        deadline=Seconds(ctx.now + rescales.PREPARE_LIMIT_S),
    )
    note_version(ctx, job, change.group, change.kind, reason, by=by)
    owners = ctx.state.owners()
    add_workers(job, members[len(stay) :], version)
    for member in members[len(stay) :]:
        job.workers[member.worker].reserved = member.slot in owners
        change.notified_nodes[node_of(member.slot)] = None
    if _needs_store(job, change) and stay:
        change.notified_nodes[node_of(members[0].slot)] = None
    ctx.advance(job, JobTrigger.RESCALE_ORDERED, f"{reason.text}: {_sizes(old, change.group)}")
    for node in change.notified_nodes:
        ctx.send_to(job, node)
    prepared(ctx, job)


def prepared(ctx: HandlerContext, job: Job) -> None:
    """Switch when every newcomer is ready and the members can meet."""
    change = job.change
    if change is None or change.phase is not RescalePhase.PREPARING:
        return
    for member in change.group.members:
        if job.workers[member.worker].phase not in {WorkerPhase.READY, WorkerPhase.MEMBER}:
            return
    if _needs_store(job, change) and not change.store:
        first = job.workers[change.group.members[0].worker]
        if first.version != change.group.version or not first.store_port:
            return
        change.store = ctx.state.address_of(first.worker, job, first.store_port)
    rescales.advance(job.job, change, RescaleTrigger.PREPARED)
    change.deadline = Seconds(ctx.now + rescales.SWITCH_LIMIT_S)
    _notify_all(ctx, job, change)


def store_opened(ctx: HandlerContext, job: Job, worker: Worker, news: StoreOpened) -> None:
    """An incumbent that is the new rank 0 serves the store."""
    change = job.change
    if change is None or news.group != change.group.version:
        return
    if change.group.members and change.group.members[0].worker == worker.worker:
        change.store = ctx.state.address_of(worker.worker, job, news.port)
        prepared(ctx, job)


def formed(ctx: HandlerContext, job: Job, worker: Worker, news: GroupFormed) -> None:
    """A worker takes its steps in group `news.group`."""
    if not workers.advance(worker, WorkerTrigger.FORMED) or job.group is None:
        return
    worker.formed, worker.formed_step = news.group, news.step
    change = job.change
    if change is not None and news.group == change.group.version:
        if all(job.workers[m.worker].formed == news.group for m in change.group.members):
            settle(ctx, job, change)
    elif job.phase is Phase.STARTING:
        start_formed(ctx, job, news)
    elif change is None and news.group > job.group.version:
        recover(ctx, job, f"a worker went on to the abandoned version {news.group}")


def settle(ctx: HandlerContext, job: Job, change: Rescale) -> None:
    """The new group trains; what is not in it is about to exit."""
    rescales.advance(job.job, change, RescaleTrigger.FORMED)
    settle_time(job, ctx.now)
    old = job.group
    group = job.group = change.group
    job.change, job.stage, job.recoveries = None, SETTLED, 0
    for worker in job.workers.values():
        member = group.member(worker.worker)
        if member is not None:
            worker.local_batch = member.local_batch
        elif worker.phase is WorkerPhase.MEMBER:
            workers.advance(worker, WorkerTrigger.RETIRED)
    if old is not None and _names(old) == _names(group):
        job.batch_changes += 1
    else:
        job.rescales += 1
    conclude_version(ctx, job, "formed")
    took_s = ctx.now - change.began
    ctx.advance(
        job,
        JobTrigger.GROUP_FORMED,
        f"{trains_on(group)}: {change.why}",
        {"slots": len(group.members), "batch": group.global_batch, "took_s": took_s},
    )
    for node in dict.fromkeys([*_nodes(old), *_nodes(group), *change.notified_nodes]):
        ctx.send_to(job, node)
    drop_gone(ctx, job)
    ctx.ask = True


def abandon(ctx: HandlerContext, job: Job, trigger: RescaleTrigger, why: str) -> None:
    """Give a change up; the group that trains goes on as if nothing had been asked."""
    change, group = job.change, job.group
    if change is None or group is None:
        return
    rescales.advance(job.job, change, trigger)
    for member in change.group.members:
        worker = job.workers[member.worker]
        stays = group.member(member.worker) is not None
        if not stays and worker.phase not in {WorkerPhase.LEAVING, WorkerPhase.GONE}:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    job.change, job.stage, job.script_error = None, ABANDONED, ""
    conclude_version(ctx, job, "abandoned")
    if trigger is not RescaleTrigger.SUPERSEDED:
        _back_off(ctx, job)
    ctx.advance(job, JobTrigger.RESCALE_ABANDONED, f"{trains_on(group)}: {why}")
    for node in change.notified_nodes:
        ctx.send_to(job, node)
    drop_gone(ctx, job)
    _release_reservations(ctx, group)
    ctx.ask = True
    gone_on = [w for w in job.group_workers() if w.formed > group.version]
    if any(worker.formed == change.group.version for worker in gone_on):
        recover(ctx, job, f"a worker went on to the abandoned version {change.group.version}")


def _release_reservations(ctx: HandlerContext, group: Group) -> None:
    """Those who were promised slots that are kept after all stop waiting for them."""
    kept = {member.slot for member in group.members}
    waiting = [job for slot, (job, _) in ctx.state.reservations().items() if slot in kept]
    for job in {job.job: job for job in waiting}.values():
        if job.change is not None and job.change.phase is RescalePhase.PREPARING:
            abandon(ctx, job, RescaleTrigger.EXPIRED, "the slots it was promised are kept")


# --- pause


def suspended(ctx: HandlerContext, job: Job, news: Suspended) -> None:
    """The state is in a checkpoint; all workers are about to exit."""
    change = job.change
    if change is None or news.group != change.group.version:
        return
    rescales.advance(job.job, change, RescaleTrigger.FORMED)
    nodes = [*_nodes(job.group), *change.notified_nodes]
    settle_time(job, ctx.now)
    job.checkpoint = ResumePoint(epoch=news.epoch, version=news.group)
    job.epoch, job.step, job.samples_done = news.epoch, news.step, news.samples_done
    job.last_batch = job.group.global_batch if job.group else job.last_batch
    job.group, job.change, job.stage, job.losses = None, None, SETTLED, 0
    job.tries, job.recoveries = 0, 0
    job.suspended = True
    job.rescales += 1
    for worker in job.workers.values():
        if worker.phase is WorkerPhase.MEMBER:
            workers.advance(worker, WorkerTrigger.RETIRED)
        elif worker.phase not in {WorkerPhase.GONE, WorkerPhase.LEAVING, WorkerPhase.RETIRING}:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    conclude_version(ctx, job, "suspended")
    ctx.advance(
        job, JobTrigger.SUSPENDED, f"{change.why}, at step {news.step}", {"epoch": news.epoch}
    )
    for node in dict.fromkeys(nodes):
        ctx.send_to(job, node)
    drop_gone(ctx, job)
    ctx.ask = True


# --- recover


def recover(ctx: HandlerContext, job: Job, why: str) -> None:
    """A member is gone or cut off: the others come to rest, agree on the furthest step, go on."""
    group, change = job.group, job.change
    if group is None:
        return
    if change is not None:
        rescales.advance(job.job, change, RescaleTrigger.MEMBER_LOST)
        conclude_version(ctx, job, "broken")
    survivors = _survivors(job, group, change)
    job.recoveries += 1
    if job.tries:  # the first loss since an epoch is no reason to wait
        _back_off(ctx, job)
    else:
        job.tries = 1
    if job.recoveries > rescales.MAX_RECOVERIES or not survivors:
        restart_from_checkpoint(ctx, job, why)
        return
    before, version = job.version, Version(job.version + 1)
    job.version = version
    for worker in job.workers.values():
        going = {WorkerPhase.LEAVING, WorkerPhase.RETIRING, WorkerPhase.GONE}
        if worker not in survivors and worker.phase not in going:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    members = _members(_dealt(survivors, group.global_batch))
    job.change = Rescale(
        group=_group(job, version, members),
        kind=RECOVER,
        before=before,
        phase=RescalePhase.QUIESCING,
        why=why,
        began=ctx.now,
        deadline=Seconds(ctx.now + rescales.QUIESCE_LIMIT_S),
        notified_nodes=dict.fromkeys(
            node_of(worker.slot)
            for worker in job.workers.values()
            if worker.phase is not WorkerPhase.GONE
        ),
    )
    note_version(ctx, job, job.change.group, RECOVER, Reason("lost", why), by=CLUSTER)
    count = len(survivors)
    ctx.advance(
        job,
        JobTrigger.MEMBER_LOST,
        f"{why}; {count} {'workers go' if count != 1 else 'worker goes'} on",
    )
    for node in job.change.notified_nodes:
        ctx.send_to(job, node)
    _release_reservations(ctx, job.change.group)


def _back_off(ctx: HandlerContext, job: Job) -> None:
    """Nothing is tried again at once: it may be what does the harm."""
    job.tries += 1
    job.retry_at = Seconds(ctx.now + pause_before(job.tries))


def quiesced(ctx: HandlerContext, job: Job, worker: Worker, news: Quiesced) -> None:
    """A survivor stands still."""
    change = job.change
    if change is None or change.phase is not RescalePhase.QUIESCING:
        return
    if news.group != change.group.version or change.group.member(worker.worker) is None:
        return
    change.points[worker.worker] = QuiescePoint(
        step=news.step, epoch=news.epoch, full=news.full, port=news.port
    )
    _quiesced(ctx, job, change)


def _quiesced(ctx: HandlerContext, job: Job, change: Rescale) -> None:
    """Go on with those that have the whole state, once every survivor has said so."""
    survivors = [
        job.workers[member.worker]
        for member in change.group.members
        if job.workers[member.worker].phase not in {WorkerPhase.GONE, WorkerPhase.LEAVING}
    ]
    if any(worker.worker not in change.points for worker in survivors):
        return
    full = [worker for worker in survivors if change.points[worker.worker].full]
    if not full:
        rescales.advance(job.job, change, RescaleTrigger.NOBODY_FULL)
        restart_from_checkpoint(ctx, job, f"{change.why}, and nobody else had the whole state")
        return
    for worker in survivors:
        if worker not in full:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    rescales.advance(job.job, change, RescaleTrigger.QUIESCED)
    points = [change.points[worker.worker] for worker in full]
    places = [(point.step, point.epoch) for point in points]
    change.source = None if len(set(places)) == 1 else places.index(max(places))
    change.group = _group(
        job, change.group.version, _members(_dealt(full, change.group.global_batch))
    )
    change.deadline = Seconds(ctx.now + rescales.SWITCH_LIMIT_S)
    if len(full) > 1:
        change.store = ctx.state.address_of(full[0].worker, job, points[0].port)
    for node in change.notified_nodes:
        ctx.send_to(job, node)


# --- ends


def broken(ctx: HandlerContext, job: Job, version: Version, why: str) -> None:
    """A member of group `version` met a fault in a collective operation."""
    change = job.change
    now = {job.group.version if job.group else None, change.group.version if change else None}
    if job.phase is Phase.STARTING and job.group and version == job.group.version:
        restart_from_checkpoint(ctx, job, f"the group could not form: {why}")
    elif job.group is None or (change is not None and change.phase is RescalePhase.QUIESCING):
        return
    elif change is not None and change.phase is RescalePhase.REJOINING:
        if version == change.group.version:
            recover(ctx, job, f"the group could not be recovered: {why}")
    elif version in now or version > job.group.version:
        recover(ctx, job, f"the group lost a member: {why}")


def join_failed(ctx: HandlerContext, job: Job, version: Version, why: str) -> None:
    """A member could not build group `version`."""
    change = job.change
    if job.phase is Phase.STARTING and job.group and version == job.group.version:
        restart_from_checkpoint(ctx, job, f"the group could not form: {why}")
    if change is None or version != change.group.version:
        return
    if change.phase is RescalePhase.SWITCHING:
        abandon(ctx, job, RescaleTrigger.JOIN_FAILED, f"the new group could not be built: {why}")
    elif change.phase is RescalePhase.REJOINING:
        recover(ctx, job, f"the group could not be recovered: {why}")


def expired(ctx: HandlerContext, job: Job) -> None:
    """A change took too long."""
    change, group = job.change, job.group
    if change is None or group is None:
        return
    took = f"{ctx.now - change.began:.0f} s"
    if change.phase is RescalePhase.PREPARING:
        late = [
            str(job.workers[m.worker].slot)
            for m in change.group.members
            if job.workers[m.worker].phase not in {WorkerPhase.READY, WorkerPhase.MEMBER}
        ]
        why = f"not ready after {took}: {', '.join(late) or 'the store of the new group'}"
        abandon(ctx, job, RescaleTrigger.EXPIRED, why)
    elif change.phase is RescalePhase.SWITCHING:
        joins = any(group.member(m.worker) is None for m in change.group.members)
        if joins:
            abandon(ctx, job, RescaleTrigger.EXPIRED, f"no boundary within {took}")
        else:
            recover(ctx, job, f"no boundary within {took}")
    else:
        rescales.advance(job.job, change, RescaleTrigger.EXPIRED)
        restart_from_checkpoint(
            ctx, job, f"{change.why}, and the others did not come together within {took}"
        )


def on_worker_exited(
    ctx: HandlerContext, job: Job, worker: Worker, was: WorkerPhase, news: WorkerExited
) -> None:
    """A process ended that was in phase `was`: decide what that means for its job."""
    group, change = job.group, job.change
    if group is None or was in {WorkerPhase.RETIRING, WorkerPhase.LEAVING}:
        if change is not None and change.phase is RescalePhase.QUIESCING:
            _quiesced_without(ctx, job, change, news)
        return
    if job.phase is Phase.STARTING:
        conclude(ctx, job, news)
        return
    outcome, why = exit_cause(job, news)
    incumbent = group.member(worker.worker) is not None
    stays = change is not None and change.group.member(worker.worker) is not None
    if change is not None and change.phase is RescalePhase.QUIESCING:
        _quiesced_without(ctx, job, change, news)
    elif _nobody_left(job):
        _all_gone(ctx, job, outcome, why, news)
    elif not incumbent and (change is None or change.kind != RECOVER):
        if stays:
            what = why if outcome is not ExitCause.DONE else "a newcomer ended"
            abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, f"a newcomer is lost: {what}")
    elif outcome is ExitCause.FAILED:
        job.exit_code = 128 + news.signal if news.signal is not None else news.code
        fail(ctx, job, why)
    elif change is not None and change.phase is RescalePhase.REJOINING:
        recover(ctx, job, why)  # whatever its end was, the others wait for it
    elif outcome is ExitCause.LOST and (stays or not _leaves(change)):
        recover(ctx, job, why)
    elif outcome is ExitCause.DONE:
        job.exit_code = news.code


def refused(ctx: HandlerContext, job: Job, worker: Worker, why: str) -> None:
    """A node could not start a process at all."""
    group, change = job.group, job.change
    if group is None:
        return
    if group.member(worker.worker) is not None:
        fail(ctx, job, why)
    elif change is not None and change.group.member(worker.worker) is not None:
        abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, f"a newcomer could not start: {why}")


def _quiesced_without(ctx: HandlerContext, job: Job, change: Rescale, news: WorkerExited) -> None:
    if _nobody_left(job):
        outcome, why = exit_cause(job, news)
        _all_gone(ctx, job, outcome, why, news)
    else:
        _quiesced(ctx, job, change)


def _all_gone(
    ctx: HandlerContext, job: Job, outcome: ExitCause, why: str, news: WorkerExited
) -> None:
    job.exit_code = 128 + news.signal if news.signal is not None else news.code
    recovering = job.change is not None and job.change.kind == RECOVER
    if outcome is ExitCause.DONE and (job.finished_why or not (recovering or _leaves(job.change))):
        end(ctx, job, JobTrigger.FINISHED, why)
    elif outcome is ExitCause.FAILED:
        fail(ctx, job, why)
    else:
        restart_from_checkpoint(ctx, job, why)


def on_node_lost(ctx: HandlerContext, job: Job, node: NodeId, why: str) -> None:
    """A node is lost: what it runs of `job` may live on there, and is dismissed."""
    here = [
        worker
        for worker in job.workers.values()
        if node_of(worker.slot) == node and worker.phase is not WorkerPhase.GONE
    ]
    if not here or job.group is None:
        return
    ctx.state.slot_index.touch(job.job)
    counted = {member.worker for member in job.members()}
    touched = [worker for worker in here if worker.worker in counted]
    if job.phase is Phase.STARTING and touched:
        restart_from_checkpoint(ctx, job, why)
        return
    incumbents = [worker for worker in touched if job.group.member(worker.worker)]
    for worker in here:
        if worker.phase is not WorkerPhase.LEAVING:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    change = job.change
    if change is not None and change.phase is RescalePhase.QUIESCING and touched:
        if any(worker.phase is WorkerPhase.MEMBER for worker in job.workers.values()):
            _quiesced(ctx, job, change)
        else:
            restart_from_checkpoint(ctx, job, why)
    elif incumbents or (touched and change is not None and change.kind == RECOVER):
        recover(ctx, job, why)
    elif touched:
        abandon(ctx, job, RescaleTrigger.NEWCOMER_LOST, why)


def slot_freed(ctx: HandlerContext, slot: SlotId) -> None:
    """A slot's owner is gone; who was prepared beside it owns the slot now."""
    reservation = ctx.state.reservations().get(slot)
    if reservation is not None and slot not in ctx.state.owners():
        reservation[1].reserved = False
        ctx.state.slot_index.touch(reservation[0].job)


# --- helpers


def _survivors(job: Job, group: Group, change: Rescale | None) -> list[Worker]:
    """Those that may have the whole state, in rank order; newcomers last."""
    switching = change is not None and change.phase is not RescalePhase.PREPARING
    phases = {WorkerPhase.MEMBER, WorkerPhase.READY} if switching else {WorkerPhase.MEMBER}
    found = [job.workers[member.worker] for member in job.members()]
    found = [worker for worker in found if worker.phase in phases]
    has_state = any(worker.phase is WorkerPhase.MEMBER for worker in found)
    return found if has_state and group.members else []


def _dealt(survivors: Sequence[Worker], batch: int) -> list[tuple[WorkerId, SlotId, int]]:
    share, rest = divmod(batch, len(survivors))
    return [
        (worker.worker, worker.slot, share + (rank < rest)) for rank, worker in enumerate(survivors)
    ]


def _members(rows: Sequence[tuple[WorkerId, SlotId, int]]) -> tuple[Member, ...]:
    return tuple(
        Member(rank=Rank(rank), slot=slot, local_batch=batch, worker=name)
        for rank, (name, slot, batch) in enumerate(rows)
    )


def _group(job: Job, version: Version, members: tuple[Member, ...]) -> Group:
    return Group(version=version, members=members, lr=job.spec.lr, base_batch=job.spec.batch_size)


def _needs_store(job: Job, change: Rescale) -> bool:
    several = len(change.group.members) > 1
    return several and job.group is not None and _names(job.group) != _names(change.group)


def _leaves(change: Rescale | None) -> bool:
    """Whether some members leave by agreement, and may exit before all is settled."""
    return change is not None and change.phase is RescalePhase.SWITCHING


def _nobody_left(job: Job) -> bool:
    """Whether nobody is left who may have the state; a newcomer has it when it is a member."""
    heirs = job.group.members if job.group else ()
    if job.change is not None and job.change.kind == RECOVER:
        heirs = (*heirs, *job.change.group.members)
    names = {member.worker for member in heirs}
    return not any(
        worker.phase is WorkerPhase.MEMBER
        or (worker.worker in names and worker.phase not in {WorkerPhase.GONE, WorkerPhase.LEAVING})
        for worker in job.workers.values()
    )


def _names(group: Group) -> list[WorkerId]:
    return [member.worker for member in group.members]


def _nodes(group: Group | None) -> list[NodeId]:
    return [node_of(member.slot) for member in group.members] if group else []


def _notify_all(ctx: HandlerContext, job: Job, change: Rescale) -> None:
    change.notified_nodes |= dict.fromkeys([*_nodes(change.group), *_nodes(job.group)])
    for node in change.notified_nodes:
        ctx.send_to(job, node)


def _sizes(old: Group, new: Group) -> str:
    slots = f"{len(old.members)} -> {len(new.members)} slots"
    return f"{slots}, batch {old.global_batch} -> {new.global_batch}"
