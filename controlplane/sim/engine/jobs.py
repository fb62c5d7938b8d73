"""Simulated jobs: their training progress, their worker processes, and the log of results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.history import JobLeft, Record
from controlplane.core.model.job import Job
from controlplane.core.model.job_phases import HOLDING, Phase
from controlplane.core.state import State
from controlplane.policy.api import StartForecast as Forecast
from controlplane.sim.engine.event_queue import Kernel
from controlplane.sim.models.job_model import ChangeCosts, JobModel, Placement, Throughput
from controlplane.sim.results import (
    JobResult,
    LossLeft,
    SizeChange,
    SlotAllocation,
    StartForecast,
    TraceJob,
)
from schemas.ids import JobId, NodeId, Rank, Seconds, SlotId, Version, WorkerId, node_of
from schemas.nodes import Group, Member
from schemas.wire.agent import AgentEvent, SlotAwaited, WorkerExited, WorkerReady, WorkerStarted

STOPPED = Throughput(samples_per_s=0.0, progress_per_s=0.0)


@dataclass(slots=True)
class TrainingProgress:
    """Position and speed of a job's training; the speed is constant between changes.

    Times are virtual seconds; progress is in samples at the job's first batch.
    """

    model: JobModel
    progress: float = 0.0
    epoch: int = 0  # number of finished epochs
    steps: float = 0.0
    throughput: Throughput = STOPPED
    batch: int = 0  # global batch of the current or last group
    since: float = 0.0  # time up to which `progress` includes the training
    stalled_until: float = 0.0
    saved: float = 0.0  # progress of the last checkpoint
    saved_steps: float = 0.0
    epoch_trained_s: float = 0.0  # training time in the running epoch, without stalls
    epoch_samples: float = 0.0  # samples processed in the running epoch
    trained_s: float = 0.0  # total training time, without stalls
    extrapolated_s: float = 0.0  # part of `trained_s` at extrapolated speeds
    revision: int = 0  # number of changes; calls scheduled for an older revision do nothing

    @property
    def is_training(self) -> bool:
        """True if the job's group makes progress, even if it stalls at the moment."""
        return self.throughput.progress_per_s > 0.0

    def advance(self, now: float) -> None:
        """Add the training up to virtual second `now`, without stalls; ignore an earlier `now`."""
        trained_s = now - max(self.since, self.stalled_until)
        if trained_s > 0.0 and self.throughput is not STOPPED:
            self.progress += self.throughput.progress_per_s * trained_s
            samples = self.throughput.samples_per_s * trained_s
            self.epoch_samples += samples
            self.epoch_trained_s += trained_s
            self.trained_s += trained_s
            self.extrapolated_s += trained_s if self.throughput.extrapolated else 0.0
            self.steps += samples / self.batch if self.batch else 0.0
        self.since = max(self.since, now)

    def set_throughput(self, throughput: Throughput, now: float) -> None:
        """Change the speed from virtual second `now` on."""
        self.advance(now)
        self.throughput = throughput
        self.revision += 1

    def stall(self, until: float, now: float) -> None:
        """Pause training until virtual second `until`, or until a longer current stall ends."""
        self.advance(now)
        self.stalled_until = max(self.stalled_until, until)
        self.revision += 1

    def stop(self, now: float) -> None:
        """Stop training at virtual second `now`."""
        self.set_throughput(STOPPED, now)

    def save(self) -> None:
        """Record a checkpoint at the current position."""
        self.saved, self.saved_steps = self.progress, self.steps

    def roll_back(self, progress: float) -> None:
        """Set an earlier position, which can be before the start of the running epoch."""
        self.progress = max(0.0, progress)

    def place(self) -> dict[str, int]:
        """Return the epoch and step, as fields of reports."""
        return {"epoch": self.epoch, "step": int(self.steps)}

    def epoch_due(self, now: float) -> float:
        """Return the virtual second at which the epoch ends at the current speed, or infinity."""
        if not self.is_training:
            return math.inf
        return self.due_at(self.model.epoch_ends_at(self.epoch), now)

    def due_at(self, progress: float, now: float) -> float:
        """Return the virtual second at which the job reaches `progress` at the current speed."""
        left = progress - self.progress
        begin = max(self.since, self.stalled_until, now)
        return begin + max(0.0, left) / self.throughput.progress_per_s

    def finish_epoch(self, now: float) -> float:
        """Set the position to the end of the running epoch; return its mean samples per second."""
        self.advance(now)
        self.progress = self.model.epoch_ends_at(self.epoch)
        self.epoch += 1
        trained_s, samples = self.epoch_trained_s, self.epoch_samples
        self.epoch_trained_s = self.epoch_samples = 0.0
        return samples / trained_s if trained_s > 0.0 else self.throughput.samples_per_s


@dataclass(slots=True)
class WorkerProcess:
    """The process of one worker; its times are virtual seconds."""

    slot: SlotId
    version: Version  # version of the group for which the process was started
    rank: Rank
    ready_at: float
    ready: bool = False
    reports: int = 0  # number of reports so far, and index of the last report


