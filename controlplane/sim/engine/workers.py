"""Simulated worker processes: starts, reports and exits."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial

from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.engine.jobs import JobProcesses, WorkerProcess
from schemas.ids import JobId, NodeId, Rank, SlotId, Version, WorkerId, node_of
from schemas.nodes import Member
from schemas.wire.agent import AgentEvent, SlotAwaited, WorkerExited, WorkerReady, WorkerStarted

PORT = 29_500
SendReport = Callable[[NodeId, AgentEvent], None]


class WorkerProcesses:
    """Worker processes of the cluster.

    A slot has one process at a time; its successor waits until the process has exited.
    """

    def __init__(
        self, kernel: Kernel, send: SendReport, jobs: MutableMapping[JobId, JobProcesses]
    ) -> None:
        """Start without processes; an ended job is removed from `jobs` with its last process."""
        self._kernel = kernel
        self._send = send
        self._jobs = jobs
        self._process_on: dict[SlotId, WorkerId] = {}
        self._waiting_for: dict[SlotId, tuple[JobProcesses, WorkerId]] = {}

    def start(self, job: JobProcesses, member: Member, start_s: float) -> None:
        """Start a worker that is ready after `start_s` seconds.

        If its slot has another process, the worker is ready no earlier than that process exits.
        """
        version, rank = version_and_rank(member.worker)
        worker = WorkerProcess(
            slot=member.slot, version=version, rank=rank, ready_at=self._kernel.now + start_s
        )
        job.workers[member.worker] = worker
        started = WorkerStarted(
            job=job.id, version=version, rank=rank, pid=len(job.workers), started_ticks=1
        )
        self._send(node_of(member.slot), started)
        if member.slot in self._process_on:
            self._waiting_for[member.slot] = (job, member.worker)
            self._kernel.call_at(worker.ready_at, self._await_slot, job, member.worker)
        else:
            self._process_on[member.slot] = member.worker
            self._kernel.call_at(worker.ready_at, self._become_ready, job, member.worker)

    def exit(
        self,
        job: JobProcesses,
        name: WorkerId,
        *,
        code: int | None = None,
        signal: int | None = None,
    ) -> None:
        """Exit a worker, if it exists, and report its status; `code` None: killed by a signal."""
        worker = job.workers.get(name)
        if worker is None:
            return
        self.remove(job, name)
        exited = WorkerExited(
            job=job.id, version=worker.version, rank=worker.rank, code=code, signal=signal
        )
        self._send(node_of(worker.slot), exited)

    def remove(self, job: JobProcesses, name: WorkerId) -> None:
        """Remove a worker without a report; its slot goes to the waiting successor.

        An ended job is forgotten with its last worker.
        """
        worker = job.workers.pop(name)
        if job.ended and not job.workers:
            del self._jobs[job.id]
        slot = worker.slot
        if self._process_on.get(slot) == name:
            del self._process_on[slot]
            heir = self._waiting_for.pop(slot, None)
            if heir is not None and heir[1] in heir[0].workers:
                other, its_name = heir
                self._process_on[slot] = its_name
                ready_at = other.workers[its_name].ready_at
                self._kernel.call_at(ready_at, self._become_ready, other, its_name)
        elif self._waiting_for.get(slot, (None, ""))[1] == name:
            del self._waiting_for[slot]

    def report(
        self, job: JobProcesses, name: WorkerId, make_report: Callable[..., AgentEvent]
    ) -> None:
        """Send a report of a worker, if it exists.

        `make_report` builds the event from the worker's `job`, `version`, `rank` and `index`.
        """
        worker = job.workers.get(name)
        if worker is None:
            return
        event = make_report(
            job=job.id, version=worker.version, rank=worker.rank, index=worker.next_index()
        )
        self._send(node_of(worker.slot), event)

    def _await_slot(self, job: JobProcesses, name: WorkerId) -> None:
        """Report that the worker waits for its slot, if another process still holds it."""
        worker = job.workers.get(name)
        if worker is not None and self._waiting_for.get(worker.slot) == (job, name):
            self.report(job, name, SlotAwaited)

    def _become_ready(self, job: JobProcesses, name: WorkerId) -> None:
        worker = job.workers.get(name)
        if worker is None or worker.ready:
            return
        worker.ready = True
        ready = partial(
            WorkerReady,
            epoch_samples=job.training.model.epoch_samples,
            resumed_epoch=job.training.epoch,
            parameters=1,
            store_port=PORT,
        )
        self.report(job, name, ready)


def version_and_rank(name: WorkerId) -> tuple[Version, Rank]:
    """Return the version and rank in a worker's name (`schemas.ids.worker_id`)."""
    _, version, rank = name.rsplit(".", 2)
    return Version(int(version[1:])), Rank(int(rank[1:]))
