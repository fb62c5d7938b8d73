"""Simulated node agents, which apply deltas, and the training of groups in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from controlplane.sim.cluster import RELATIVE_SPEEDS
from controlplane.sim.engine.event_queue import AFTER, USUAL, Kernel, SimOptions
from controlplane.sim.engine.jobs import (
    PORT,
    JobProcesses,
    SendReport,
    WorkerProcesses,
    version_and_rank,
)
from controlplane.sim.engine.telemetry import MeasuredFigures, StepTelemetry
from controlplane.sim.models.demands import Interference
from controlplane.sim.models.job_model import Throughput
from schemas.epochs import EpochFacts
from schemas.ids import JobId, NodeId, SlotId, WorkerId, node_of, slot_id
from schemas.nodes import Group, Member, NodeSpec
from schemas.wire.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    START,
    SUSPEND,
    SWITCH,
    EpochReported,
    GroupBroken,
    GroupDelta,
    GroupFormed,
    JobCleared,
    Quiesced,
    ScriptFailed,
    StoreOpened,
    Suspended,
    TrainingFinished,
)


class SharedNodes:
    """Training jobs on each node, and the interference between them."""

    def __init__(self, interference: Interference) -> None:
        self._interference = interference
        self._workers_on: dict[NodeId, dict[JobId, int]] = {}  # node -> job -> workers

    def enter(self, job: JobProcesses) -> None:
        """Replace the recorded nodes of a job by the nodes of its current group."""
        self.leave(job.id)
        for node, workers in job.nodes().items():
            self._workers_on.setdefault(node, {})[job.id] = workers

    def leave(self, job: JobId) -> None:
        """Remove the job from all nodes."""
        for workers in self._workers_on.values():
            workers.pop(job, None)

    def neighbours(self, job: JobId) -> list[JobId]:
        """Return the other jobs that train on the job's nodes, without duplicates."""
        return list(dict.fromkeys(
            other
            for workers in self._workers_on.values() if job in workers
            for other in workers if other != job
        ))  # fmt: skip

    def remaining_speed(self, job: JobProcesses) -> float:
        """Return the share of its speed that a job keeps beside its neighbours, in (0, 1]."""
        return self._interference(job.id, {node: self._workers_on[node] for node in job.nodes()})