@dataclass(slots=True)
class JobProcesses:
    """Workers of one job on all nodes."""

    id: JobId
    training: TrainingProgress
    costs: ChangeCosts
    crashes_at: float | None = None  # share of the work, in (0, 1), at which the script fails once
    fixed_batch: int | None = None  # samples per step of a rigid job; None: the group's batch
    group: Group | None = None  # group that trains
    workers: dict[WorkerId, WorkerProcess] = field(default_factory=dict)
    seen: tuple[int, int] = (0, 0)  # newest applied version and stage
    started: bool = False  # True: a group has trained at least once
    crashed: bool = False  # True: the crash in the trace has happened
    ended: bool = False  # True: ended in the core; some workers can still run

    @property
    def rigid(self) -> bool:
        """True if the job's program reports nothing and knows no orders."""
        return self.fixed_batch is not None

    def batch_of(self, group: Group) -> int:
        """Return the samples that a group processes in one step."""
        return group.global_batch if self.fixed_batch is None else self.fixed_batch

    def placement(self) -> Placement:
        """Return the group's number of slots on each node, in rank order, or () without a group."""
        return tuple(self.nodes().values())

    def nodes(self) -> Counter[NodeId]:
        """Return the group's number of slots on each node, in rank order."""
        members = self.group.members if self.group else ()
        return Counter(node_of(member.slot) for member in members)


@dataclass(slots=True)
class _Record:
    submission: TraceJob
    training: TrainingProgress
    counted: bool
    started_at: Seconds | None = None
    allocations: list[SlotAllocation] | None = None  # past allocations; None: not recorded
    slots: tuple[SlotId, ...] = ()  # current slots
    since: Seconds = Seconds(0.0)  # time at which the job got `slots`
    losses: list[LossLeft] = field(default_factory=list)  # empty: the model has no true losses
    sizes: list[SizeChange] = field(default_factory=list)  # only if there are losses
    epoch: int = 0  # epoch of the last entry of `losses`
    forecast: StartForecast | None = None  # first forecast of the start


class JobLog:
    """The record of each job, in order of submission."""

    def __init__(self, *, record_allocations: bool) -> None:
        self._record_allocations = record_allocations
        self._records: dict[JobId, _Record] = {}
        self._left: dict[JobId, Job] = {}  # jobs that left the state of the core

    def add(
        self, job: JobId, submission: TraceJob, training: TrainingProgress, *, counted: bool
    ) -> None:
        """Add an accepted job; other components advance the shared object `training`."""
        begins = training.model.loss_left(0)
        self._records[job] = _Record(
            submission=submission,
            training=training,
            counted=counted,
            allocations=[] if self._record_allocations else None,
            losses=[] if begins is None else [LossLeft(submission.at, begins)],
        )

    def note(self, job: Job, now: Seconds) -> None:
        """Record the current slots and loss of a job, and its start if it is new."""
        record = self._records.get(job.job)
        if record is None:
            return
        if record.started_at is None and job.phase in HOLDING:
            record.started_at = now
        if record.losses:
            _record_loss(record, len(job.size.slots), now)
        _record_slots(record, tuple(job.size.slots), now)

    def forecast(self, starts: Mapping[JobId, Forecast], now: Seconds) -> None:
        """Record the first forecast of each waiting job's start; later forecasts are ignored."""
        for name, said in starts.items():
            record = self._records.get(name)
            if record is not None and record.started_at is None and record.forecast is None:
                record.forecast = StartForecast(now, said.at, said.earliest, said.latest)

    def keep(self, records: Iterable[Record]) -> None:
        """Keep the jobs that left the state of the core, because `results` needs them."""
        self._left |= {record.job: record.last for record in records if isinstance(record, JobLeft)}

    def job(self, name: JobId, state: State) -> Job:
        """Return a job from `state`, or the last version of a job that left the state."""
        return self._left.get(name) or state.jobs[name]

    def results(self, state: State, now: Seconds) -> tuple[JobResult, ...]:
        """Return the results of all jobs, in order of submission."""
        for record in self._records.values():
            _record_slots(record, (), now)
        return tuple(
            _result(record, self.job(name, state)) for name, record in self._records.items()
        )


def _record_loss(record: _Record, slots: int, now: Seconds) -> None:
    if slots != (record.sizes[-1].slots if record.sizes else 0):
        record.sizes.append(SizeChange(now, slots))
    epoch = record.training.epoch
    left = record.training.model.loss_left(epoch) if epoch != record.epoch else None
    if left is not None:
        record.epoch = epoch
        record.losses.append(LossLeft(now, left))


def _record_slots(record: _Record, slots: tuple[SlotId, ...], now: Seconds) -> None:
    if record.allocations is None or slots == record.slots:
        return
    record.allocations += [SlotAllocation(slot, record.since, now) for slot in record.slots]
    record.since, record.slots = now, slots


