"""Functions that accept, restart, retry and end jobs, and remove ended jobs from the state.

Ended jobs leave the state, so that its size depends on live jobs only. A sweep leaves when its
nodes have received its last delta and none of its trials continues as a job. For the latest of
these sweeps, the state lists which trial states each node should keep, because lost nodes may
return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from msgspec import UNSET

from controlplane.core.commands import SendDelta, SendSweepDelta
from controlplane.core.desired_state import desired_sweep
from controlplane.core.handler_context import HandlerContext
from controlplane.core.history import Decided, JobLeft, SweepHistory, SweepLeft
from controlplane.core.inputs import OrderTooLarge, RunExpired
from controlplane.core.model import rescale as rescales
from controlplane.core.model.job import Accounting, Job, lower_local_limit, times
from controlplane.core.model.job_phases import (
    NEXT,
    Ended,
    JobTrigger,
    Paused,
    Phase,
    Rescaling,
    Starting,
    WithGroup,
)
from controlplane.core.model.node import MAX_STRIKES, Drain, Node
from controlplane.core.model.rescale import RescaleTrigger
from controlplane.core.model.sweep import JobSweep, LeftSweep
from controlplane.core.model.worker import WorkerPhase, WorkerTrigger
from controlplane.core.state import LeftJob, State, pause_before
from controlplane.policy.sharing.start_times import PastRun
from schemas.ids import JobId, NodeId, Seconds, node_of
from schemas.jobs import EndWarning, JobSpec
from schemas.nodes import NOTICE
from schemas.wire.agent import MAX_NOTICE_S, SETTLED, GroupDelta, NodeNoticed
from schemas.wire.client import Decision, Size
from schemas.wire.feed import Detail
from schemas.wire.sweeps import SweepDelta

MAX_LEFT_JOBS: Final = 10_000  # jobs with processes that may still exist on nodes
MAX_ENDED_SWEEPS: Final = 200  # sweeps with states that may still exist on nodes
MAX_LEFT_KEYS: Final = 10_000  # submission keys of jobs that left; the journal has older ones


def schedule_leave(ctx: HandlerContext, job: Job) -> None:
    """Schedule the removal of a job with the next input, if the job has ended and has no processes.

    Handlers of the current input still find the job in the state.
    """
    if job.ended and not job.workers and _is_finished(ctx.state, job):
        ctx.state.leaving_jobs[job.job] = None


def _is_finished(state: State, job: Job) -> bool:
    """True unless the job's sweep still has deltas to send or trials that are jobs in the state."""
    if job.sweep is None:
        return True
    if not job.sweep.closed or job.job in state.sweeps:
        return False
    trials = (one.spec.stated_trial for one in state.jobs.values())
    return not any(trial is not None and trial.sweep == job.job for trial in trials)


def remove_leaving(ctx: HandlerContext) -> None:
    """Remove the jobs that are scheduled to leave. Call this before an input is handled."""
    state = ctx.state
    names, state.leaving_jobs = list(state.leaving_jobs), {}
    for name in names:
        job = state.jobs.pop(name)
        if job.nodes:
            state.left_jobs[name] = LeftJob(job.version, job.journal)
        if job.key:
            del state.submission_keys[job.key]
            state.left_submission_keys[job.key] = name
        ctx.records.append(JobLeft(job=name, last=job))
        if job.sweep is not None:
            _leave_sweep(ctx, job, job.sweep)
        elif (trial := job.spec.stated_trial) is not None and trial.sweep in state.jobs:
            schedule_leave(ctx, state.jobs[trial.sweep])
    while len(state.left_jobs) > MAX_LEFT_JOBS:
        del state.left_jobs[next(iter(state.left_jobs))]
    while len(state.left_submission_keys) > MAX_LEFT_KEYS:
        del state.left_submission_keys[next(iter(state.left_submission_keys))]


def _leave_sweep(ctx: HandlerContext, job: Job, sweep: JobSweep) -> None:
    """Remove a sweep from the state, and write its history to a record."""
    state = ctx.state
    state.ended_sweeps.pop(job.job, None)
    last = {node: desired_sweep(state, job, sweep, node) for node in sweep.notified_nodes}
    state.left_sweeps[job.job] = LeftSweep(
        revision=sweep.revision,
        attempts=sweep.engine.state.attempts,
        wanted={node: delta.wanted for node, delta in last.items()},
        journal=job.journal,
        states_key=sweep.states_key,
    )
    while len(state.left_sweeps) > MAX_ENDED_SWEEPS:
        del state.left_sweeps[next(iter(state.left_sweeps))]
    history = ctx.totals.sweeps.pop(job.job, SweepHistory())
    ctx.records.append(SweepLeft(job=job.job, history=history))


