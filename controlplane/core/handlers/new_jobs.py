"""A job comes into being: a user submitted it, or it is a trial that left its sweep."""

from __future__ import annotations

from controlplane.core.handler_context import HandlerContext
from controlplane.core.model.job import Accounting, Job
from schemas.ids import JobId
from schemas.jobs import JobSpec


def accept(ctx: HandlerContext, spec: JobSpec, snapshot: str, user: str, project: str) -> Job:
    """Take in a job, which waits for its turn.

    Args:
        snapshot: digest of its working directory's archive, which is stored.
        project: whose members see it; empty: only its user.
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
        submitted_at=ctx.now,
        accounting=Accounting(since=ctx.now),
    )
    state.living_counts.came(job)
    state.jobs[name] = job
    state.active[name] = None
    ctx.changed_jobs[name] = None
    ctx.announce("job.submitted", job, {"name": spec.name, "user": user})
    ctx.ask = True
    return job
