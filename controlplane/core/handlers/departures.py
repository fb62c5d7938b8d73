"""Jobs that have ended leave the state, so that it holds what lives and nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Final

from controlplane.core.commands import SendDelta
from controlplane.core.handler_context import HandlerContext
from controlplane.core.history_records import JobLeft
from controlplane.core.model.job import Job
from schemas.ids import JobId, NodeId, Version
from schemas.messages.agent import SETTLED, GroupDelta

AT_ONCE: Final = 200  # of one input: a journal of a former release has many
KEPT_LEFT: Final = 10_000  # of which nodes may still have processes
KEPT_KEYS: Final = 10_000  # of submissions of jobs that left; older ones are in their records


def begin(ctx: HandlerContext) -> None:
    """From now on jobs leave; those that have ended already do so with the next inputs.

    Args:
        ctx: of this input.
    """
    ctx.state.ended_leave = True
    for job in ctx.state.jobs.values():
        may_leave(ctx, job)


def may_leave(ctx: HandlerContext, job: Job) -> None:
    """Have a job leave with the next input, if nothing of it lives.

    Args:
        ctx: of this input: whoever looks at the job behind it still finds it.
        job: in any phase. Sweeps stay: nodes that come back hear of them.
    """
    if ctx.state.ended_leave and job.ended and not job.workers and job.sweep is None:
        ctx.state.leaving[job.job] = None


def leave(ctx: HandlerContext) -> None:
    """Take those who wait to leave out of the state, some at a time.

    Args:
        ctx: of this input, before it is handled.
    """
    state = ctx.state
    for name in list(islice(state.leaving, AT_ONCE)):
        del state.leaving[name]
        job = state.jobs.pop(name)
        if job.nodes:
            state.left[name] = job.version
        if job.key:
            del state.keys[job.key]
            state.left_keys[job.key] = name
        ctx.records.append(JobLeft(job=name, last=job))
    while len(state.left) > KEPT_LEFT:
        del state.left[next(iter(state.left))]
    while len(state.left_keys) > KEPT_KEYS:
        del state.left_keys[next(iter(state.left_keys))]


def stop_again(ctx: HandlerContext, name: JobId, version: Version, node: NodeId) -> None:
    """Order a node that comes back to stop what it runs of a job that left.

    Args:
        ctx: of this input.
        name: of the job.
        version: of its end.
        node: where something of it runs.
    """
    delta = GroupDelta(
        job=name, term=ctx.state.term, version=version, stage=SETTLED,
        group=None, spec=None, forget=True,
    )  # fmt: skip
    ctx.out.append(SendDelta(node, delta))
