"""Values for tests; each builder names what matters and fills in the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.core.events import CancelRequested, JobSubmitted, NodeGreeted, PlanProposed
from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from schemas.cluster import NodeSpec, SlotSpec
from schemas.groups import Group, Member, ResumePoint
from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, SlotId, Term, Version, slot_id
from schemas.jobs import JobSpec
from schemas.messages.agent import (
    PREPARE,
    SETTLED,
    SWITCH,
    EpochReported,
    GroupDelta,
    GroupFormed,
    JobCleared,
    ScriptFailed,
    TrainingFinished,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerSeen,
    WorkerStarted,
)
from schemas.messages.feed import FeedEvent
from schemas.messages.worker import Assignment

# The first, second and third job that a cluster accepts, if they are called a, b and c.
A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")
N1, N2 = NodeId("n1"), NodeId("n2")
S0, S1 = slot_id(N1, 0), slot_id(N1, 1)
T0 = slot_id(N2, 0)
SNAPSHOT: Final = "5" * 64
BATCH: Final = 64


# --- what users ask for


def job_spec(name: str = "a", **changes: Any) -> JobSpec:
    return JobSpec(**{"name": name, "script": "train.py", "batch_size": BATCH, **changes})


def submission(name: str = "a", *, key: str = "", user: str = "ann", **spec: Any) -> JobSubmitted:
    return JobSubmitted(spec=job_spec(name, **spec), snapshot=SNAPSHOT, user=user, key=key)


def cancelled(job: JobId, user: str = "ann") -> CancelRequested:
    return CancelRequested(job=job, user=user)


# --- what nodes are


def node_spec(node: NodeId = N1, slots: int = 1) -> NodeSpec:
    return NodeSpec(
        node=node,
        host=node,
        address="127.0.0.1",
        slots=tuple(SlotSpec(index=index, kind="cpu") for index in range(slots)),
        cores=2,
        memory_bytes=1 << 30,
        release="0",
    )


def greeting(
    node: NodeId = N1, *workers: WorkerSeen, slots: int = 1, boot: str = "boot-1"
) -> NodeGreeted:
    spec = node_spec(node, slots)
    return NodeGreeted(node=node, boot=BootId(boot), spec=spec, workers=workers)


def seen(
    job: JobId,
    version: int = 1,
    *,
    slot: int = 0,
    pid: int | None = 100,
    ended: bool = False,
    code: int | None = None,
) -> WorkerSeen:
    return WorkerSeen(
        job=job,
        version=Version(version),
        rank=Rank(0),
        slot=slot,
        pid=pid,
        started_ticks=None if pid is None else 7,
        ended=ended,
        code=code,
    )


# --- what workers say


def _worker(job: JobId, version: int) -> dict[str, Any]:
    return {"job": job, "version": Version(version), "rank": Rank(0)}


def started(job: JobId, version: int = 1, *, pid: int = 100) -> WorkerStarted:
    return WorkerStarted(**_worker(job, version), pid=pid, started_ticks=7)


def ready(job: JobId, version: int = 1, *, index: int = 1, resumed: int = 0) -> WorkerReady:
    return WorkerReady(
        **_worker(job, version),
        index=index,
        epoch_samples=1000,
        resumed_epoch=resumed,
        parameters=10,
    )


def formed(job: JobId, version: int = 1, *, index: int = 2, epoch: int = 0) -> GroupFormed:
    return GroupFormed(**_worker(job, version), index=index, epoch=epoch, step=epoch * 16)


def epoch_end(
    job: JobId, epoch: int, version: int = 1, *, index: int | None = None, **changes: Any
) -> EpochReported:
    report = EpochReported(
        **_worker(job, version),
        index=2 + epoch if index is None else index,
        epoch=epoch,
        step=epoch * 16,
        samples_done=epoch * 1000,
        epoch_samples=1000,
        epochs=10,
        samples_per_s=500.0,
        duration_s=2.0,
        train_loss=1.0 / epoch,
        metrics={"accuracy": 0.5},
        global_batch=BATCH,
        lr=0.1,
    )
    return msgspec.structs.replace(report, **changes)


def finished(job: JobId, version: int = 1, *, index: int, why: str) -> TrainingFinished:
    return TrainingFinished(**_worker(job, version), index=index, why=why)


def raised(job: JobId, version: int = 1, *, index: int, error: str, where: str) -> ScriptFailed:
    return ScriptFailed(**_worker(job, version), index=index, error=error, where=where)


def exited(
    job: JobId, version: int = 1, *, code: int | None = None, signal: int | None = None
) -> WorkerExited:
    unseen = code is None and signal is None
    return WorkerExited(**_worker(job, version), code=code, signal=signal, unseen=unseen)


def refused(job: JobId, version: int = 1, *, error: str, hint: str = "") -> WorkerRefused:
    return WorkerRefused(**_worker(job, version), error=error, hint=hint)


def cleared(job: JobId, version: int) -> JobCleared:
    return JobCleared(job=job, version=Version(version))


# --- groups, deltas and assignments


def group(
    on: Mapping[SlotId, int], version: int = 1, *, resume: ResumePoint | None = None
) -> Group:
    members = tuple(
        Member(rank=Rank(rank), slot=slot, local_batch=batch)
        for rank, (slot, batch) in enumerate(on.items())
    )
    return Group(version=Version(version), members=members, lr=None, resume=resume)


def resume_at(epoch: int, version: int) -> ResumePoint:
    return ResumePoint(epoch=epoch, version=Version(version))


def run(
    job: JobId,
    version: int = 1,
    *,
    on: Mapping[SlotId, int] | SlotId = S0,
    stage: int = PREPARE,
    term: int = 1,
    resume: ResumePoint | None = None,
    snapshot: str = SNAPSHOT,
    **spec: Any,
) -> GroupDelta:
    """The delta that orders a group; on one slot, if only that is named."""
    slots = {on: BATCH} if isinstance(on, str) else on
    return GroupDelta(
        job=job,
        term=Term(term),
        version=Version(version),
        stage=stage,
        group=group(slots, version, resume=resume),
        spec=job_spec(job.rpartition("-")[0], **spec),
        snapshot=snapshot,
    )


def switch(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SWITCH, **changes)


def settle(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SETTLED, **changes)


def stop(job: JobId, version: int, *, forget: bool = False, term: int = 1) -> GroupDelta:
    """The delta that leaves nothing of a job on a node."""
    return GroupDelta(
        job=job,
        term=Term(term),
        version=Version(version),
        stage=SETTLED,
        group=None,
        spec=None,
        forget=forget,
    )


def assignment(delta: GroupDelta, rank: int = 0) -> Assignment:
    """What a worker of `delta` finds in its folder."""
    if delta.group is None or delta.spec is None:
        raise ValueError(delta)
    return Assignment(
        job=delta.job,
        version=delta.version,
        rank=Rank(rank),
        slot=int(delta.group.members[rank].slot.rpartition("/")[2]),
        group=delta.group,
        spec=delta.spec,
        workdir="/work",
        checkpoints="/checkpoints",
        socket="ipc:///agent",
        env={},
    )


# --- plans and what policies see


def proposal(
    placed: Mapping[JobId, Mapping[SlotId, int]],
    *,
    based_on: int = 0,
    reasons: Mapping[JobId, Reason] | None = None,
) -> PlanProposed:
    batches = {job: dict(slots) for job, slots in placed.items()}
    return PlanProposed(
        plan=Plan(based_on=based_on, local_batch=batches, reasons=dict(reasons or {}))
    )


def slot_view(slot: SlotId, *, usable: bool = True) -> SlotView:
    return SlotView(slot=slot, node=NodeId(slot.rpartition("/")[0]), kind="cpu", usable=usable)


def job_view(
    job: JobId, at: float = 0.0, *, slots: tuple[int, int] = (1, 1), **changes: Any
) -> JobView:
    least, most = slots
    view = JobView(
        job=job,
        submitted_at=Seconds(at),
        batch_size=BATCH,
        batch_limit=BATCH,
        local_limit=BATCH,
        least=least,
        most=most,
        wanted=least,
    )
    return msgspec.structs.replace(view, **changes)


def cluster_view(*parts: SlotView | JobView, version: int = 1) -> ClusterView:
    return ClusterView(
        version=version,
        slots=tuple(part for part in parts if isinstance(part, SlotView)),
        jobs={part.job: part for part in parts if isinstance(part, JobView)},
    )


# --- what the core says


def send(node: NodeId, delta: GroupDelta) -> SendDelta:
    return SendDelta(node, delta)


def news(
    event: str,
    about: str | None = None,
    /,
    *,
    seq: int = 0,
    at: float = 0.0,
    **detail: Any,
) -> Announce:
    """An announcement about a job or a node; numbered and timed only where that matters."""
    is_node = event.startswith("node.")
    return Announce(
        FeedEvent(
            seq=seq,
            time=Seconds(at),
            event=event,
            job=None if is_node or about is None else JobId(about),
            node=NodeId(about) if is_node and about is not None else None,
            detail=detail,
        )
    )


def deltas(commands: list[Command]) -> list[SendDelta]:
    return [command for command in commands if isinstance(command, SendDelta)]


def reasons(commands: list[Command]) -> list[str]:
    """Why jobs changed their state, as it was announced."""
    return [
        str(command.event.detail["reason"])
        for command in commands
        if isinstance(command, Announce) and "reason" in command.event.detail
    ]