class GroupTraining:
    """Training of all groups, and the reports of their workers."""

    def __init__(
        self,
        kernel: Kernel,
        jobs: Mapping[JobId, JobProcesses],
        processes: WorkerProcesses,
        nodes: Iterable[NodeSpec],
        options: SimOptions,
        *,
        measured: MeasuredFigures,
    ) -> None:
        self.shared_nodes: SharedNodes | None = None  # None: jobs do not slow each other down
        self.telemetry: StepTelemetry | None = None  # None: the policy does not read it
        self._kernel = kernel
        self._jobs = jobs
        self._processes = processes
        self._options = options
        self._measured = measured
        self._slot_speeds: dict[SlotId, float] = {
            slot_id(node.node, slot.index): RELATIVE_SPEEDS.get(slot.model, 1.0)
            for node in nodes
            for slot in node.slots
        }
        self._all_standard_speed = set(self._slot_speeds.values()) == {1.0}

    # --- groups begin and end

    def start(self, job: JobProcesses, stall_s: float) -> None:
        """Start the training of `job.group`; its first step begins after `stall_s` seconds."""
        now, training, group = self._kernel.now, job.training, job.group
        if group is None:
            return
        training.advance(now)
        batch, before = group.global_batch, training.batch
        if before and (lost := training.model.lost_progress(before, batch, training.epoch)):
            training.roll_back(training.progress - lost)
        training.batch = batch
        training.stalled_until = now + stall_s
        former: list[JobId] = []
        if self.shared_nodes is not None:
            former = self.shared_nodes.neighbours(job.id)
            self.shared_nodes.enter(job)
        training.set_throughput(self._throughput(job), now)
        self._schedule_epoch_end(job)
        if self.shared_nodes is not None:
            self._refresh(dict.fromkeys([*former, *self.shared_nodes.neighbours(job.id)]))
        if self.telemetry is not None:
            self.telemetry.begin(job)

    def stop(self, job: JobProcesses) -> None:
        """Stop the training of a job, so that neighbours on shared nodes become faster."""
        job.training.stop(self._kernel.now)
        if self.shared_nodes is not None:
            neighbours = self.shared_nodes.neighbours(job.id)
            self.shared_nodes.leave(job.id)
            self._refresh(neighbours)

    def break_group(self, job: JobProcesses) -> None:
        """Stop a group that lost a member; a survivor, if any, reports the loss."""
        group = job.group
        self.stop(job)
        left = [m.worker for m in group.members if m.worker in job.workers] if group else []
        if group is not None and left:
            broken = partial(GroupBroken, group=group.version, error="peer gone")
            self._processes.report(job, left[0], broken)
        else:
            job.group = None

    # --- speeds

    def _throughput(self, job: JobProcesses) -> Throughput:
        """Return the model's throughput, reduced by slow GPUs and by neighbours."""
        training = job.training
        usual = training.model.throughput(job.placement(), training.batch, training.epoch)
        factor = 1.0
        if not self._all_standard_speed and job.group is not None:
            factor = min(self._slot_speeds[member.slot] for member in job.group.members)
        if self.shared_nodes is not None:
            factor *= self.shared_nodes.remaining_speed(job)
        return usual if factor == 1.0 else usual.times(factor)

    def _refresh(self, jobs: Iterable[JobId]) -> None:
        for name in jobs:
            job = self._jobs.get(name)
            if job is not None and job.group is not None and job.training.is_training:
                job.training.set_throughput(self._throughput(job), self._kernel.now)
                self._schedule_epoch_end(job)

    # --- epochs

    def _schedule_epoch_end(self, job: JobProcesses) -> None:
        """Schedule the end of the epoch, or the failure of the script if the failure is earlier."""
        training = job.training
        exact = training.epoch_due(self._kernel.now)
        if not math.isfinite(exact):
            return
        crash_at = _crash_progress(job)
        if crash_at is not None and crash_at < training.model.epoch_ends_at(training.epoch):
            when = training.due_at(crash_at, self._kernel.now)
            self._kernel.call_at(when, self._fail_script, job, training.revision)
            return
        when, priority = exact, USUAL
        if self._options.whole_seconds:
            when, round_s = float(round(exact)), self._options.scenario.round_s
            on_round = round_s > 0 and when % round_s == 0
            priority = AFTER if on_round and exact > when else USUAL
        self._kernel.call_at(when, self._end_epoch, job, training.revision, priority=priority)

    def _end_epoch(self, job: JobProcesses, revision: int) -> None:
        training = job.training
        if training.revision != revision or job.group is None:
            return
        samples_per_s = training.finish_epoch(self._kernel.now)
        training.save()
        self._report_epoch(job, job.group, samples_per_s)
        if training.epoch >= training.model.epochs:
            self._finish(job, job.group)
        if job.group is not None and training.is_training:
            training.set_throughput(self._throughput(job), self._kernel.now)
            self._schedule_epoch_end(job)

    def _report_epoch(self, job: JobProcesses, group: Group, samples_per_s: float) -> None:
        training, model = job.training, job.training.model
        faster = self._measured.error(job.id)
        stop, metrics = model.spec.stop, model.epoch_metrics(training.epoch, group.global_batch)
        facts = EpochFacts(
            epoch=training.epoch,
            step=int(training.steps),
            samples_done=round(training.progress),
            epoch_samples=model.epoch_samples,
            samples_per_s=samples_per_s * faster,
            train_loss=metrics.train_loss,
            metrics=metrics.metrics,
            global_batch=group.global_batch,
            lr=group.lr or 0.0,
            noise_scale=self._measured.noise_scale(job, metrics.noise_scale),
            step_times=self._measured.parts(job.id, training.throughput.parts, faster),
        )
        stated = stop.epochs if stop is not None else None
        reported = partial(
            EpochReported, group=group.version, stated_epochs=stated, duration_s=0.0, facts=facts
        )
        self._processes.report(job, group.members[0].worker, reported)

    def _finish(self, job: JobProcesses, group: Group) -> None:
        self.stop(job)
        job.group = None
        finished = partial(TrainingFinished, reason="its stop rule is met")
        self._processes.report(job, group.members[0].worker, finished)
        for member in group.members:
            self._processes.exit(job, member.worker, code=0)

    def _fail_script(self, job: JobProcesses, revision: int) -> None:
        group = job.group
        if job.training.revision != revision or group is None:
            return
        job.crashed = True
        self.stop(job)
        job.group = None
        failed = partial(ScriptFailed, error="RuntimeError: as its trace says", where="train.py:1")
        self._processes.report(job, group.members[0].worker, failed)
        for member in group.members:
            self._processes.exit(job, member.worker, code=1)


