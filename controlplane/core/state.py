"""All jobs, nodes and workers, and the pictures that are taken of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from controlplane.core.job import HOLDING, Job
from controlplane.core.node import Node, NodePhase
from controlplane.core.worker import Worker, WorkerPhase
from controlplane.policy.api import ClusterView, JobView, SlotView
from schemas.errors import UnknownJobError
from schemas.ids import JobId, NodeId, Seconds, SlotId, Term, Version, node_of, slot_id
from schemas.messages.agent import SETTLED, GroupDelta

MAX_WORKERS = 1  # of one job; groups of several are formed by re-scales, which come next


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
        """Every worker that owns a slot."""
        for name in self.holders:
            job = self.jobs[name]
            for worker in job.workers.values():
                if worker.phase is not WorkerPhase.GONE:
                    yield job, worker

    def owners(self) -> dict[SlotId, JobId]:
        """Who owns each slot that has an owner."""
        owned = {worker.slot: job.job for job, worker in self.living()}
        for node in self.nodes.values():
            owned.update(
                {slot: JobId(name.rpartition(".v")[0]) for slot, name in node.foreign.items()}
            )
        return owned

    def slots(self) -> dict[SlotId, Node]:
        """Every slot and its node."""
        return {
            slot_id(node.node, slot.index): node
            for node in self.nodes.values()
            for slot in node.spec.slots
        }

    def desired(self, job: Job, node: NodeId) -> GroupDelta:
        """What `node` should run of `job` now."""
        group = job.group
        if group and any(node_of(member.slot) == node for member in group.members):
            return GroupDelta(
                job=job.job,
                term=self.term,
                version=job.version,
                stage=job.stage,
                group=group,
                spec=job.spec,
                snapshot=job.snapshot,
            )
        return GroupDelta(
            job=job.job,
            term=self.term,
            version=job.version,
            stage=SETTLED,
            group=None,
            spec=None,
            forget=job.ended,
        )

    def view(self) -> ClusterView:
        """The picture that policies decide on: active jobs, and slots of nodes not lost."""
        owners = self.owners()
        slots = tuple(
            SlotView(
                slot=slot_id(node.node, slot.index),
                node=node.node,
                kind=slot.kind,
                usable=node.phase is NodePhase.UP and slot_id(node.node, slot.index) not in owners,
            )
            for node in self.nodes.values()
            if node.phase is not NodePhase.LOST
            for slot in node.spec.slots
        )
        jobs = {job: _view(self.jobs[job]) for job in self.active}
        return ClusterView(version=self.version, slots=slots, jobs=jobs)


def _view(job: Job) -> JobView:
    least, most = job.spec.slots
    running = job.group.members if job.group and job.phase in HOLDING else ()
    return JobView(
        job=job.job,
        submitted_at=job.submitted_at,
        batch_size=job.spec.batch_size,
        batch_limit=job.spec.batch_limit,
        local_limit=job.spec.local_limit,
        least=least,
        most=min(most, MAX_WORKERS),
        wanted=min(job.spec.wanted, MAX_WORKERS),
        running_on={member.slot: member.local_batch for member in running},
        ready_at=job.ready_at,
        epoch=job.epoch,
        samples_done=job.samples_done,
        samples_per_s=job.samples_per_s,
    )
