"""Values for tests; each builder names what matters and fills in the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.core.inputs import (
    CancelRequested,
    JobSubmitted,
    NodeGreeted,
    PauseRequested,
    PlanProposed,
    ResizeRequested,
    ResumeRequested,
)
from controlplane.policy.api import ClusterView, JobView, Plan, Reason, SlotView
from schemas.epochs import EpochFacts
from schemas.ids import (
    BootId,
    JobId,
    NodeId,
    Rank,
    Seconds,
    SlotId,
    Term,
    Version,
    WorkerId,
    index_of,
    slot_id,
    worker_id,
)
from schemas.jobs import JobSpec
from schemas.nodes import Group, Member, NodeSpec, ResumePoint, SlotSpec
from schemas.wire.agent import (
    PREPARE,
    SETTLED,
    START,
    SWITCH,
    EpochReported,
    GroupBroken,
    GroupDelta,
    GroupFormed,
    JobCleared,
    JoinFailed,
    Quiesced,
    ScriptFailed,
    SlotAwaited,
    StoreOpened,
    Suspended,
    TrainingFinished,
    WorkerExited,
    WorkerReady,
    WorkerRefused,
    WorkerSeen,
    WorkerStarted,
)
from schemas.wire.feed import FeedEvent
from schemas.wire.worker import Assignment

# The first, second and third job that a cluster accepts, if they are called a, b and c.
A, B, C = JobId("a-1"), JobId("b-2"), JobId("c-3")
N1, N2 = NodeId("n1"), NodeId("n2")
S0, S1 = slot_id(N1, 0), slot_id(N1, 1)
T0, T1 = slot_id(N2, 0), slot_id(N2, 1)
SNAPSHOT: Final = "5" * 64
BATCH: Final = 64


# --- what users ask for


def job_spec(name: str = "a", **changes: Any) -> JobSpec:
    return JobSpec(**{"name": name, "script": "train.py", "batch_size": BATCH, **changes})


def submission(
    name: str = "a", *, key: str = "", user: str = "ann", project: str = "", **spec: Any
) -> JobSubmitted:
    return JobSubmitted(
        spec=job_spec(name, **spec), snapshot=SNAPSHOT, user=user, key=key, project=project
    )


def cancelled(job: JobId, user: str = "ann") -> CancelRequested:
    return CancelRequested(job=job, user=user)


def resized(
    job: JobId,
    slots: int | None = None,
    *,
    batch: int | None = None,
    on: tuple[SlotId, ...] = (),
    user: str = "ann",
) -> ResizeRequested:
    return ResizeRequested(job=job, user=user, slots=slots, batch=batch, on=on)


def paused(job: JobId, user: str = "ann") -> PauseRequested:
    return PauseRequested(job=job, user=user)


def resumed(job: JobId, *, auto: bool = False, user: str = "ann") -> ResumeRequested:
    return ResumeRequested(job=job, user=user, auto=auto)


# --- what nodes are


def node_spec(node: NodeId = N1, slots: int = 1, model: str = "") -> NodeSpec:
    return NodeSpec(
        node=node,
        host=node,
        address="127.0.0.1",
        slots=tuple(SlotSpec(index=index, kind="cpu", model=model) for index in range(slots)),
        cores=2,
        memory_bytes=1 << 30,
        release="0",
    )


def greeting(
    node: NodeId = N1,
    *workers: WorkerSeen,
    slots: int = 1,
    boot: str = "boot-1",
    model: str = "",
    problems: tuple[str, ...] = (),
    jobs: tuple[JobId, ...] = (),
    run_id: str = "",
) -> NodeGreeted:
    return NodeGreeted(
        node=node,
        boot=BootId(boot),
        spec=node_spec(node, slots, model),
        workers=workers,
        problems=problems,
        jobs=jobs,
        run_id=run_id,
    )


def seen(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    slot: int = 0,
    pid: int | None = 100,
    ended: bool = False,
    code: int | None = None,
) -> WorkerSeen:
    return WorkerSeen(
        job=job,
        version=Version(version),
        rank=Rank(rank),
        slot=slot,
        pid=pid,
        started_ticks=None if pid is None else 7,
        ended=ended,
        code=code,
    )


# --- what workers say


def _worker(job: JobId, version: int, rank: int = 0) -> dict[str, Any]:
    """Who speaks: the version and rank that it was born with."""
    return {"job": job, "version": Version(version), "rank": Rank(rank)}


def started(job: JobId, version: int = 1, *, rank: int = 0, pid: int = 100) -> WorkerStarted:
    return WorkerStarted(**_worker(job, version, rank), pid=pid, started_ticks=7)


def ready(
    job: JobId, version: int = 1, *, rank: int = 0, index: int = 1, resumed: int = 0, port: int = 0
) -> WorkerReady:
    return WorkerReady(
        **_worker(job, version, rank),
        index=index,
        epoch_samples=1000,
        resumed_epoch=resumed,
        parameters=10,
        store_port=port,
    )


def awaits(job: JobId, version: int = 1, *, rank: int = 0, index: int) -> SlotAwaited:
    return SlotAwaited(**_worker(job, version, rank), index=index)


def store(
    job: JobId, version: int = 1, *, rank: int = 0, index: int, group: int, port: int
) -> StoreOpened:
    return StoreOpened(**_worker(job, version, rank), index=index, group=Version(group), port=port)


def formed(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    index: int = 2,
    group: int | None = None,
    epoch: int = 0,
    step: int | None = None,
    pause_ms: float = 0.0,
    step_ms: float = 0.0,
) -> GroupFormed:
    return GroupFormed(
        **_worker(job, version, rank),
        index=index,
        group=Version(version if group is None else group),
        epoch=epoch,
        step=epoch * 16 if step is None else step,
        pause_ms=pause_ms,
        step_ms=step_ms,
    )


def join_failed(
    job: JobId, version: int = 1, *, rank: int = 0, index: int, group: int, error: str
) -> JoinFailed:
    return JoinFailed(**_worker(job, version, rank), index=index, group=Version(group), error=error)


def broken(
    job: JobId, version: int = 1, *, rank: int = 0, index: int, group: int, error: str
) -> GroupBroken:
    return GroupBroken(
        **_worker(job, version, rank), index=index, group=Version(group), error=error
    )


def quiesced(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    index: int,
    group: int,
    step: int = 20,
    epoch: int = 0,
    has_full_state: bool = True,
    port: int = 0,
) -> Quiesced:
    return Quiesced(
        **_worker(job, version, rank),
        index=index,
        group=Version(group),
        step=step,
        epoch=epoch,
        has_full_state=has_full_state,
        port=port,
    )


def suspended(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    index: int,
    group: int,
    epoch: int = 0,
    step: int = 20,
) -> Suspended:
    return Suspended(
        **_worker(job, version, rank),
        index=index,
        group=Version(group),
        epoch=epoch,
        step=step,
        samples_done=step * BATCH,
    )


def epoch_end(
    job: JobId,
    epoch: int,
    version: int = 1,
    *,
    rank: int = 0,
    index: int | None = None,
    group: int | None = None,
    epochs: int | None = 10,
    **changes: Any,
) -> EpochReported:
    facts = EpochFacts(
        epoch=epoch,
        step=epoch * 16,
        samples_done=epoch * 1000,
        epoch_samples=1000,
        samples_per_s=500.0,
        train_loss=1.0 / epoch,
        metrics={"accuracy": 0.5},
        global_batch=BATCH,
        lr=0.1,
    )
    of_facts = {name: changes.pop(name) for name in list(changes) if hasattr(facts, name)}
    report = EpochReported(
        **_worker(job, version, rank),
        index=2 + epoch if index is None else index,
        group=Version(version if group is None else group),
        stated_epochs=epochs,
        duration_s=2.0,
        facts=msgspec.structs.replace(facts, **of_facts),
    )
    return msgspec.structs.replace(report, **changes)


def finished(
    job: JobId, version: int = 1, *, rank: int = 0, index: int, reason: str
) -> TrainingFinished:
    return TrainingFinished(**_worker(job, version, rank), index=index, reason=reason)


def raised(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    index: int,
    error: str,
    where: str,
    refused: bool = False,
) -> ScriptFailed:
    worker = _worker(job, version, rank)
    return ScriptFailed(**worker, index=index, error=error, where=where, refused=refused)


def exited(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    code: int | None = None,
    signal: int | None = None,
    memory_limit: int | None = None,
) -> WorkerExited:
    unseen = code is None and signal is None
    return WorkerExited(
        **_worker(job, version, rank),
        code=code,
        signal=signal,
        unseen=unseen,
        memory_limit=memory_limit,
    )


def refused(
    job: JobId,
    version: int = 1,
    *,
    rank: int = 0,
    error: str,
    hint: str = "",
    node_fault: bool = False,
) -> WorkerRefused:
    who = _worker(job, version, rank)
    return WorkerRefused(**who, error=error, hint=hint, node_fault=node_fault)


def cleared(job: JobId, version: int) -> JobCleared:
    return JobCleared(job=job, version=Version(version))


# --- groups, deltas and assignments


Born = Sequence[tuple[int, int]]  # (version, rank) that each member was born with


def members(job: JobId, on: Mapping[SlotId, int], born: Born) -> tuple[Member, ...]:
    """Members in rank order, of processes that began as `born` says."""
    return tuple(
        Member(rank=Rank(rank), slot=slot, local_batch=batch, worker=named(job, *began))
        for rank, ((slot, batch), began) in enumerate(zip(on.items(), born, strict=True))
    )


def named(job: JobId, version: int = 1, rank: int = 0) -> WorkerId:
    return worker_id(job, Version(version), Rank(rank))


def group(
    job: JobId,
    on: Mapping[SlotId, int],
    version: int = 1,
    *,
    born: Born | None = None,
    resume: ResumePoint | None = None,
) -> Group:
    """A group; all of its members are new with it, if nothing else is said."""
    began = [(version, rank) for rank in range(len(on))] if born is None else born
    return Group(
        version=Version(version),
        members=members(job, on, began),
        lr=None,
        base_batch=BATCH,
        resume=resume,
    )


def resume_at(epoch: int, version: int) -> ResumePoint:
    return ResumePoint(epoch=epoch, version=Version(version))


def run(
    job: JobId,
    version: int = 1,
    *,
    on: Mapping[SlotId, int] | SlotId = S0,
    born: Born | None = None,
    of: int | None = None,
    kind: str = START,
    former: tuple[Member, ...] = (),
    store: str = "",
    source: int | None = None,
    stage: int = PREPARE,
    term: int = 1,
    resume: ResumePoint | None = None,
    snapshot: str = SNAPSHOT,
    **spec: Any,
) -> GroupDelta:
    """The delta that orders a group; on one slot, if only that is named.

    The group is that of version `of`, if a later change was given up.
    """
    slots = {on: BATCH} if isinstance(on, str) else on
    return GroupDelta(
        job=job,
        term=Term(term),
        version=Version(version),
        stage=stage,
        group=group(job, slots, version if of is None else of, born=born, resume=resume),
        spec=job_spec(job.rpartition("-")[0], **spec),
        snapshot=snapshot,
        user="ann",
        kind=kind,
        former=former,
        store=store,
        source=None if source is None else Rank(source),
    )


def switch(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SWITCH, **changes)


def settle(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SETTLED, **changes)


def stop(
    job: JobId, version: int, *, stage: int = SETTLED, forget: bool = False, term: int = 1
) -> GroupDelta:
    """The delta that leaves nothing of a job on a node."""
    return GroupDelta(
        job=job,
        term=Term(term),
        version=Version(version),
        stage=stage,
        group=None,
        spec=None,
        forget=forget,
    )


def assignment(delta: GroupDelta, rank: int = 0, *, granted: bool = True) -> Assignment:
    """What a worker of `delta` finds in its folder."""
    if delta.group is None or delta.spec is None:
        raise ValueError(delta)
    return Assignment(
        job=delta.job,
        version=delta.version,
        rank=Rank(rank),
        slot=index_of(delta.group.members[rank].slot),
        group=delta.group,
        spec=delta.spec,
        workdir="/work",
        checkpoints="/checkpoints",
        socket="ipc:///agent",
        env={},
        kind=delta.kind,
        granted=granted,
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


def slot_view(slot: SlotId, *, usable: bool = True, model: str = "", cores: int = 0) -> SlotView:
    node = NodeId(slot.rpartition("/")[0])
    return SlotView(slot=slot, node=node, kind="cpu", model=model, usable=usable, cores=cores)


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
    return changed_job(view, **changes)


def changed_job(view: JobView, **changes: Any) -> JobView:
    """`view` with other fields; one that was moved has its slots since then, if not said else."""
    if "moved_at" in changes:
        changes = {"placed_at": changes["moved_at"], **changes}
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