def resend_kept_states(ctx: HandlerContext, node: NodeId) -> None:
    """Send a returning node its list of states to keep for sweeps that left the state.

    These deltas precede all other commands of the input.
    """
    deltas = []
    for name, left in ctx.state.left_sweeps.items():
        if node in left.wanted:
            left.revision += 1
            delta = SweepDelta(
                job=name, term=ctx.state.term, revision=left.revision,
                attempts=left.attempts, units=(), wanted=left.wanted[node], journal=left.journal,
                states_key=left.states_key,
            )  # fmt: skip
            deltas.append(SendSweepDelta(node, delta))
    ctx.out[:] = [*deltas, *ctx.out]


def resend_stop(ctx: HandlerContext, name: JobId, left: LeftJob, node: NodeId) -> None:
    """Order a returning node to stop its processes of a job that left the state."""
    delta = GroupDelta(
        job=name, journal=left.journal, term=ctx.state.term, version=left.version, stage=SETTLED,
        group=None, spec=None, forget=True,
    )  # fmt: skip
    ctx.out.append(SendDelta(node, delta))


TIMED_OUT: Final = 124  # exit code of a rigid job that reached its time limit, as of timeout(1)
STEADY_S: Final = 600.0  # a rigid job's run of this length ends a row of losses, as an epoch does
MAX_LOSSES: Final = 8  # groups lost in a row without a finished epoch
_ENDS: Final = {
    JobTrigger.FINISHED: Phase.SUCCEEDED,
    JobTrigger.GAVE_UP: Phase.FAILED,
    JobTrigger.CANCELLED: Phase.CANCELLED,
    JobTrigger.REJECTED: Phase.REJECTED,
}


def restart_from_checkpoint(ctx: HandlerContext, job: Job, reason: str) -> None:
    """Restart a job from its last checkpoint, because its training state is lost.

    The job fails at `MAX_LOSSES` losses without a finished epoch. If its user set `on_loss = fail`,
    the job fails at the first loss of a started process. `reason` is shown to users, followed by
    the consequence.
    """
    if job.spec.rigid and ctx.now - job.accounting.since >= STEADY_S:
        job.attempts.losses = 0
    job.attempts.losses += 1
    if job.spec.fails_on_loss and any(w.pid is not None for w in job.group_workers()):
        end(ctx, job, JobTrigger.GAVE_UP, f"{reason}; on_loss = fail")
        return
    if job.attempts.losses >= MAX_LOSSES:
        reason = f"{reason}; {MAX_LOSSES} losses in a row without a finished epoch"
        end(ctx, job, JobTrigger.GAVE_UP, reason)
        return
    again = "restarts from the beginning"
    if job.sweep is not None:
        again = "finished units are kept"
    elif job.progress.checkpoint:
        again = f"resumes after epoch {job.progress.epoch}"
    withdraw(ctx, job, "lost", JobTrigger.GROUP_LOST, f"{reason}; {again}")


def fail(ctx: HandlerContext, job: Job, reason: str) -> None:
    """Handle a failure of the script. Retry after a pause, or end the job if no retry is left.

    If the batch did not fit a slot, the job is retried with a smaller batch, and no failure is
    counted. Users see `reason`, followed by the consequence.
    """
    if lower_local_limit(job, reason):
        reason = f"{reason}; retrying with at most {job.progress.fitting_batch} samples per slot"
        withdraw(ctx, job, "failed", JobTrigger.SCRIPT_FAILED, reason)
        return
    attempts = job.attempts
    attempts.failures += 1
    tries = job.spec.retries + 1
    attempts.last_failure = f"try {attempts.failures} of {tries} failed: {reason}"
    if isinstance(job.status, WithGroup) and job.status.script.refused:
        again = "; not retried: the library would refuse it again" if job.spec.retries else ""
        end(ctx, job, JobTrigger.GAVE_UP, reason + again)
        return
    if job.failing_is_final:
        tried = f" (try {attempts.failures} of {attempts.failures})" if job.spec.retries else ""
        end(ctx, job, JobTrigger.GAVE_UP, reason + tried)
        return
    pause_s = pause_before(attempts.failures)
    attempts.next_start_at = Seconds(ctx.now + pause_s)
    reason = f"{attempts.last_failure}; retrying in {pause_s:.0f} s"
    withdraw(ctx, job, "failed", JobTrigger.SCRIPT_FAILED, reason)