def _result(record: _Record, job: Job) -> JobResult:
    return JobResult(
        job=record.submission.name,
        application=record.training.model.application,
        submitted_at=job.submitted_at,
        started_at=record.started_at,
        ended_at=job.accounting.since if job.ended else None,
        state=job.phase.value,
        queued_s=job.accounting.queued_s,
        exec_s=job.accounting.running_s,
        slot_s=job.accounting.slot_s,
        rescales=job.accounting.rescales,
        batch_changes=job.accounting.batch_changes,
        trained_s=record.training.trained_s,
        extrapolated_s=record.training.extrapolated_s,
        worth=_realised_utility(job),
        most_worth=job.spec.stated_utility.value if job.spec.stated_utility else 0.0,
        promised_at=job.promised_end.first if job.promised_end else None,
        counted=record.counted,
        kind=record.submission.kind,
        project=record.submission.project,
        forecast=record.forecast,
        allocations=tuple(record.allocations or ()),
        losses=tuple(record.losses),
        sizes=tuple(record.sizes),
    )


def _realised_utility(job: Job) -> float | None:
    """Return the value of the job to its user: 0 without success, None if no utility is stated."""
    utility = job.spec.stated_utility
    if utility is None:
        return None
    if job.phase is not Phase.SUCCEEDED:
        return 0.0
    return utility.at(job.accounting.since - job.submitted_at)


PORT = 29_500
SendReport = Callable[[NodeId, AgentEvent], None]


@dataclass(eq=False)
class WorkerProcesses:
    """Worker processes of the cluster; a slot has one at a time, for which the next one waits."""

    kernel: Kernel
    send: SendReport
    jobs: MutableMapping[JobId, JobProcesses]  # without jobs that ended and have no processes
    _process_on: dict[SlotId, WorkerId] = field(default_factory=dict)
    _waiting_for: dict[SlotId, tuple[JobProcesses, WorkerId]] = field(default_factory=dict)

    def start(self, job: JobProcesses, member: Member, start_s: float) -> None:
        """Start a worker, which is ready after `start_s` seconds and the exit of its forerunner."""
        version, rank = version_and_rank(member.worker)
        worker = WorkerProcess(member.slot, version, rank, ready_at=self.kernel.now + start_s)
        job.workers[member.worker] = worker
        started = WorkerStarted(
            job=job.id, version=version, rank=rank, pid=len(job.workers), started_ticks=1
        )
        self.send(node_of(member.slot), started)
        call = self._become_ready
        if member.slot in self._process_on:
            self._waiting_for[member.slot] = (job, member.worker)
            call = self._await_slot
        else:
            self._process_on[member.slot] = member.worker
        self.kernel.call_at(worker.ready_at, call, job, member.worker)

    def exit(
        self,
        job: JobProcesses,
        name: WorkerId,
        *,
        code: int | None = None,
        signal: int | None = None,
        asked: bool = False,
    ) -> None:
        """Exit a worker, if it exists, and report its status; `code` is None after a signal."""
        worker = job.workers.get(name)
        if worker is None:
            return
        self.remove(job, name)
        exited = WorkerExited(
            job=job.id, version=worker.version, rank=worker.rank, code=code, signal=signal,
            asked=asked,
        )  # fmt: skip
        self.send(node_of(worker.slot), exited)

    def remove(self, job: JobProcesses, name: WorkerId) -> None:
        """Remove a worker without a report, and an ended job with its last worker."""
        worker = job.workers.pop(name)
        if job.ended and not job.workers:
            del self.jobs[job.id]
        slot = worker.slot
        if self._process_on.get(slot) == name:
            del self._process_on[slot]
            other, its_name = self._waiting_for.pop(slot, (job, name))
            if its_name in other.workers:
                self._process_on[slot] = its_name
                ready_at = other.workers[its_name].ready_at
                self.kernel.call_at(ready_at, self._become_ready, other, its_name)
        elif self._waiting_for.get(slot, (None, ""))[1] == name:
            del self._waiting_for[slot]

    def report(
        self, job: JobProcesses, name: WorkerId, event: Callable[..., AgentEvent], **fields: Any
    ) -> None:
        """Send an event of a worker with these fields, if the worker exists."""
        worker = job.workers.get(name)
        if worker is not None:
            worker.reports += 1
            named = {"version": worker.version, "rank": worker.rank, "index": worker.reports}
            self.send(node_of(worker.slot), event(job=job.id, **named, **fields))

    def _await_slot(self, job: JobProcesses, name: WorkerId) -> None:
        """Report that a worker waits for its slot, if another process still uses the slot."""
        worker = job.workers.get(name)
        if worker is not None and self._waiting_for.get(worker.slot) == (job, name):
            self.report(job, name, SlotAwaited)

    def _become_ready(self, job: JobProcesses, name: WorkerId) -> None:
        worker = job.workers.get(name)
        if worker is None or worker.ready:
            return
        worker.ready = True
        samples, epoch = job.training.model.epoch_samples, job.training.epoch
        facts = {"epoch_samples": samples, "resumed_epoch": epoch, "parameters": 1}
        self.report(job, name, WorkerReady, store_port=PORT, **facts)


def version_and_rank(name: WorkerId) -> tuple[Version, Rank]:
    """Return the version and rank in a worker's name (`schemas.ids.worker_id`)."""
    _, version, rank = name.rsplit(".", 2)
    return Version(int(version[1:])), Rank(int(rank[1:]))
