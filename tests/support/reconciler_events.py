"""Events of a reconciler while workers start, train and end."""

from __future__ import annotations

from typing import Any

from nodeagent.reconciler import Adopted, Desired, Ended, Event, Reconciler, Started, WorkspaceReady
from schemas.ids import JobId, Rank, Version, WorkerId, worker_id
from schemas.wire.agent import GroupDelta
from tests.support.builders import N1, S0, S1, SNAPSHOT, A, assignment, run, settle

BOTH = {S0: 32, S1: 32}
FIRST = WorkerId(f"{A}.v1.r0")


def worker(job: JobId, version: int = 1, rank: int = 0) -> WorkerId:
    return worker_id(job, Version(version), Rank(rank))


def agent(*events: Event) -> Reconciler:
    """Return a reconciler that has processed the events."""
    reconciler = Reconciler(N1)
    for event in events:
        reconciler.handle(event)
    return reconciler


def laid_out(job: JobId) -> WorkspaceReady:
    return WorkspaceReady(job, SNAPSHOT)


def alive(job: JobId = A, version: int = 1, **order: Any) -> list[Event]:
    """Everything up to a living process of a job."""
    return [
        Desired(run(job, version, **order)),
        laid_out(job),
        Started(worker(job, version), 100, 7),
    ]


def alive_on_both(job: JobId = A) -> list[Event]:
    """A job that trains on both slots."""
    order = run(job, on=BOTH)
    return [
        Desired(order),
        laid_out(job),
        *(Started(worker(job, rank=rank), 100 + rank, 7) for rank in (0, 1)),
        Desired(settle(job, on=BOTH)),
    ]


def adopted(delta: GroupDelta, *, granted: bool = True) -> Adopted:
    told = assignment(delta, granted=granted)
    return Adopted(worker(delta.job, delta.version), told, 100, 7)


def ended(job: JobId = A, version: int = 1, *, code: int | None = 0) -> Ended:
    return Ended(worker(job, version), code, None, unseen=code is None)