MAX_BLAMES: Final = 3  # failures of one job on the only node that it ever got


def blame_node(ctx: HandlerContext, job: Job, name: NodeId, reason: str) -> bool:
    """Retry a job on another node after a failure before training. The failure is not counted.

    The cause may be the node or the script. If the job also fails on a second node, the cause is
    the script, and the failure on the first node is forgotten. A node is no longer used after
    `MAX_STRIKES` jobs in a row have failed on it. If others have jobs, failures of one user do not
    suffice, so that no user's scripts can take a node from them.

    Returns False if the script is to blame: the library refused it, the job also failed on another
    node, or it failed `MAX_BLAMES` times here. Also returns False if there is no other node, for
    sweeps, and for jobs with `on_loss = fail`.
    """
    state, blamed, status = ctx.state, job.attempts.blamed, job.status
    node = state.nodes.get(name)
    others = any(one.usable for one in state.nodes.values() if one.node != name)
    refused = isinstance(status, WithGroup) and status.script.refused
    if node is None or blamed.keys() - {name}:
        for former in blamed:
            if (one := state.nodes.get(former)) is not None:
                _set_strikes(ctx, one, {k: v for k, v in one.strikes.items() if k != job.job})
        return False
    if refused or not others or job.sweep is not None or job.spec.fails_on_loss:
        return False
    if blamed.get(name, 0) >= MAX_BLAMES:
        return False
    blamed[name] = blamed.get(name, 0) + 1
    _set_strikes(ctx, node, {**node.strikes, job.job: job.user})
    job.attempts.next_start_at = Seconds(ctx.now + pause_before(blamed[name]))
    doubt = f"before training on node {name}, which may be the cause: tries another one"
    withdraw(ctx, job, "failed", JobTrigger.SCRIPT_FAILED, f"{reason}; {doubt}, not counted")
    return True


def clear_strikes(ctx: HandlerContext, names: Iterable[NodeId]) -> None:
    """Forget failures on nodes where a job trains now, and on nodes that an operator returned."""
    for name in names:
        if (node := ctx.state.nodes.get(name)) is not None and node.strikes:
            _set_strikes(ctx, node, {})


def _set_strikes(ctx: HandlerContext, node: Node, strikes: dict[JobId, str]) -> None:
    was, node.strikes = node.is_suspected, strikes
    jobs, users = ctx.state.jobs, {*strikes.values()}
    shared = len(users) > 1 or all(jobs[name].user in users for name in ctx.state.active)
    node.is_suspected = len(strikes) >= MAX_STRIKES and shared
    if node.is_suspected is was:
        return
    ctx.state.slot_index.touch_node(node.node)
    ctx.plan_needed = True
    if node.is_suspected:
        ctx.announce("node.unhealthy", node=node, detail={"reason": node.suspicion})
    else:
        ctx.announce("node.healthy", node=node)


def withdraw(ctx: HandlerContext, job: Job, outcome: str, trigger: JobTrigger, reason: str) -> None:
    """Order the job's workers to stop, and pause the job until another group is ordered.

    `outcome` is recorded for the group.
    """
    resumes = isinstance(job.status, Starting) and job.status.resumes
    _record_failure(ctx, job, outcome, reason)
    nodes = _dismiss(ctx, job, outcome)
    ctx.move(job, trigger, Paused(suspended=resumes), reason)
    ctx.send_to(job, nodes)
    ctx.announce_phase(job)
    ctx.plan_needed = True


