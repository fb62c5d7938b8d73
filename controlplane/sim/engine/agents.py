"""Simulated node agents: apply deltas, and report what the workers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.engine.jobs import JobProcesses
from controlplane.sim.engine.training import GroupTraining
from controlplane.sim.engine.workers import PORT, SendReport, WorkerProcesses, version_and_rank
from schemas.ids import JobId, NodeId, Version, WorkerId, node_of
from schemas.nodes import Group, Member
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    START,
    SUSPEND,
    SWITCH,
    GroupDelta,
    GroupFormed,
    JobCleared,
    Quiesced,
    StoreOpened,
    Suspended,
)

SIGTERM: Final = 15


class NodeAgents:
    """Agents of all nodes.

    With `instant_changes`, slots change hands in no time and every change is followed by a stall,
    as in the published simulators. Otherwise newcomers start beside a group that continues to
    train.
    """

    def __init__(
        self,
        kernel: Kernel,
        send: SendReport,
        jobs: Mapping[JobId, JobProcesses],
        processes: WorkerProcesses,
        training: GroupTraining,
        *,
        instant_changes: bool,
    ) -> None:
        self._kernel = kernel
        self._send = send
        self._jobs = jobs
        self._processes = processes
        self._training = training
        self._instant_changes = instant_changes
        self._down: set[NodeId] = set()

    # --- orders

    def apply(self, node: NodeId, delta: GroupDelta) -> None:
        """Apply a delta as an agent would; a node that is down ignores it."""
        if node in self._down:
            return
        if delta.group is None:
            self._call_after_current(self._confirm_cleared, node, delta)
        job = self._jobs.get(delta.job)
        if job is None:
            return
        wanted = _wanted(delta, node)
        self._terminate_unwanted(job, node, wanted, delta)
        if delta.group is None:
            return
        if delta.stage == PREPARE and delta.kind != RECOVER:
            self._prepare(job, delta, wanted)
        if delta.kind == RECOVER and delta.stage == PREPARE:
            self._quiesce(job, delta, wanted)
        first = job.seen < (delta.version, delta.stage)
        job.seen = max(job.seen, (delta.version, delta.stage))
        if delta.stage == SWITCH and first:
            self._switch(job, delta)

    def _terminate_unwanted(
        self, job: JobProcesses, node: NodeId, wanted: Mapping[WorkerId, Member], delta: GroupDelta
    ) -> None:
        for name, worker in list(job.workers.items()):
            older = worker.version <= delta.version
            if node_of(worker.slot) == node and name not in wanted and older:
                self._call_after_current(self._terminate, job, name)

    def _confirm_cleared(self, node: NodeId, delta: GroupDelta) -> None:
        """Report a job without older workers as cleared; orders may have been lost on the way."""
        job = self._jobs.get(delta.job)
        local = job.workers.values() if job is not None else ()
        if not any(node_of(w.slot) == node and w.version < delta.version for w in local):
            self._send(node, JobCleared(job=delta.job, version=delta.version))

    def _terminate(self, job: JobProcesses, name: WorkerId) -> None:
        if name in job.workers and job.group is not None and job.group.member(name) is not None:
            self._training.stop(job)
            job.group = None
        self._processes.exit(job, name, signal=SIGTERM)

    def _call_after_current(self, call: Callable[..., None], *arguments: object) -> None:
        """Call later at the current time, after the events that are already scheduled."""
        now, priority = self._kernel.now, self._kernel.priority
        self._kernel.call_at(now, call, *arguments, priority=priority)

    # --- prepare

    def _prepare(
        self, job: JobProcesses, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        for name, member in wanted.items():
            version, _ = version_and_rank(name)
            if name not in job.workers and version == delta.version:
                self._processes.start(job, member, self._start_s(job, delta.kind))
        members = delta.group.members if delta.group else ()
        first = members[0].worker if members else None
        if delta.kind != JOIN or first not in wanted or first not in job.workers:
            return
        if job.workers[first].version < delta.version and len(members) > 1:
            self._call_after_current(self._open_store, job, first, delta.version)

    def _start_s(self, job: JobProcesses, kind: str) -> float:
        if self._instant_changes:
            return 0.0
        return job.costs.prepare_s if kind == JOIN else _stall_s(job, kind)

    def _open_store(self, job: JobProcesses, name: WorkerId, version: Version) -> None:
        self._processes.report(job, name, partial(StoreOpened, group=version, port=PORT))

    def _quiesce(
        self, job: JobProcesses, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        """Stop the survivors of a group that lost a member, and report their step."""
        self._training.stop(job)
        training = job.training
        for name in wanted:
            if name in job.workers:
                quiesced = partial(
                    Quiesced,
                    group=delta.version,
                    step=int(training.steps),
                    epoch=training.epoch,
                    has_full_state=job.workers[name].ready and job.group is not None,
                    port=PORT,
                )
                self._call_after_current(self._processes.report, job, name, quiesced)

    # --- switch

    def _switch(self, job: JobProcesses, delta: GroupDelta) -> None:
        now = self._kernel.now
        if delta.kind == SUSPEND:
            self._call_after_current(self._suspend, job, delta)
        elif delta.kind == START or self._instant_changes or _only_batch_changes(job, delta.group):
            self._call_after_current(self._form, job, delta)
        else:
            job.training.stall(now + job.costs.switch_s, now)
            self._kernel.call_at(now + job.costs.switch_s, self._form, job, delta)

    def _form(self, job: JobProcesses, delta: GroupDelta) -> None:
        group = delta.group
        if group is None or any(member.worker not in job.workers for member in group.members):
            return  # a member exited meanwhile
        if job.seen > (delta.version, SWITCH):
            return  # the switch was cancelled, or a newer delta came
        stall_s = 0.0
        if self._instant_changes and not _only_batch_changes(job, group):
            stall_s = _stall_s(job, delta.kind)
        if delta.kind == START:
            self._restore(job, group)
        job.group, job.started = group, True
        self._training.start(job, stall_s)
        training = job.training
        for member in group.members:
            formed = partial(
                GroupFormed, group=group.version, epoch=training.epoch, step=int(training.steps)
            )
            self._processes.report(job, member.worker, formed)
        for member in delta.former:
            self._call_after_current(self._leave, job, member.worker)

    def _restore(self, job: JobProcesses, group: Group) -> None:
        training = job.training
        training.advance(self._kernel.now)
        training.roll_back(training.saved if group.resume else 0.0)
        training.steps = training.saved_steps

    def _leave(self, job: JobProcesses, name: WorkerId) -> None:
        self._processes.exit(job, name, code=0)

    def _suspend(self, job: JobProcesses, delta: GroupDelta) -> None:
        group = job.group
        if group is None or job.seen > (delta.version, SWITCH):
            return
        training, leaving = job.training, list(job.workers)
        self._training.stop(job)
        training.save()
        suspended = partial(
            Suspended,
            group=delta.version,
            epoch=training.epoch,
            step=int(training.steps),
            samples_done=int(training.progress),
        )
        self._processes.report(job, group.members[0].worker, suspended)
        job.group = None
        for name in leaving:  # successors may have been ordered by now
            self._processes.exit(job, name, code=0)

    # --- nodes

    def is_down(self, node: NodeId) -> bool:
        """Return whether a node is lost and has not returned."""
        return node in self._down

    def lose_node(self, node: NodeId) -> list[JobProcesses]:
        """Remove a node and its processes without reports; return the jobs of broken groups."""
        self._down.add(node)
        hit = []
        for job in list(self._jobs.values()):
            local = [name for name, w in job.workers.items() if node_of(w.slot) == node]
            if not local:
                continue
            for name in local:
                self._processes.remove(job, name)
            group = job.group
            if group is not None and any(member.worker in local for member in group.members):
                hit.append(job)
        return hit

    def return_node(self, node: NodeId) -> None:
        """Bring a lost node back, empty."""
        self._down.discard(node)


def _stall_s(job: JobProcesses, kind: str) -> float:
    if kind != START:
        return job.costs.switch_s
    return job.costs.restart_s if job.started else job.costs.start_s


def _only_batch_changes(job: JobProcesses, group: Group | None) -> bool:
    """Return whether the members stay; the batch then changes between two steps."""
    before = job.group
    if before is None or group is None:
        return False
    return [member.worker for member in before.members] == [m.worker for m in group.members]


def _wanted(delta: GroupDelta, node: NodeId) -> dict[WorkerId, Member]:
    members = (*(delta.group.members if delta.group else ()), *delta.former)
    return {member.worker: member for member in members if node_of(member.slot) == node}
