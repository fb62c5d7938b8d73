"""All jobs, nodes and workers, and what is derived of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import msgspec

from controlplane.core.model.job import Job
from controlplane.core.model.node import Node
from controlplane.core.model.rescale import Rescale, RescalePhase
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.slot_index import SlotIndex
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
)
from schemas.messages.agent import PREPARE, RECOVER, SETTLED, SWITCH, GroupDelta


class State(msgspec.Struct, kw_only=True, dict=True):
    """What `handle` works on and what replay rebuilds."""

    term: Term = Term(0)
    version: int = 0  # inputs taken
    feed_seq: int = 0
    jobs_accepted: int = 0
    jobs: dict[JobId, Job] = {}
    active: dict[JobId, None] = {}  # those that have not ended, in order of arrival
    jobs_with_processes: dict[JobId, None] = {}  # those with a process that may still exist
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
        for name in self.jobs_with_processes:
            job = self.jobs[name]
            for worker in job.workers.values():
                if worker.phase is not WorkerPhase.GONE:
                    yield job, worker

    @cached_property
    def slot_index(self) -> SlotIndex:
        """Who has which slot: derived from the rest, and no part of what states are compared by."""
        return SlotIndex(self)

    def owners(self) -> Mapping[SlotId, JobId]:
        """Who owns each slot that has an owner."""
        return self.slot_index.owners()

    def reservations(self) -> Mapping[SlotId, tuple[Job, Worker]]:
        """Who is prepared beside the owner of a slot, to have it next."""
        return self.slot_index.reservations()

    def releasing(self) -> dict[SlotId, JobId]:
        """Slots that may be prepared for somebody, and who leaves them."""
        return self.slot_index.releasing()

    def slots(self) -> Mapping[SlotId, Node]:
        """Every slot and its node."""
        return self.slot_index.slots()

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
        if node not in change.notified_nodes and change.kind != RECOVER:
            return None  # it runs what it ran
        leaving: tuple[Member, ...] = ()
        if job.group is not None and change.kind != RECOVER:
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