def suspended(
    ctx: HandlerContext, job: Job, status: Rescaling, reason: str, detail: Detail | None = None
) -> None:
    """Pause a job whose suspension is complete. Workers that still exist are about to exit."""
    rescales.advance(job.job, status.change, RescaleTrigger.FORMED)
    job.progress.last_batch = status.group.global_batch
    job.attempts.losses, job.attempts.changes, job.attempts.recoveries = 0, 0, 0
    job.accounting.rescales += 1
    ctx.totals.rescales += 1
    for one in job.workers.values():
        if one.phase is WorkerPhase.MEMBER:
            ctx.advance_worker(job, one, WorkerTrigger.RETIRED)
        elif one.phase not in {WorkerPhase.EXITED, WorkerPhase.LEAVING, WorkerPhase.RETIRING}:
            ctx.advance_worker(job, one, WorkerTrigger.DISMISSED)
    ctx.state.deadlines.clear(job.job)
    ctx.conclude(job, "suspended")
    ctx.advance(job, JobTrigger.SUSPENDED, Paused(suspended=True), reason, detail)
    nodes = (node_of(member.slot) for member in status.group.members)
    ctx.send_to(job, dict.fromkeys([*nodes, *status.change.notified_nodes]))
    forget_exited(ctx, job)
    ctx.plan_needed = True


def end(
    ctx: HandlerContext, job: Job, trigger: JobTrigger, reason: str, more: Detail | None = None
) -> None:
    """End the job, and order its nodes to stop all processes of the job.

    Args:
        trigger: finished, gave up, cancelled or rejected.
        more: numbers for programs, in addition to exit code and epoch.
    """
    ended: Detail = {"exit_code": job.attempts.exit_code, "epoch": job.progress.epoch}
    detail: Detail = {**ended, **(more or {})}
    failures = job.attempts.failures
    if trigger is JobTrigger.GAVE_UP:
        _record_failure(ctx, job, "failed", reason)
    elif trigger is JobTrigger.FINISHED and failures:
        reason = f"{reason}; succeeded at try {failures + 1} of {job.spec.retries + 1}"
    nodes = dict.fromkeys([*_dismiss(ctx, job, trigger.value), *job.nodes])
    ctx.advance(job, trigger, Ended(phase=_ENDS[trigger]), reason, detail)
    ctx.totals.job_ended(job, ctx.now)
    _keep_length(ctx.state, job, trigger)
    del ctx.state.active[job.job]
    ctx.ended.append(job)
    ctx.state.limited_runs.pop(job.job, None)
    ctx.state.rigid.pop(job.job, None)
    ctx.state.arrays.pop(job.job, None)
    ctx.state.early.pop(job.job, None)
    ctx.state.overrides.pop(job.job, None)
    job.override, job.override_wait_reason = None, ""
    ctx.send_to(job, nodes)
    _release_sweep(ctx, job)
    forget_exited(ctx, job)
    ctx.plan_needed = True


def _record_failure(ctx: HandlerContext, job: Job, outcome: str, reason: str) -> None:
    """Record that a job lost its group, among the decisions about its slots."""
    decision = Decision(
        time=ctx.now, before=job.size, to=Size(), reason=reason, code=outcome, by="cluster",
        outcome=outcome,
    )  # fmt: skip
    ctx.records.append(Decided(job=job.job, decision=decision))


KEPT_RUNS: Final = 32  # of each family
KEPT_FAMILIES: Final = 300


def _keep_length(state: State, job: Job, trigger: JobTrigger) -> None:
    """Keep how long a job has run, from which starts of other jobs are predicted.

    A program that failed counts as well, because it held its slots until then.
    """
    account, limit_s = job.accounting, job.spec.run_limit_s
    counts = trigger is JobTrigger.FINISHED or (job.spec.rigid and trigger is JobTrigger.GAVE_UP)
    if not counts or not account.running_s or job.sweep is not None:
        return
    if state.sharing is None:  # an older journal, whose snapshots have no lengths
        return
    run = PastRun(
        samples=job.progress.samples_done,
        slot_s=account.slot_s,
        run_s=account.running_s,
        share=account.running_s / (limit_s + job.spec.grace_limit_s) if limit_s else None,
    )
    for key in (job.family, "rigid" if job.spec.rigid else "elastic"):
        state.past_runs[key] = (*state.past_runs.pop(key, ()), run)[-KEPT_RUNS:]
    while len(state.past_runs) > KEPT_FAMILIES:
        del state.past_runs[next(iter(state.past_runs))]


