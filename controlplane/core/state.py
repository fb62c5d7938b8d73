"""All jobs, nodes and workers: what decisions are made of, and nothing that is only shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import msgspec

from controlplane.core.deadlines import Deadlines
from controlplane.core.living_counts import LivingCounts
from controlplane.core.model.job import Job
from controlplane.core.model.job_sweep import LeftSweep
from controlplane.core.model.node import Node
from controlplane.core.model.swap import Swap
from controlplane.core.model.worker import Worker, WorkerPhase
from controlplane.core.slot_index import SlotIndex
from schemas.errors import UnknownJobError
from schemas.ids import JobId, NodeId, Term, Version


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
    left_keys: dict[str, JobId] = {}  # of jobs that left, the latest
    ended_leave: bool = False  # jobs that have ended leave, when nothing of them lives
    sweeps_leave: bool = False  # the same of sweeps
    rules: int = 0  # of the incarnation that decides, see `inputs.RULES`
    leaving: dict[JobId, None] = {}  # with the next input
    left: dict[JobId, Version] = {}  # the latest: nodes that come back hear of them
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    overrides: dict[JobId, None] = {}  # jobs under a manual override, in order of the overrides
    sweeps: dict[JobId, None] = {}  # those that go on, or that some node has to hear of
    ended_sweeps: dict[JobId, None] = {}  # the latest: nodes that come back hear of them
    left_sweeps: dict[JobId, LeftSweep] = {}  # the same of those that left
    draining: dict[NodeId, None] = {}  # nodes with a `drain`
    swaps: list[Swap] = []  # of running jobs that trade slots just now

    def job(self, job: JobId) -> Job:
        """The job of that name.

        Args:
            job: its id; those that have left are not found.

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
                if worker.phase is not WorkerPhase.EXITED:
                    yield job, worker

    @cached_property
    def living_counts(self) -> LivingCounts:
        """Where jobs stand that have not ended: derived from them, as the index is."""
        return LivingCounts(self.jobs[name] for name in self.active)

    @cached_property
    def slot_index(self) -> SlotIndex:
        """Who has which slot: derived from the rest, and no part of what states are compared by."""
        return SlotIndex(self.jobs, self.jobs_with_processes, self.nodes)
