"""Values for tests; each builder names what matters and fills in the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.core.inputs import (
    CancelRequested,
    HoldRequested,
    JobSubmitted,
    NodeGreeted,
    PauseRequested,
    PlanProposed,
    ReleaseRequested,
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
STATES_KEY: Final = "6" * 64  # of sweeps
BATCH: Final = 64
R = TypeVar("R")


# --- what users ask for


def job_spec(name: str = "a", **changes: Any) -> JobSpec:
    return JobSpec(**{"name": name, "script": "train.py", "batch_size": BATCH, **changes})


def submission(
    name: str = "a", *, key: str = "", user: str = "ann", project: str = "", **spec: Any
) -> JobSubmitted:
    return JobSubmitted(
        spec=job_spec(name, **spec), snapshot=SNAPSHOT, user=user, key=key, project=project,
        states_key=STATES_KEY if "sweep" in spec else "",
    )  # fmt: skip


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


def held(job: JobId, user: str = "ann") -> HoldRequested:
    return HoldRequested(job=job, user=user)


def released(job: JobId, user: str = "ann") -> ReleaseRequested:
    return ReleaseRequested(job=job, user=user)


def resumed(job: JobId, *, auto: bool = False, user: str = "ann") -> ResumeRequested:
    return ResumeRequested(job=job, user=user, auto=auto)


# --- what nodes are


def node_spec(node: NodeId = N1, slots: int = 1, model: str = "", **fields: Any) -> NodeSpec:
    usual: dict[str, Any] = {"cores": 2, "memory_bytes": 1 << 30, **fields}
    return NodeSpec(
        node=node, host=node, address="127.0.0.1",
        slots=tuple(SlotSpec(index=index, kind="cpu", model=model) for index in range(slots)),
        release="0", **usual,
    )  # fmt: skip


def greeting(
    node: NodeId = N1,
    *workers: WorkerSeen,
    slots: int = 1,
    model: str = "",
    has: Mapping[str, Any] | None = None,
    **fields: Any,
) -> NodeGreeted:
    """A hello; `has` are further fields of the node."""
    spec, boot = node_spec(node, slots, model, **has or {}), BootId(fields.pop("boot", "boot-1"))
    return NodeGreeted(node=node, boot=boot, spec=spec, workers=workers, **fields)


def seen(
    job: JobId, version: int = 1, *, pid: int | None = 100, ended: bool = False, **fields: Any
) -> WorkerSeen:
    usual = {"slot": 0, "pid": pid, "started_ticks": None if pid is None else 7, "ended": ended}
    worker = _worker(job, version, fields.pop("rank", 0))
    return WorkerSeen(**worker, **{**usual, **fields})


# --- what workers say


def _worker(job: JobId, version: int, rank: int = 0) -> dict[str, Any]:
    """Identity of a worker: the version and rank that it was started with."""
    return {"job": job, "version": Version(version), "rank": Rank(rank)}


def _report(
    kind: type[R], short: Mapping[str, str] | None = None, **usual: Any
) -> Callable[..., R]:
    """Return a builder of reports: `build(job, version, rank=0, **fields)`; `short`: aliases."""

    def build(job: JobId, version: int = 1, *, rank: int = 0, **fields: Any) -> R:
        named = {(short or {}).get(name, name): value for name, value in fields.items()}
        return kind(**_worker(job, version, rank), **{**usual, **named})

    return build


started = _report(WorkerStarted, pid=100, started_ticks=7)
ready = _report(
    WorkerReady, {"resumed": "resumed_epoch", "port": "store_port"},
    index=1, epoch_samples=1000, resumed_epoch=0, parameters=10, store_port=0,
)  # fmt: skip
awaits = _report(SlotAwaited)
store = _report(StoreOpened)
quiesced = _report(Quiesced, step=20, epoch=0, has_full_state=True, port=0)
join_failed = _report(JoinFailed)
broken = _report(GroupBroken)
finished = _report(TrainingFinished)
raised = _report(ScriptFailed, refused=False)
refused = _report(WorkerRefused)


def formed(
    job: JobId, version: int = 1, *, group: int | None = None, epoch: int = 0, **fields: Any
) -> GroupFormed:
    usual = {
        "index": 2,
        "group": version if group is None else group,
        "epoch": epoch,
        "step": epoch * 16,
    }
    return _report(GroupFormed)(job, version, **{**usual, **fields})


def suspended(job: JobId, version: int = 1, *, step: int = 20, **fields: Any) -> Suspended:
    done = {"epoch": 0, "step": step, "samples_done": step * BATCH}
    return _report(Suspended)(job, version, **{**done, **fields})


def epoch_end(
    job: JobId, epoch: int, version: int = 1, *, group: int | None = None, **changes: Any
) -> EpochReported:
    facts = EpochFacts(
        epoch=epoch, step=epoch * 16, samples_done=epoch * 1000, epoch_samples=1000,
        samples_per_s=500.0, train_loss=1.0 / epoch, metrics={"accuracy": 0.5},
        global_batch=BATCH, lr=0.1,
    )  # fmt: skip
    of_facts = {name: changes.pop(name) for name in list(changes) if hasattr(facts, name)}
    usual = {
        "index": 2 + epoch, "group": version if group is None else group, "stated_epochs": 10,
        "duration_s": 2.0, "facts": msgspec.structs.replace(facts, **of_facts),
    }  # fmt: skip
    if "epochs" in changes:
        usual["stated_epochs"] = changes.pop("epochs")
    return _report(EpochReported)(job, version, **{**usual, **changes})


def exited(
    job: JobId, version: int = 1, *, code: int | None = None, signal: int | None = None, **more: Any
) -> WorkerExited:
    end = {"code": code, "signal": signal, "unseen": code is None and signal is None}
    return _report(WorkerExited)(job, version, **end, **more)


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
        job=job, term=Term(term), version=Version(version), stage=stage,
        group=group(job, slots, version if of is None else of, born=born, resume=resume),
        spec=job_spec(job.rpartition("-")[0], **spec), snapshot=snapshot, user="ann", kind=kind,
        former=former, store=store, source=None if source is None else Rank(source),
    )  # fmt: skip


def switch(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SWITCH, **changes)


def settle(job: JobId, version: int = 1, **changes: Any) -> GroupDelta:
    return run(job, version, stage=SETTLED, **changes)


def stop(
    job: JobId, version: int, *, stage: int = SETTLED, forget: bool = False, term: int = 1
) -> GroupDelta:
    """The delta that leaves nothing of a job on a node."""
    return GroupDelta(
        job=job, term=Term(term), version=Version(version), stage=stage, group=None, spec=None,
        forget=forget,
    )  # fmt: skip


def assignment(delta: GroupDelta, rank: int = 0, *, granted: bool = True) -> Assignment:
    """What a worker of `delta` finds in its folder."""
    if delta.group is None or delta.spec is None:
        raise ValueError(delta)
    return Assignment(
        job=delta.job, version=delta.version, rank=Rank(rank),
        slot=index_of(delta.group.members[rank].slot), group=delta.group, spec=delta.spec,
        workdir="/work", checkpoints="/checkpoints", socket="ipc:///agent", env={}, kind=delta.kind,
        granted=granted,
    )  # fmt: skip


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
        job=job, submitted_at=Seconds(at), batch_size=BATCH, batch_limit=BATCH, local_limit=BATCH,
        least=least, most=most, wanted=least,
    )  # fmt: skip
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
    event: str, about: str | None = None, /, *, seq: int = 0, at: float = 0.0, **detail: Any
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