def _release_sweep(ctx: HandlerContext, job: Job) -> None:
    """Update the nodes of an ended sweep after the end of `job`, if `job` was one of its trials.

    The nodes may forget the sweep when no trial needs its states any more.
    """
    trial = job.spec.stated_trial
    former = ctx.state.jobs.get(trial.sweep) if trial is not None else None
    if former is not None and former.ended and former.sweep is not None:
        ctx.send_to(former, dict.fromkeys([*former.nodes, *former.sweep.notified_nodes]))


def next_run_check(state: State, job: Job, now: Seconds) -> Seconds:
    """Return when a job must end or be warned, whichever is first."""
    if job.job not in state.limited_runs:
        return Seconds(math.inf)
    left_s, _ = _time_left(job, now)
    warning = _pending_warning(job)
    return Seconds(now + left_s - (0.0 if warning is None else warning.before_s))


def is_expired(job: Job, now: Seconds) -> bool:
    """True if a job must end or be warned now."""
    left_s, _ = _time_left(job, now)
    warning = _pending_warning(job)
    return left_s <= (0.0 if warning is None else max(0.0, warning.before_s))


def _time_left(job: Job, now: Seconds) -> tuple[float, str]:
    """Return the seconds until a job must end, or infinity, and the reason.

    A waiting job with `max_run_s` must start so early that it can end before its deadline.
    """
    limit_s, latest = job.spec.run_limit_s, job.spec.latest_end(job.submitted_at)
    run_s = math.inf if limit_s is None else limit_s - times(job, now)[1]
    left_s, why = math.inf, ""
    if job.group is not None:
        left_s, why = run_s, f"stopped after {limit_s or 0:g} s, its max_run_s"
    if latest is None or latest - now >= left_s:
        return left_s, why
    if job.group is not None or job.array is not None or limit_s is None:
        return latest - now, "its deadline has passed"
    return latest - now - run_s, "it cannot end before its deadline any more"


def _pending_warning(job: Job) -> EndWarning | None:
    """Return the warning that the job must still get before its end."""
    runs = job.phase is Phase.RUNNING and job.attempts.warned != job.version
    return job.spec.stated_warning if runs else None


def on_run_expired(ctx: HandlerContext, event: RunExpired) -> None:
    """End a job whose time is over, or warn its processes before.

    Workers get TERM, and KILL after a grace. A job that waits is cancelled.
    """
    job = ctx.state.jobs.get(event.job)
    if job is None or job.ended:
        return
    left_s, why = _time_left(job, ctx.now)
    if left_s <= 0.0:
        if job.spec.rigid and job.group is not None:
            job.attempts.exit_code = TIMED_OUT
        waits = job.group is None
        end(ctx, job, JobTrigger.CANCELLED if waits else JobTrigger.GAVE_UP, why)
    elif (warning := _pending_warning(job)) is not None and left_s <= warning.before_s:
        job.attempts.warned = job.version
        ctx.send(job)
        ctx.announce("job.warned", job, {"signal": warning.signal, "left_s": left_s})


def on_order_too_large(ctx: HandlerContext, event: OrderTooLarge) -> None:
    """Fail a job if an order for one of its nodes exceeds the largest message."""
    job = ctx.state.jobs.get(event.job)
    if job is None or (job.phase, JobTrigger.GAVE_UP) not in NEXT:
        return
    reason = f"orders for node {event.node} take {event.size} bytes, the limit is {event.most}"
    remedy = "move large args, env and choices into files in the working directory"
    end(ctx, job, JobTrigger.GAVE_UP, f"{reason}: {remedy}")


def _dismiss(ctx: HandlerContext, job: Job, outcome: str) -> list[NodeId]:
    """Order every worker of the job to stop. Return the nodes that must be notified."""
    ctx.conclude(job, outcome)
    job.version = job.next_version
    if job.group is not None:
        job.progress.last_batch = job.group.global_batch
    ctx.state.deadlines.clear(job.job)
    for worker in job.workers.values():
        if worker.phase not in {WorkerPhase.LEAVING, WorkerPhase.EXITED}:
            ctx.advance_worker(job, worker, WorkerTrigger.DISMISSED)
    return list(dict.fromkeys(node_of(worker.slot) for worker in job.workers.values()))


def forget_exited(ctx: HandlerContext, job: Job) -> None:
    """Remove exited workers from the job, except members of its groups.

    A job without workers leaves `jobs_with_processes`. If the job has ended, its removal is
    scheduled.
    """
    counted = {member.worker for member in job.members()}
    job.workers = {
        name: worker
        for name, worker in job.workers.items()
        if worker.phase is not WorkerPhase.EXITED or name in counted
    }
    if not job.workers:
        ctx.state.jobs_with_processes.pop(job.job, None)
        schedule_leave(ctx, job)


