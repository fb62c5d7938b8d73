"""Jobs that have ended leave the state, so that it holds what lives and nothing else.

A sweep leaves when its last word went to its nodes and no trial of it goes on as a job. What nodes
that come back have to hear of it, which states they keep, stays for the latest.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from controlplane.core.commands import SendDelta, SendSweepDelta
from controlplane.core.desired_sweep import desired_sweep
from controlplane.core.handler_context import HandlerContext
from controlplane.core.history_records import JobLeft, SweepLeft
from controlplane.core.inputs import ControllerStarted
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import JobSweep, LeftSweep
from controlplane.core.state import State
from controlplane.core.sweep_read_model import SweepHistory
from schemas.ids import JobId, NodeId, Version
from schemas.messages.agent import SETTLED, GroupDelta
from schemas.messages.hopping import SweepDelta

AT_ONCE: Final = 200  # of one input: a journal of a former release has many
UNITS_AT_ONCE: Final = 20_000  # of sweeps, whose past is written down then
KEPT_LEFT: Final = 10_000  # of which nodes may still have processes
KEPT_SWEEPS: Final = 200  # of which nodes may still have states
KEPT_KEYS: Final = 10_000  # of submissions of jobs that left; older ones are in their records


def begin(ctx: HandlerContext, event: ControllerStarted) -> None:
    """From now on jobs leave; those that have ended already do so with the next inputs.

    Args:
        event: whether they do, and whether sweeps do; who left stays away.
    """
    ctx.state.ended_leave = ctx.state.ended_leave or event.ended_leave
    ctx.state.sweeps_leave = ctx.state.sweeps_leave or event.sweeps_leave
    for job in ctx.state.jobs.values():
        may_leave(ctx, job)


def may_leave(ctx: HandlerContext, job: Job) -> None:
    """Have a job leave with the next input, if nothing of it lives.

    Args:
        ctx: of this input: whoever looks at the job behind it still finds it.
    """
    if ctx.state.ended_leave and job.ended and not job.workers and _is_through(ctx.state, job):
        ctx.state.leaving[job.job] = None


def _is_through(state: State, job: Job) -> bool:
    """Whether nothing follows of a sweep any more, neither orders nor epochs of its trials."""
    if job.sweep is None:
        return True
    if not (state.sweeps_leave and job.sweep.closed) or job.job in state.sweeps:
        return False
    trials = (one.spec.stated_trial for one in state.jobs.values())
    return not any(trial is not None and trial.sweep == job.job for trial in trials)


def leave(ctx: HandlerContext) -> None:
    """Take those who wait to leave out of the state, some at a time.

    Args:
        ctx: of this input, before it is handled.
    """
    state, units = ctx.state, 0
    for name in list(islice(state.leaving, AT_ONCE)):
        if units >= UNITS_AT_ONCE:
            break
        del state.leaving[name]
        job = state.jobs.pop(name)
        if job.nodes:
            state.left[name] = job.version
        if job.key:
            del state.keys[job.key]
            state.left_keys[job.key] = name
        ctx.records.append(JobLeft(job=name, last=job))
        if job.sweep is not None:
            history = _leave_sweep(ctx, job, job.sweep)
            units += len(history.units)
        elif (trial := job.spec.stated_trial) is not None and trial.sweep in state.jobs:
            may_leave(ctx, state.jobs[trial.sweep])
    while len(state.left) > KEPT_LEFT:
        del state.left[next(iter(state.left))]
    while len(state.left_keys) > KEPT_KEYS:
        del state.left_keys[next(iter(state.left_keys))]


def _leave_sweep(ctx: HandlerContext, job: Job, sweep: JobSweep) -> SweepHistory:
    """The past of a sweep, which leaves with it."""
    state = ctx.state
    state.ended_sweeps.pop(job.job, None)
    last = {node: desired_sweep(state, job, sweep, node) for node in sweep.told}
    state.left_sweeps[job.job] = LeftSweep(
        revision=sweep.revision,
        attempts=sweep.engine.state.attempts,
        wanted={node: delta.wanted for node, delta in last.items()},
    )
    while len(state.left_sweeps) > KEPT_SWEEPS:
        del state.left_sweeps[next(iter(state.left_sweeps))]
    history = ctx.totals.sweeps.pop(job.job, SweepHistory())
    ctx.records.append(SweepLeft(job=job.job, history=history))
    return history


def keep_again(ctx: HandlerContext, node: NodeId) -> None:
    """Tell a node that comes back which states it keeps of sweeps that left, before all else."""
    deltas = []
    for name, left in ctx.state.left_sweeps.items():
        if node in left.wanted:
            left.revision += 1
            delta = SweepDelta(
                job=name, term=ctx.state.term, revision=left.revision,
                attempts=left.attempts, units=(), wanted=left.wanted[node],
            )  # fmt: skip
            deltas.append(SendSweepDelta(node, delta))
    ctx.out[:] = [*deltas, *ctx.out]


def stop_again(ctx: HandlerContext, name: JobId, version: Version, node: NodeId) -> None:
    """Order a node that comes back to stop what it runs of a job that left."""
    delta = GroupDelta(
        job=name, term=ctx.state.term, version=version, stage=SETTLED,
        group=None, spec=None, forget=True,
    )  # fmt: skip
    ctx.out.append(SendDelta(node, delta))
