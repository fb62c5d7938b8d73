"""What a node should run of a job now, in full: the state that an agent brings about."""

from __future__ import annotations

from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import JobStatus, Starting
from controlplane.core.model.rescale import Rescale, RescalePhase
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.state import State
from schemas.groups import Group
from schemas.ids import NodeId, Rank, node_of
from schemas.messages.agent import PREPARE, RECOVER, SETTLED, SWITCH, GroupDelta

BEGUN = frozenset({RescalePhase.SWITCHING, RescalePhase.REJOINING})


def desired(state: State, job: Job, node: NodeId) -> GroupDelta:
    """What `node` should run of `job` now.

    Args:
        state: of the cluster.
        job: one of its jobs.
        node: one of its nodes.

    Returns:
        With a group if something of the job runs there, without one if nothing may.
    """
    status = job.status
    change, group = status.change, status.group
    if change is None:
        version, stage = job.version, _stage(status)
    elif node in change.notified_nodes or change.kind == RECOVER:
        return _in_change(state, job, change, node)
    else:
        version, stage = change.before, SETTLED  # it runs what it ran
    if group is not None and _has_member_on(job, group, node):
        return GroupDelta(
            job=job.job,
            term=state.term,
            version=version,
            stage=stage,
            group=group,
            spec=job.spec,
            snapshot=job.snapshot,
            store=_store_of(state, job) if stage == SWITCH else "",
        )
    return GroupDelta(
        job=job.job,
        term=state.term,
        version=version,
        stage=stage,
        group=None,
        spec=None,
        forget=job.ended,
    )


def _has_member_on(job: Job, group: Group, node: NodeId) -> bool:
    """Whether a member may live there; one that has exited is not ordered again."""
    return any(
        node_of(member.slot) == node and job.workers[member.worker].phase is not WorkerPhase.EXITED
        for member in group.members
    )


def _in_change(state: State, job: Job, change: Rescale, node: NodeId) -> GroupDelta:
    group = job.status.group
    former = group.members if group is not None and change.kind != RECOVER else ()
    leaving = tuple(member for member in former if change.group.member(member.worker) is None)
    begun = change.phase in BEGUN
    stage = SWITCH if begun else PREPARE
    if not any(node_of(m.slot) == node for m in (*change.group.members, *leaving)):
        return GroupDelta(
            job=job.job,
            term=state.term,
            version=change.group.version,
            stage=stage,
            group=None,
            spec=None,
        )
    return GroupDelta(
        job=job.job,
        term=state.term,
        version=change.group.version,
        stage=stage,
        group=change.group,
        spec=job.spec,
        snapshot=job.snapshot,
        kind=change.kind,
        former=leaving,
        store=change.store if begun else "",
        source=None if change.source is None else Rank(change.source),
    )


def _stage(status: JobStatus) -> int:
    if isinstance(status, Starting):
        return SWITCH if status.meeting else PREPARE
    return SETTLED


def _store_of(state: State, job: Job) -> str:
    """HOST:PORT of the store that a started group meets at; empty for one worker."""
    group = job.status.group
    if group is None or len(group.members) == 1:
        return ""
    first = job.workers[group.members[0].worker]
    return address_of(state, first, first.store_port)


def address_of(state: State, worker: Worker, port: int) -> str:
    """HOST:PORT of something that a worker serves.

    Args:
        state: of the cluster.
        worker: it serves it, on its node's address.
        port: that it announced.
    """
    node = state.nodes[node_of(worker.slot)]
    return f"{node.spec.address}:{port}"
