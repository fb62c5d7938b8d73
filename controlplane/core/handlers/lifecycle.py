"""A job as a whole: how it starts from nothing or a checkpoint, is lost, fails, ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from controlplane.core.handler_context import HandlerContext
from controlplane.core.model import worker as workers
from controlplane.core.model.exit_cause import ExitCause, exit_cause
from controlplane.core.model.job import KEPT_CHANGES, Job, JobTrigger, settle_time
from controlplane.core.model.worker import Worker, WorkerPhase, WorkerTrigger
from controlplane.policy.api import Reason
from schemas.groups import Group, Member
from schemas.ids import NodeId, Rank, Seconds, SlotId, Version, node_of, worker_id
from schemas.messages.agent import PREPARE, SETTLED, START, SWITCH, GroupFormed, WorkerExited
from schemas.messages.client import Decision, Size, VersionInfo
from schemas.messages.feed import Detail

START_LIMIT_S: Final = 1800.0  # from the order to a formed group
RETRY_FIRST_S: Final = 1.0  # before something that failed is tried again; doubles
RETRY_LONGEST_S: Final = 60.0
POLICY, OPERATOR, CLUSTER = "policy", "operator", "cluster"  # who decides
MAX_LOSSES: Final = 8  # groups lost in a row without a finished epoch between


def start(
    ctx: HandlerContext, job: Job, placed: Mapping[SlotId, int], reason: Reason, by: str = POLICY
) -> None:
    """Order a group on free slots, from the job's checkpoint if it has one."""
    version = Version(job.version + 1)
    members = tuple(
        Member(
            rank=Rank(rank),
            slot=slot,
            local_batch=batch,
            worker=worker_id(job.job, version, Rank(rank)),
        )
        for rank, (slot, batch) in enumerate(placed.items())
    )
    group = Group(
        version=version,
        members=members,
        lr=job.spec.lr,
        base_batch=job.spec.batch_size,
        resume=job.checkpoint,
    )
    job.version, job.stage, job.group, job.hand_waits = version, PREPARE, group, ""
    add_workers(job, members, version)
    note_version(ctx, job, group, START, reason, by=by)
    ctx.state.jobs_with_processes[job.job] = None
    ctx.state.starts[job.job] = (Seconds(ctx.now + START_LIMIT_S), version)
    slots = ", ".join(member.slot for member in members)
    resumes = f", resumes after epoch {job.epoch}" if job.checkpoint else ""
    ctx.advance(job, JobTrigger.GROUP_ORDERED, f"{reason.text}: {slots}{resumes}", {"slots": slots})
    ctx.send(job)


def add_workers(job: Job, members: tuple[Member, ...], version: Version) -> None:
    """Give `job` a worker for each of `members`, which are new with `version`."""
    for member in members:
        job.workers[member.worker] = Worker(
            worker=member.worker,
            version=version,
            rank=member.rank,
            slot=member.slot,
            local_batch=member.local_batch,
        )
        job.nodes[node_of(member.slot)] = None


def note_version(
    ctx: HandlerContext, job: Job, group: Group, kind: str, reason: Reason, *, by: str
) -> None:
    """Write down that `group` was ordered, and why."""
    to = Size(slots=tuple(member.slot for member in group.members), batch=group.global_batch)
    was = Size() if kind == START else job.size
    decision = Decision(
        time=ctx.now,
        was=was,
        to=to,
        why=reason.text,
        code=reason.code,
        by=by,
        numbers=reason.numbers,
        version=group.version,
    )
    job.decisions = [*job.decisions[-(KEPT_CHANGES - 1) :], decision]
    info = VersionInfo(
        version=group.version,
        resumed_epoch=job.epoch,
        kind=kind,
        resumed_step=job.step,
        time=ctx.now,
        slots=tuple(member.slot for member in group.members),
        global_batch=group.global_batch,
    )
    job.versions = [*job.versions, info]


def conclude_version(
    ctx: HandlerContext, job: Job, outcome: str, news: GroupFormed | None = None
) -> None:
    """Write what became of the last version that was ordered."""
    if not job.versions or job.versions[-1].outcome:
        return
    last = job.versions[-1]
    took_s = ctx.now - last.time
    last = msgspec.structs.replace(last, outcome=outcome, took_s=took_s)
    if news is not None:
        last = msgspec.structs.replace(last, resumed_epoch=news.epoch, resumed_step=news.step)
    job.versions[-1] = last
    decided = job.decisions[-1] if job.decisions else None
    if decided is not None and decided.version == last.version:
        job.decisions[-1] = msgspec.structs.replace(decided, outcome=outcome, took_s=took_s)


def start_ready(ctx: HandlerContext, job: Job) -> None:
    """A worker of a group that is started is ready: when all are, they form it."""
    if job.group is None or job.change is not None or job.stage != PREPARE:
        return
    phases = {worker.phase for worker in job.group_workers()}
    if phases == {WorkerPhase.READY}:
        job.stage = SWITCH
        ctx.send(job)
    elif phases >= {WorkerPhase.READY, WorkerPhase.GONE}:
        fail(ctx, job, "its script ended on one slot, while another waited for it")