def _crash_progress(job: JobProcesses) -> float | None:
    """Return the progress at which the script will fail, or None if it will not fail."""
    if job.crashes_at is None or job.crashed:
        return None
    model = job.training.model
    return job.crashes_at * model.epoch_ends_at(model.epochs - 1)


SIGTERM: Final = 15


class NodeAgents:
    """Agents of all nodes.

    With `instant_changes`, slots pass from job to job in no time and every change causes a stall.
    Otherwise new workers start while the old group continues to train.
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
        self.down: set[NodeId] = set()  # nodes that are lost and have not returned

    # --- orders

    def apply(self, node: NodeId, delta: GroupDelta) -> None:
        """Apply a delta as a live agent does. A node that is down ignores the delta."""
        if node in self.down:
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
        if delta.stage == PREPARE:
            prepare = self._quiesce if delta.kind == RECOVER else self._prepare
            prepare(job, delta, wanted)
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
        """Report the job as cleared from the node, unless an older worker of the job remains."""
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
        """Schedule a call at the current time, after the calls that are already scheduled."""
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
            opened = partial(StoreOpened, group=delta.version, port=PORT)
            self._call_after_current(self._processes.report, job, first, opened)

    def _start_s(self, job: JobProcesses, kind: str) -> float:
        if self._instant_changes:
            return 0.0
        return job.costs.prepare_s if kind == JOIN else _stall_s(job, kind)

    def _quiesce(
        self, job: JobProcesses, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        """Stop the survivors of a group that lost a member; each of them reports its step."""
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
            return  # a member has exited since the order
        if job.seen > (delta.version, SWITCH):
            return  # a newer delta replaced or cancelled the switch
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
            leave = partial(self._processes.exit, job, member.worker, code=0)
            self._call_after_current(leave)

    def _restore(self, job: JobProcesses, group: Group) -> None:
        training = job.training
        training.advance(self._kernel.now)
        training.roll_back(training.saved if group.resume else 0.0)
        training.steps = training.saved_steps

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
        for name in leaving:  # no other workers, because successors can have started by now
            self._processes.exit(job, name, code=0)

    # --- nodes

    def lose_node(self, node: NodeId) -> list[JobProcesses]:
        """Remove a node without reports; return the jobs whose groups have lost a member."""
        self.down.add(node)
        hit = []
        for job in list(self._jobs.values()):
            local = [name for name, w in job.workers.items() if node_of(w.slot) == node]
            for name in local:
                self._processes.remove(job, name)
            if any(member.worker in local for member in (job.group.members if job.group else ())):
                hit.append(job)
        return hit


def _stall_s(job: JobProcesses, kind: str) -> float:
    if kind != START:
        return job.costs.switch_s
    return job.costs.restart_s if job.started else job.costs.start_s


def _only_batch_changes(job: JobProcesses, group: Group | None) -> bool:
    """Return whether the new group has the same members; its batch changes between two steps."""
    before = job.group
    if before is None or group is None:
        return False
    return [member.worker for member in before.members] == [m.worker for m in group.members]


def _wanted(delta: GroupDelta, node: NodeId) -> dict[WorkerId, Member]:
    members = (*(delta.group.members if delta.group else ()), *delta.former)
    return {member.worker: member for member in members if node_of(member.slot) == node}