def accept(ctx: HandlerContext, spec: JobSpec, snapshot: str, user: str, project: str) -> Job:
    """Add a job to the queue and return the job.

    Args:
        snapshot: digest of the stored archive of the job's working directory.
        project: its members see the job. If it is empty, only the user sees the job.
    """
    state = ctx.state
    state.jobs_accepted += 1
    name = JobId(f"{spec.name}-{state.jobs_accepted}")
    job = Job(
        job=name,
        spec=spec,
        snapshot=snapshot,
        user=user,
        project=project,
        journal=state.journal,
        submitted_at=ctx.now,
        accounting=Accounting(since=ctx.now),
    )
    state.job_counters.add(job)
    state.jobs[name] = job
    state.active[name] = None
    single = spec.indices is None  # an array runs nothing itself
    if (spec.run_limit_s is not None and single) or spec.deadline is not UNSET:
        state.limited_runs[name] = None
    if spec.rigid and single:
        state.rigid[name] = None
    ctx.changed_jobs[name] = None
    ctx.announce("job.submitted", job, {"name": spec.name, "user": user})
    ctx.plan_needed = True
    return job


def start_drain(ctx: HandlerContext, node: Node, drain: Drain, within_s: float | None) -> None:
    """Drain or cordon a node. An earlier drain is replaced."""
    node.drain = drain
    track_drains(ctx.state, node)
    detail: Detail = {"user": drain.user, "reason": drain.reason, "within_s": within_s}
    announce_node(ctx, node, "node.cordoned" if drain.cordon else "node.draining", detail)


def end_drain(ctx: HandlerContext, node: Node, user: str) -> None:
    """Return a drained node to service."""
    node.drain = None
    track_drains(ctx.state, node)
    announce_node(ctx, node, "node.undrained", {"user": user})


def track_drains(state: State, node: Node) -> None:
    """Record whether jobs have to leave a node."""
    state.unchecked_drains.pop(node.node, None)
    state.idle_drains.discard(node.node)
    state.reserved_nodes.pop(node.node, None)
    if any(not drain.cordon for drain in node.drains):
        state.draining[node.node] = None
        state.unchecked_drains[node.node] = None
        if node.keeps:
            state.reserved_nodes[node.node] = None
    else:
        state.draining.pop(node.node, None)


def take_notice(ctx: HandlerContext, node: Node, notice: NodeNoticed) -> None:
    """Drain a node that said that it will go away. An earlier deadline of a drain stays.

    A drain that a user ordered keeps its user and reason. The autoscaler recognises its own drains
    by the reason.
    """
    if not 0.0 <= notice.within_s <= MAX_NOTICE_S:  # also NaN, which the wire lets pass
        return
    deadline, before = Seconds(ctx.now + notice.within_s), node.drain
    if before is not None and before.deadline is not None and before.deadline <= deadline:
        return
    order = None if before is None or before.noticed else before
    drain = Drain(
        user=f"{NOTICE}{node.node}" if order is None else order.user,
        reason=notice.reason if order is None else order.reason,
        since=ctx.now,
        deadline=deadline,
        noticed=order is None,
        until=None if before is None else before.until,
    )
    start_drain(ctx, node, drain, notice.within_s)


def announce_node(ctx: HandlerContext, node: Node, event: str, detail: Detail) -> None:
    """Announce a change of a node, and let a plan follow."""
    ctx.state.slot_index.touch_node(node.node)
    ctx.announce(event, node=node, detail=detail)
    ctx.plan_needed = True


def record_problems(ctx: HandlerContext, node: Node, problems: tuple[str, ...]) -> None:
    """Record the problems that keep a node from starting workers. An empty tuple clears them.

    While a node has problems, no new workers are started there. Running workers continue.
    """
    if problems == node.problems:
        return
    if bool(problems) is not bool(node.problems):
        ctx.state.slot_index.touch_node(node.node)
        ctx.plan_needed = True
    node.problems = problems
    if problems:
        ctx.announce("node.unhealthy", node=node, detail={"reason": "; ".join(problems)})
    else:
        ctx.announce("node.healthy", node=node)