def start_formed(ctx: HandlerContext, job: Job, news: GroupFormed) -> None:
    """A worker of a group that is started is a member: when all are, the job trains."""
    group = job.group
    if group is None or any(worker.formed != group.version for worker in job.group_workers()):
        return
    ctx.state.starts.pop(job.job, None)
    conclude_version(ctx, job, "formed", news)
    job.started_s = job.versions[-1].took_s
    job.stage, job.recoveries = SETTLED, 0
    job.rescales += job.suspended
    job.suspended = False
    why = f"{trains_on(group)}"
    if news.step:
        why += f", resumed after epoch {news.epoch}, step {news.step}"
    ctx.advance(
        job, JobTrigger.GROUP_FORMED, why, {"slots": len(group.members), "epoch": news.epoch}
    )
    ctx.send(job)
    ctx.ask = True


def trains_on(group: Group) -> str:
    """What a job does, in words."""
    slots = len(group.members)
    return f"trains on {slots} slot{'s' * (slots != 1)}, batch {group.global_batch}"


def conclude(ctx: HandlerContext, job: Job, news: WorkerExited) -> None:
    """Decide what the end of a worker that the group cannot do without means for its job."""
    outcome, why = exit_cause(job, news)
    if outcome is ExitCause.LOST:
        restart_from_checkpoint(ctx, job, why)
        return
    job.exit_code = 128 + news.signal if news.signal is not None else news.code
    if outcome is ExitCause.FAILED:
        fail(ctx, job, why)
    elif all(worker.phase is WorkerPhase.GONE for worker in job.group_workers()):
        end(ctx, job, JobTrigger.FINISHED, why)
    else:
        start_ready(ctx, job)


def restart_from_checkpoint(ctx: HandlerContext, job: Job, why: str) -> None:
    """Nobody has the state any more: start again from the last checkpoint."""
    job.losses += 1
    if job.losses >= MAX_LOSSES:
        end(ctx, job, JobTrigger.GAVE_UP, f"{why}, for the {MAX_LOSSES}th time without an epoch")
        return
    again = f"resumes after epoch {job.epoch}" if job.checkpoint else "starts again"
    withdraw(ctx, job, "lost")
    ctx.advance(job, JobTrigger.GROUP_LOST, f"{why}; {again}")
    ctx.ask = True


def pause_before(tries: int) -> float:
    """Seconds before the next try, after `tries` that failed."""
    return float(min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** min(tries - 1, 10)))


def fail(ctx: HandlerContext, job: Job, why: str) -> None:
    """The script failed: try again while retries are left."""
    job.failures += 1
    if job.failing_is_final:
        tried = f" (try {job.failures} of {job.failures})" if job.spec.retries else ""
        end(ctx, job, JobTrigger.GAVE_UP, why + tried)
        return
    pause_s = pause_before(job.failures)
    job.ready_at = Seconds(ctx.now + pause_s)
    job.script_error = ""
    withdraw(ctx, job, "failed")
    left = job.spec.retries - job.failures + 1
    ctx.advance(
        job, JobTrigger.SCRIPT_FAILED, f"{why}; tried again in {pause_s:.0f} s, {left} left"
    )
    ctx.ask = True


def end(ctx: HandlerContext, job: Job, trigger: JobTrigger, why: str) -> None:
    """The job is over: nothing of it may run anywhere."""
    detail: Detail = {"exit_code": job.exit_code, "epoch": job.epoch}
    nodes_used = dict.fromkeys([*dismiss(ctx, job, trigger.value), *job.nodes])
    ctx.advance(job, trigger, why, detail)
    del ctx.state.active[job.job]
    ctx.state.hands.pop(job.job, None)
    job.hand, job.hand_waits = None, ""
    for node in nodes_used:
        ctx.send_to(job, node)
    drop_gone(ctx, job)
    ctx.ask = True


def withdraw(ctx: HandlerContext, job: Job, outcome: str) -> None:
    """Take the job's group away, and tell its nodes."""
    for node in dismiss(ctx, job, outcome):
        ctx.send_to(job, node)


def dismiss(ctx: HandlerContext, job: Job, outcome: str) -> list[NodeId]:
    """Take the group away; returns the nodes that must hear of it."""
    conclude_version(ctx, job, outcome)
    settle_time(job, ctx.now)
    job.version, job.stage = Version(job.version + 1), SETTLED
    job.last_batch = job.group.global_batch if job.group else job.last_batch
    job.group, job.change = None, None
    ctx.state.starts.pop(job.job, None)
    for worker in job.workers.values():
        if worker.phase not in {WorkerPhase.LEAVING, WorkerPhase.GONE}:
            workers.advance(worker, WorkerTrigger.DISMISSED)
    return list(dict.fromkeys(node_of(worker.slot) for worker in job.workers.values()))


def drop_gone(ctx: HandlerContext, job: Job) -> None:
    """Forget processes that were seen gone, but for those that a group still counts on."""
    counted = {member.worker for member in job.members()}
    job.workers = {
        name: worker
        for name, worker in job.workers.items()
        if worker.phase is not WorkerPhase.GONE or name in counted
    }
    if not job.workers:
        ctx.state.jobs_with_processes.pop(job.job, None)
