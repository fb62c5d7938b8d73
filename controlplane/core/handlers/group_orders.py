"""Makes groups of workers, and writes down that they were ordered and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from controlplane.core.handler_context import HandlerContext
from controlplane.core.history_records import GroupOrdered
from controlplane.core.model.job import CORRECTION, Job, SpeedPromise
from controlplane.core.model.worker import Worker
from controlplane.policy.api import Reason
from schemas.groups import Group, Member, ResumePoint
from schemas.ids import NodeId, Rank, SlotId, Version, WorkerId, node_of
from schemas.messages.agent import START
from schemas.messages.client import Decision, Size, VersionInfo

POLICY: Final = "policy"  # who decides
OPERATOR: Final = "operator"
CLUSTER: Final = "cluster"


def make_group(
    job: Job,
    version: Version,
    rows: Sequence[tuple[WorkerId, SlotId, int]],
    resume: ResumePoint | None = None,
) -> Group:
    """A group of `job`.

    Args:
        rows: process, slot and local batch (samples per step) of each member, in rank order.
        resume: the checkpoint that it starts from.
    """
    members = tuple(
        Member(rank=Rank(rank), slot=slot, local_batch=batch, worker=name)
        for rank, (name, slot, batch) in enumerate(rows)
    )
    return Group(
        version=version,
        members=members,
        lr=job.spec.lr,
        base_batch=job.spec.batch_size,
        resume=resume,
    )


def share_batch(workers: Sequence[Worker], batch: int) -> list[tuple[WorkerId, SlotId, int]]:
    """A global batch in parts as equal as can be, the larger ones first.

    Args:
        workers: at least one, in rank order.
        batch: global, samples per step.

    Returns:
        Process, slot and local batch of each.
    """
    share, more = divmod(batch, len(workers))
    return [
        (worker.worker, worker.slot, share + (rank < more)) for rank, worker in enumerate(workers)
    ]


def add_workers(job: Job, members: Sequence[Member], version: Version) -> None:
    """Give `job` a worker for each of `members`, which are new with `version`.

    Args:
        job: it is changed in place, and remembers their nodes.
        members: with their slots and local batches (samples per step).
        version: of the group that brings them.
    """
    for member in members:
        job.workers[member.worker] = Worker(
            worker=member.worker,
            version=version,
            rank=member.rank,
            slot=member.slot,
            local_batch=member.local_batch,
        )
        job.nodes[node_of(member.slot)] = None


def note_order(
    ctx: HandlerContext, job: Job, group: Group, kind: str, reason: Reason, *, by: str
) -> None:
    """Write down that `group` was ordered, before `job` comes to the phase that has it.

    Args:
        group: that was ordered.
        kind: start, join, recover or suspend.
    """
    job.version = group.version
    job.promise = _promise(group.version, reason.numbers)
    slots = tuple(member.slot for member in group.members)
    decision = Decision(
        time=ctx.now,
        was=Size() if kind == START else job.size,
        to=Size(slots=slots, batch=group.global_batch),
        why=reason.text,
        code=reason.code,
        by=by,
        numbers=reason.numbers,
        version=group.version,
    )
    info = VersionInfo(
        version=group.version,
        resumed_epoch=job.progress.epoch,
        kind=kind,
        resumed_step=job.progress.step,
        time=ctx.now,
        slots=slots,
        global_batch=group.global_batch,
    )
    ctx.records.append(GroupOrdered(job=job.job, decision=decision, version=info))


def _promise(version: Version, numbers: dict[str, float]) -> SpeedPromise | None:
    then, now = numbers.get("speed_then"), numbers.get("speed_now")
    if then is None or not now:
        return None
    correction = numbers.get(CORRECTION)
    return SpeedPromise(version=version, now=now, then=then, correction=correction)


def names_of(group: Group) -> list[WorkerId]:
    """Its processes, in rank order.

    Args:
        group: may be empty, as that of a suspension is.
    """
    return [member.worker for member in group.members]


def nodes_of(group: Group | None) -> list[NodeId]:
    """Where its members are, in rank order; a node with several comes several times.

    Args:
        group: None has no members.
    """
    return [node_of(member.slot) for member in group.members] if group else []


def trains_on(group: Group) -> str:
    """What a job does, in words.

    Args:
        group: its slots and its global batch (samples per step) are named.
    """
    slots = len(group.members)
    return f"trains on {slots} slot{'s' * (slots != 1)}, batch {group.global_batch}"
