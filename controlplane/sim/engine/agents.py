"""Simulated node agents, which apply deltas, and the training of groups in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class GroupTraining:
    """Training of all groups, and the reports of their workers."""

    kernel: Kernel
    jobs: Mapping[JobId, JobProcesses]
    processes: WorkerProcesses
    nodes: Iterable[NodeSpec]
    options: SimOptions
    measured: MeasuredFigures
    shared_nodes: SharedNodes | None = None  # None: jobs do not slow each other down
    telemetry: StepTelemetry | None = None  # None: the policy does not read it

    def __post_init__(self) -> None:
        """Look up the speed of every slot."""
        self._slot_speeds: dict[SlotId, float] = {
            slot_id(node.node, slot.index): RELATIVE_SPEEDS.get(slot.model, 1.0)
            for node in self.nodes
            for slot in node.slots
        }
        self._all_standard_speed = set(self._slot_speeds.values()) == {1.0}

    # --- groups begin and end

    def start(self, job: JobProcesses, stall_s: float) -> None:
        """Start the training of `job.group`; its first step begins after `stall_s` seconds."""
        now, training, group = self.kernel.now, job.training, job.group
        if group is None:
            return
        training.advance(now)
        batch, before = job.batch_of(group), training.batch
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
        job.training.stop(self.kernel.now)
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
            fields = {"group": group.version, "error": "peer gone"}
            self.processes.report(job, left[0], GroupBroken, **fields)
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
            job = self.jobs.get(name)
            if job is not None and job.group is not None and job.training.is_training:
                job.training.set_throughput(self._throughput(job), self.kernel.now)
                self._schedule_epoch_end(job)

    # --- epochs

    def _schedule_epoch_end(self, job: JobProcesses) -> None:
        """Schedule the end of the epoch, or the failure of the script if the failure is earlier."""
        training = job.training
        exact = training.epoch_due(self.kernel.now)
        if not math.isfinite(exact):
            return
        crash_at = _crash_progress(job)
        if crash_at is not None and crash_at < training.model.epoch_ends_at(training.epoch):
            when = training.due_at(crash_at, self.kernel.now)
            self.kernel.call_at(when, self._fail_script, job, training.revision)
            return
        when, priority = exact, USUAL
        if self.options.whole_seconds:
            when, round_s = float(round(exact)), self.options.scenario.round_s
            on_round = round_s > 0 and when % round_s == 0
            priority = AFTER if on_round and exact > when else USUAL
        self.kernel.call_at(when, self._end_epoch, job, training.revision, priority=priority)

    def _end_epoch(self, job: JobProcesses, revision: int) -> None:
        training = job.training
        if training.revision != revision or job.group is None:
            return
        samples_per_s = training.finish_epoch(self.kernel.now)
        training.save()
        if not job.rigid:
            self._report_epoch(job, job.group, samples_per_s)
        if training.epoch >= training.model.epochs:
            self._finish(job, job.group)
        if job.group is not None and training.is_training:
            training.set_throughput(self._throughput(job), self.kernel.now)
            self._schedule_epoch_end(job)

    def _report_epoch(self, job: JobProcesses, group: Group, samples_per_s: float) -> None:
        training, model = job.training, job.training.model
        faster = self.measured.error(job.id)
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
            noise_scale=self.measured.noise_scale(job, metrics.noise_scale),
            step_times=self.measured.parts(job.id, training.throughput.parts, faster),
        )
        stated = stop.epochs if stop is not None else None
        fields = {"group": group.version, "stated_epochs": stated, "duration_s": 0.0}
        self.processes.report(job, group.members[0].worker, EpochReported, facts=facts, **fields)

    def _finish(self, job: JobProcesses, group: Group) -> None:
        self.stop(job)
        job.group = None
        if not job.rigid:
            reason = "its stop rule is met"
            self.processes.report(job, group.members[0].worker, TrainingFinished, reason=reason)
        for member in group.members:
            self.processes.exit(job, member.worker, code=0)

    def _fail_script(self, job: JobProcesses, revision: int) -> None:
        group = job.group
        if job.training.revision != revision or group is None:
            return
        job.crashed = True
        self.stop(job)
        job.group = None
        fields = {"error": "RuntimeError: as its trace says", "where": "train.py:1"}
        self.processes.report(job, group.members[0].worker, ScriptFailed, **fields)
        for member in group.members:
            self.processes.exit(job, member.worker, code=1)


def _crash_progress(job: JobProcesses) -> float | None:
    """Return the progress at which the script will fail, or None if it will not fail."""
    if job.crashes_at is None or job.crashed:
        return None
    model = job.training.model
    return job.crashes_at * model.epoch_ends_at(model.epochs - 1)


SIGTERM: Final = 15


@dataclass(eq=False)
class NodeAgents:
    """Agents of all nodes.

    With `instant_changes`, slots pass from job to job in no time and every change causes a stall.
    Otherwise new workers start while the old group continues to train.
    """

    kernel: Kernel
    send: SendReport
    jobs: Mapping[JobId, JobProcesses]
    processes: WorkerProcesses
    training: GroupTraining
    instant_changes: bool
    down: set[NodeId] = field(default_factory=set)  # nodes that are lost and have not returned

    # --- orders

    def apply(self, node: NodeId, delta: GroupDelta) -> None:
        """Apply a delta as a live agent does. A node that is down ignores the delta."""
        if node in self.down:
            return
        if delta.group is None:
            self._call_after_current(self._confirm_cleared, node, delta)
        job = self.jobs.get(delta.job)
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
        job = self.jobs.get(delta.job)
        local = job.workers.values() if job is not None else ()
        if not any(node_of(w.slot) == node and w.version < delta.version for w in local):
            self.send(node, JobCleared(job=delta.job, version=delta.version))

    def _terminate(self, job: JobProcesses, name: WorkerId) -> None:
        if name in job.workers and job.group is not None and job.group.member(name) is not None:
            self.training.stop(job)
            job.group = None
        self.processes.exit(job, name, signal=SIGTERM)

    def _call_after_current(
        self, call: Callable[..., None], *arguments: object, **named: object
    ) -> None:
        """Schedule a call at the current time, after the calls that are already scheduled."""
        now, priority = self.kernel.now, self.kernel.priority
        self.kernel.call_at(now, partial(call, *arguments, **named), priority=priority)

    # --- prepare

    def _prepare(
        self, job: JobProcesses, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        for name, member in wanted.items():
            version, _ = version_and_rank(name)
            if name not in job.workers and version == delta.version:
                self.processes.start(job, member, self._start_s(job, delta.kind))
        members = delta.group.members if delta.group else ()
        first = members[0].worker if members else None
        if delta.kind != JOIN or first not in wanted or first not in job.workers:
            return
        if job.workers[first].version < delta.version and len(members) > 1:
            opened = {"group": delta.version, "port": PORT}
            self._call_after_current(self.processes.report, job, first, StoreOpened, **opened)

    def _start_s(self, job: JobProcesses, kind: str) -> float:
        if self.instant_changes:
            return 0.0
        return job.costs.prepare_s if kind == JOIN else _stall_s(job, kind)

    def _quiesce(
        self, job: JobProcesses, delta: GroupDelta, wanted: Mapping[WorkerId, Member]
    ) -> None:
        """Stop the survivors of a group that lost a member; each of them reports its step."""
        self.training.stop(job)
        training = job.training
        for name in wanted:
            if name in job.workers:
                full = job.workers[name].ready and job.group is not None
                fields = training.place() | {"has_full_state": full, "port": PORT}
                fields["group"] = delta.version
                self._call_after_current(self.processes.report, job, name, Quiesced, **fields)

    # --- switch

    def _switch(self, job: JobProcesses, delta: GroupDelta) -> None:
        now = self.kernel.now
        if delta.kind == SUSPEND:
            self._call_after_current(self._suspend, job, delta)
        elif delta.kind == START or self.instant_changes or _only_batch_changes(job, delta.group):
            self._call_after_current(self._form, job, delta)
        else:
            job.training.stall(now + job.costs.switch_s, now)
            self.kernel.call_at(now + job.costs.switch_s, self._form, job, delta)

    def _form(self, job: JobProcesses, delta: GroupDelta) -> None:
        group = delta.group
        if group is None or any(member.worker not in job.workers for member in group.members):
            return  # a member has exited since the order
        if job.seen > (delta.version, SWITCH):
            return  # a newer delta replaced or cancelled the switch
        stall_s = 0.0
        if self.instant_changes and not _only_batch_changes(job, group):
            stall_s = _stall_s(job, delta.kind)
        if delta.kind == START:
            self._restore(job, group)
        job.group, job.started = group, True
        self.training.start(job, stall_s)
        fields = {"group": group.version, **job.training.place()}
        for member in group.members:
            self.processes.report(job, member.worker, GroupFormed, **fields)
        for member in delta.former:
            self._call_after_current(self.processes.exit, job, member.worker, code=0)

    def _restore(self, job: JobProcesses, group: Group) -> None:
        training = job.training
        training.advance(self.kernel.now)
        training.roll_back(training.saved if group.resume or job.rigid else 0.0)
        training.steps = training.saved_steps

    def _suspend(self, job: JobProcesses, delta: GroupDelta) -> None:
        group = job.group
        if group is None or job.seen > (delta.version, SWITCH):
            return
        training, leaving = job.training, list(job.workers)
        self.training.stop(job)
        training.save()  # a rigid job saves within its grace
        if not job.rigid:
            fields = {"group": delta.version, "samples_done": int(training.progress)}
            fields |= training.place()
            self.processes.report(job, group.members[0].worker, Suspended, **fields)
        job.group = None
        for name in leaving:  # no other workers, because successors can have started by now
            self.processes.exit(job, name, code=0, asked=job.rigid)

    # --- nodes

    def lose_node(self, node: NodeId) -> list[JobProcesses]:
        """Remove a node without reports; return the jobs that lost a member of their group."""
        self.down.add(node)
        hit = []
        for job in list(self.jobs.values()):
            local = [name for name, w in job.workers.items() if node_of(w.slot) == node]
            for name in local:
                self.processes.remove(job, name)
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
