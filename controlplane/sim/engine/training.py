"""Training of groups in virtual time: speeds, ends of epochs, failing scripts, shared nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from functools import partial

from controlplane.sim.cluster import RELATIVE_SPEEDS
from controlplane.sim.engine.event_queue import AFTER, USUAL, Kernel, SimOptions
from controlplane.sim.engine.jobs import JobProcesses
from controlplane.sim.engine.telemetry import MeasuredFigures, StepTelemetry
from controlplane.sim.engine.workers import WorkerProcesses
from controlplane.sim.models.demands import Interference
from controlplane.sim.models.job_model import Throughput
from schemas.epochs import EpochFacts, StepTimes
from schemas.ids import JobId, NodeId, SlotId, node_of, slot_id
from schemas.nodes import Group, NodeSpec
from schemas.wire.agent import EpochReported, GroupBroken, ScriptFailed, TrainingFinished


class SharedNodes:
    """Training jobs on each node, and the interference between them."""

    def __init__(self, interference: Interference) -> None:
        self._interference = interference
        self._workers_on: dict[NodeId, dict[JobId, int]] = {}  # node -> job -> workers

    def enter(self, job: JobProcesses) -> None:
        """Record the nodes of the job's group, and only these."""
        self.leave(job.id)
        for member in job.group.members if job.group is not None else ():
            workers = self._workers_on.setdefault(node_of(member.slot), {})
            workers[job.id] = workers.get(job.id, 0) + 1

    def leave(self, job: JobId) -> None:
        """Remove the job from all nodes."""
        for workers in self._workers_on.values():
            workers.pop(job, None)

    def neighbours(self, job: JobId) -> list[JobId]:
        """Return the other jobs that train on the job's nodes, each once."""
        return list(dict.fromkeys(
            other
            for workers in self._workers_on.values() if job in workers
            for other in workers if other != job
        ))  # fmt: skip

    def remaining_speed(self, job: JobProcesses) -> float:
        """Return the share of its speed that a training job keeps, in (0, 1]."""
        at: Mapping[NodeId, dict[JobId, int]] = {
            node: self._workers_on[node] for node in job.nodes()
        }
        return self._interference.remaining_speed(job.id, at)


class GroupTraining:
    """Progress of all groups, and the reports of their workers."""

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
        """Start training of `job.group`; its first step begins after `stall_s` seconds."""
        now, training, group = self._kernel.now, job.training, job.group
        if group is None:
            return
        training.advance(now)
        batch = group.global_batch
        lost = 0.0
        if training.batch:
            lost = training.model.lost_progress(training.batch, batch, training.epoch)
        if lost:
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
        """Stop training of a job; its neighbours on shared nodes become faster."""
        job.training.stop(self._kernel.now)
        if self.shared_nodes is not None:
            neighbours = self.shared_nodes.neighbours(job.id)
            self.shared_nodes.leave(job.id)
            self._refresh(neighbours)

    def break_group(self, job: JobProcesses) -> None:
        """Stop a group that lost a member; a survivor reports the loss.

        Without survivors the job has no group any more, and nothing is reported.
        """
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
        """Return the model's throughput, reduced by slow GPUs and neighbours."""
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
        """Schedule the end of the epoch, or an earlier failure of the script."""
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
            when, round_s = float(round(exact)), self._options.round_s
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
        parts = self._measured.parts(job.id, training.throughput.parts, faster)
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
            step_times=None if parts is None else StepTimes(*astuple(parts)),
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
        for name in [member.worker for member in group.members]:
            self._processes.exit(job, name, code=0)

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
    """Return the progress at which the script will fail, or None."""
    if job.crashes_at is None or job.crashed:
        return None
    model = job.training.model
    return job.crashes_at * model.epoch_ends_at(model.epochs - 1)
