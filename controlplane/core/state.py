"""All jobs, nodes and workers, and the pictures that are taken of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from controlplane.core.job import Job
from controlplane.core.node import Node, NodePhase
from controlplane.core.rescale import Rescale, RescalePhase
from controlplane.core.worker import Worker, WorkerPhase
from schemas.errors import UnknownJobError
from schemas.groups import Member
from schemas.ids import (
    JobId,
    NodeId,
    Rank,
    Seconds,
    SlotId,
    Term,
    Version,
    WorkerId,
    node_of,
    slot_id,
)
from schemas.messages.agent import MEND, PREPARE, SETTLED, SWITCH, GroupDelta


class State(msgspec.Struct, kw_only=True):
    """What `handle` works on and what replay rebuilds."""

    term: Term = Term(0)
    version: int = 0  # inputs taken
    feed_seq: int = 0
    jobs_accepted: int = 0
    jobs: dict[JobId, Job] = {}
    active: dict[JobId, None] = {}  # those that have not ended, in order of arrival
    holders: dict[JobId, None] = {}  # those with a process that may still exist
    nodes: dict[NodeId, Node] = {}
    keys: dict[str, JobId] = {}  # USER/KEY of submissions
    starts: dict[JobId, tuple[Seconds, Version]] = {}  # deadlines of groups that are forming
    plans_taken: int = 0
    gains: list[tuple[float, float]] = []  # speed-ups of changes, predicted and realised
    hands: dict[JobId, None] = {}  # jobs under an operator's hand, in the order they came under it

    def job(self, job: JobId) -> Job:
        """The job of that name.

        Raises:
            UnknownJobError: if there is none.
        """
        try:
            return self.jobs[job]
        except KeyError:
            raise UnknownJobError(job) from None

    def living(self) -> Iterator[tuple[Job, Worker]]:
        """Every process that may exist."""
        for name in self.holders:
            job = self.jobs[name]
            for worker in job.workers.values():
                if worker.phase is not WorkerPhase.GONE:
                    yield job, worker

    def owners(self) -> dict[SlotId, JobId]:
        """Who owns each slot that has an owner."""
        owned = {worker.slot: job.job for job, worker in self.living() if not worker.claims}
        for node in self.nodes.values():
            owned.update(
                {slot: JobId(name.rpartition(".v")[0]) for slot, name in node.foreign.items()}
            )
        return owned

    def claims(self) -> dict[SlotId, tuple[Job, Worker]]:
        """Who is prepared beside the owner of a slot, to have it next."""
        return {worker.slot: (job, worker) for job, worker in self.living() if worker.claims}

    def promised(self) -> dict[SlotId, JobId]:
        """Slots that may be prepared for somebody, and who leaves them.

        The owner leaves already and waits for nobody: no circle can come of these.
        """
        claims, up = self.claims(), self.slots()
        leaving: dict[SlotId, JobId] = {}
        for job, worker in self.living():
            if worker.slot in claims or worker.claims:
                continue
            going = worker.phase in {WorkerPhase.RETIRING, WorkerPhase.LEAVING}
            if going or (worker.phase is WorkerPhase.MEMBER and _is_left(job, worker)):
                node = up.get(worker.slot)
                if node is not None and node.phase is NodePhase.UP:
                    leaving[worker.slot] = job.job
        return leaving

    def slots(self) -> dict[SlotId, Node]:
        """Every slot and its node."""
        return {
            slot_id(node.node, slot.index): node
            for node in self.nodes.values()
            for slot in node.spec.slots
        }

    def desired(self, job: Job, node: NodeId) -> GroupDelta:
        """What `node` should run of `job` now."""
        if job.change is not None:
            delta = self._changing(job, job.change, node)
            if delta is not None:
                return delta
        group = job.group
        version, stage = job.version, job.stage
        if job.change is not None:
            version, stage = job.change.before, SETTLED
        # A member that was seen gone is not ordered again from an agent that never heard of it.
        if group and any(
            node_of(member.slot) == node
            and job.workers[member.worker].phase is not WorkerPhase.GONE
            for member in group.members
        ):
            return GroupDelta(
                job=job.job,
                term=self.term,
                version=version,
                stage=stage,
                group=group,
                spec=job.spec,
                snapshot=job.snapshot,
                store=self.store_of(job) if stage == SWITCH else "",
            )
        return GroupDelta(
            job=job.job,
            term=self.term,
            version=version,
            stage=stage if job.group else SETTLED,
            group=None,
            spec=None,
            forget=job.ended,
        )

    def _changing(self, job: Job, change: Rescale, node: NodeId) -> GroupDelta | None:
        if node not in change.told and change.kind != MEND:
            return None  # it runs what it ran
        leaving: tuple[Member, ...] = ()
        if job.group is not None and change.kind != MEND:
            leaving = tuple(
                member for member in job.group.members if change.group.member(member.worker) is None
            )
        begun = change.phase in {RescalePhase.SWITCHING, RescalePhase.REJOINING}
        stage = SWITCH if begun else PREPARE
        if not any(node_of(m.slot) == node for m in (*change.group.members, *leaving)):
            return GroupDelta(
                job=job.job,
                term=self.term,
                version=change.group.version,
                stage=stage,
                group=None,
                spec=None,
            )
        return GroupDelta(
            job=job.job,
            term=self.term,
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

    def store_of(self, job: Job) -> str:
        """HOST:PORT of the store that a started group meets at; empty for one worker."""
        if job.group is None or len(job.group.members) == 1:
            return ""
        first = job.group.members[0]
        return self.address_of(first.worker, job, job.workers[first.worker].store_port)

    def address_of(self, worker: WorkerId, job: Job, port: int) -> str:
        """HOST:PORT of something that a worker serves."""
        node = self.nodes[node_of(job.workers[worker].slot)]
        return f"{node.spec.address}:{port}"


def _is_left(job: Job, worker: Worker) -> bool:
    """Whether a change takes `worker` out of its group, and brings nobody new."""
    change = job.change
    if change is None or change.group.member(worker.worker) is not None:
        return False
    return not any(
        job.workers[member.worker].version == change.group.version
        for member in change.group.members
    )
