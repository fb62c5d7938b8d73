"""Reconciler of desired and observed workers. It turns events into actions, without clock or I/O.

The controller's deltas say what should run, and events of processes say what does run. After every
event the reconciler compares the two for one job, and requests the difference as actions.

The module defines the reconciler's inputs (events) and outputs (actions).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from schemas.ids import JobId, NodeId, Rank, Version, WorkerId, index_of, node_of, worker_id
from schemas.jobs import EndWarning
from schemas.nodes import Member
from schemas.wire import agent as wire
from schemas.wire.sweeps import SweepDelta, UnitOrder
from schemas.wire.worker import Assignment


class Desired(Struct, frozen=True):
    """The controller's desired state of a job."""

    delta: wire.GroupDelta


class SweepDesired(Struct, frozen=True):
    """The controller's desired state of a sweep."""

    delta: SweepDelta


class WorkspaceReady(Struct, frozen=True):
    """The job's working directory is unpacked."""

    job: JobId
    digest: str


class WorkspaceFailed(Struct, frozen=True):
    """The job's working directory could not be unpacked."""

    job: JobId
    digest: str
    error: str
    node_fault: bool = False


class Adopted(Struct, frozen=True):
    """A worker that an earlier agent process started. The worker might have exited since."""

    worker: WorkerId
    assignment: Assignment
    pid: int | None
    started_ticks: int | None


class Started(Struct, frozen=True):
    """A worker's process exists."""

    worker: WorkerId
    pid: int
    started_ticks: int


class StartFailed(Struct, frozen=True):
    """A worker's process could not be started."""

    worker: WorkerId
    error: str
    hint: str = ""
    node_fault: bool = False  # not caused by the job


class Connected(Struct, frozen=True):
    """A worker connected to this agent."""

    worker: WorkerId


class ReportRead(Struct, frozen=True):
    """The next report of a worker's report file."""

    worker: WorkerId
    report: wire.ScriptReport


class Ended(Struct, frozen=True):
    """A worker's process has exited, and its reports were read, except those beyond its rate."""

    worker: WorkerId
    code: int | None
    signal: int | None
    unseen: bool
    memory_limit: int | None = None  # the job's limit here, bytes; None: not exceeded
    disk_limit: int | None = None  # the same for the job's files in one folder
    asked: bool = False  # TERM was sent to it before


class ReportedAgain(Struct, frozen=True):
    """The reports of a worker were all read again, because the controller's journal lost some."""

    worker: WorkerId


class GraceOver(Struct, frozen=True):
    """The grace period of a worker is over."""

    worker: WorkerId


class LogsStored(Struct, frozen=True):
    """The controller has all output of an exited worker."""

    worker: WorkerId


Event = (
    Desired | SweepDesired | WorkspaceReady | WorkspaceFailed | Adopted | Started | StartFailed
    | Connected | ReportRead | ReportedAgain | Ended | GraceOver | LogsStored
)  # fmt: skip


class FetchWorkspace(Struct, frozen=True):
    """Unpack a job's working directory."""

    job: JobId
    digest: str
    user: str = ""  # owner of the job
    journal: str = ""  # id of the journal that accepted the job


class StartWorker(Struct, frozen=True):
    """Write the assignment and have the zygote fork."""

    worker: WorkerId
    rank: int
    delta: wire.GroupDelta
    granted: bool = True  # the slot's device is free


class Warn(Struct, frozen=True):
    """Send the signal of the job's `warn` to the worker's processes, once."""

    worker: WorkerId
    warning: EndWarning


class Terminate(Struct, frozen=True):
    """Send TERM to the worker's process group, then start the grace period."""

    worker: WorkerId


class Kill(Struct, frozen=True):
    """Send KILL to the worker's process group."""

    worker: WorkerId


class AwaitExit(Struct, frozen=True):
    """Start the grace period, in which the worker should exit by itself."""

    worker: WorkerId


class OrderGroup(Struct, frozen=True):
    """Send a worker the desired state of its group."""

    worker: WorkerId
    delta: wire.GroupDelta


class GrantSlot(Struct, frozen=True):
    """Tell a worker that it may use its slot's device, which is free now."""

    worker: WorkerId


class OrderUnit(Struct, frozen=True):
    """Tell a worker which unit of its sweep to train."""

    worker: WorkerId
    unit: UnitOrder


class KeepStates(Struct, frozen=True):
    """Fetch the wanted states of a sweep, and delete the others."""

    delta: SweepDelta


class PublishEvent(Struct, frozen=True):
    """Number this event and publish it."""

    event: wire.AgentEvent


class RemoveWorker(Struct, frozen=True):
    """Delete the worker's folder."""

    worker: WorkerId


class ForgetJob(Struct, frozen=True):
    """The job has ended, and nothing of it is left on this node."""

    job: JobId


Action = (
    FetchWorkspace | StartWorker | Warn | Terminate | Kill | AwaitExit | OrderGroup | GrantSlot
    | OrderUnit | KeepStates | PublishEvent | RemoveWorker | ForgetJob
)  # fmt: skip


class ProcessPhase(Enum):
    """Phase of a worker's process on this node."""

    WANTED = "wanted"  # waits for its working directory or its slot
    STARTING = "starting"  # the fork was requested
    ALIVE = "alive"
    RETIRING = "retiring"  # left its group as agreed; exits by itself within the grace period
    STOPPING = "stopping"  # TERM or KILL was sent
    ENDED = "ended"  # exited; its folder stays until its output is stored


LIVING = frozenset(
    {ProcessPhase.STARTING, ProcessPhase.ALIVE, ProcessPhase.RETIRING, ProcessPhase.STOPPING}
)
LISTENING = frozenset({ProcessPhase.ALIVE, ProcessPhase.RETIRING})


@dataclass(slots=True)
class HeldUnit:
    """Unit of a sweep that a worker trains. Each number is an attempt; 0 means no unit."""

    sent: int = 0  # newest unit sent over the current connection
    held: int = 0  # newest unit that the worker might have received
    ended: int = 0  # newest unit with a reported result

    @property
    def training(self) -> bool:
        """True if the worker may be training a unit."""
        return self.held > self.ended

    def mark_sent(self, unit: UnitOrder) -> bool:
        """Return whether a unit has to be sent to the worker now. If so, record it as sent."""
        if unit.attempt <= max(self.sent, self.ended):
            return False
        self.sent, self.held = unit.attempt, max(self.held, unit.attempt)
        return True

    def reported(self, report: wire.ScriptReport) -> None:
        """Update from a worker's report. Only reports about units change anything."""
        match report:
            case wire.UnitStarted(attempt=attempt):
                self.held = max(self.held, attempt)
            case wire.UnitEnded(attempt=attempt) | wire.UnitFailed(attempt=attempt):
                self.held, self.ended = max(self.held, attempt), max(self.ended, attempt)

    def withdrawn(self, unit: UnitOrder | None, attempts: int) -> bool:
        """True if a delta that is newer than the unit in progress no longer orders this unit."""
        wanted = unit.attempt if unit is not None else 0
        return self.training and self.held <= attempts and self.held != wanted


@dataclass(slots=True)
class WorkerState:
    """State of a worker on this node."""

    worker: WorkerId
    job: JobId
    version: Version
    rank: Rank
    slot: int
    journal: str = ""  # the job's journal, which identifies the job together with its name
    phase: ProcessPhase = ProcessPhase.WANTED
    pid: int | None = None
    started_ticks: int | None = None
    exited: wire.WorkerExited | None = None  # report of its exit
    granted: bool = True  # the worker may use the slot's device
    adopted: bool = False  # an earlier agent process might have granted the device
    leaving: bool = False  # the worker was sent a group without itself
    newest_order: tuple[Version, int] = (Version(0), 0)  # version and stage sent to the worker
    stored: bool = False  # the controller has all of its output
    awaited: bool = False  # the grace period runs
    unit: HeldUnit = field(default_factory=HeldUnit)  # sweeps only

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that all events of this worker have."""
        return {
            "job": self.job, "version": self.version, "rank": self.rank, "journal": self.journal,
        }  # fmt: skip

    def seen(self) -> wire.WorkerSeen:
        """Return the worker's entry in a hello."""
        return wire.WorkerSeen(
            **self.identity,
            slot=self.slot,
            pid=self.pid,
            started_ticks=self.started_ticks,
            ended=self.phase is ProcessPhase.ENDED,
            code=self.exited.code if self.exited else None,
            signal=self.exited.signal if self.exited else None,
        )


@dataclass(slots=True)
class JobState:
    """State of a job on this node."""

    delta: wire.GroupDelta | None = None
    digest: str = ""  # digest of the unpacked working directory
    fetching: str = ""  # digest of the working directory being fetched
    ordered: Version = Version(0)  # highest version with workers created here
    cleared: Version = Version(0)  # highest version that was reported in `JobCleared`
    sweep: SweepDelta | None = None  # sweeps only


@dataclass(slots=True)
class Reconciler:
    """State of all workers of one node. Only `handle` changes the state."""

    node: NodeId
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    workers: dict[WorkerId, WorkerState] = field(default_factory=dict)
    forgotten: set[JobId] = field(default_factory=set)  # sweeps that have ended

    def handle(self, event: Event) -> list[Action]:
        """Process one event and return the actions, in order.

        `Desired` and `SweepDesired` add a job, and `Adopted` adds a worker. Other events about
        unknown jobs and workers are ignored.
        """
        match event:
            case Desired(delta=delta):
                if self._has_namesake(delta):
                    return self._refuse(delta)
                if delta.group is not None:
                    self.forgotten.discard(delta.job)
                self._job(delta.job).delta = delta
                return self._reconcile(delta.job)
            case SweepDesired(delta=delta):
                keep = KeepStates(delta)
                if delta.job in self.forgotten:  # of an ended sweep, only states are kept
                    return [keep]
                self._job(delta.job).sweep = delta
                return [keep, *self._reconcile(delta.job)]
            case WorkspaceReady(job=job, digest=digest):
                if (state := self.jobs.get(job)) is None:
                    return []
                state.digest, state.fetching = digest, ""
                return self._reconcile(job)
            case WorkspaceFailed():
                return self._workspace_failed(event) if event.job in self.jobs else []
            case Adopted():
                return self._adopted(event)
        worker = self.workers.get(event.worker)
        if worker is None:
            return []
        return [*self._worker_event(worker, event), *self._reconcile(worker.job)]

    def _has_namesake(self, delta: wire.GroupDelta) -> bool:
        """True if workers of a job with the same name but from another journal are here."""
        return any(
            worker.job == delta.job and worker.journal != delta.journal
            for worker in self.workers.values()
        )

    def _refuse(self, delta: wire.GroupDelta) -> list[Action]:
        """Refuse the workers. Leave the other job alone: it belongs to another controller."""
        error = f"node {self.node} still has {delta.job} of another journal; see `ones node list`"
        return [
            PublishEvent(
                wire.WorkerRefused(
                    job=delta.job, version=delta.version, rank=member.rank,
                    journal=delta.journal, error=error, node_fault=True,
                )
            )
            for member in self._members(delta)
            if member.worker == worker_id(delta.job, delta.version, member.rank)
        ]  # fmt: skip

    def _worker_event(self, worker: WorkerState, event: Event) -> Iterable[Action]:
        match event:
            case Started(pid=pid, started_ticks=ticks) if worker.phase is ProcessPhase.STARTING:
                worker.phase, worker.pid, worker.started_ticks = ProcessPhase.ALIVE, pid, ticks
                return [
                    PublishEvent(
                        wire.WorkerStarted(**worker.identity, pid=pid, started_ticks=ticks)
                    )
                ]
            case StartFailed() if worker.phase is ProcessPhase.STARTING:
                del self.workers[worker.worker]
                refused = wire.WorkerRefused(
                    **worker.identity,
                    error=event.error,
                    hint=event.hint,
                    node_fault=event.node_fault,
                )
                return [
                    PublishEvent(refused),
                    RemoveWorker(worker.worker),
                    *self._grant_waiting(worker),
                ]
            case Connected():
                worker.newest_order, worker.unit.sent = (Version(0), 0), 0
                return [GrantSlot(worker.worker)] if worker.granted else []
            case ReportRead(report=report):
                worker.unit.reported(report)
                own = replace(report, **worker.identity)  # the file might name another worker
                return [PublishEvent(own)]  # type: ignore[arg-type] # every ScriptReport is an AgentEvent
            case Ended() if worker.phase in LIVING:
                worker.phase = ProcessPhase.ENDED
                worker.exited = wire.WorkerExited(
                    **worker.identity,
                    code=event.code,
                    signal=event.signal,
                    unseen=event.unseen,
                    memory_limit=event.memory_limit,
                    disk_limit=event.disk_limit,
                    asked=event.asked,
                )
                return [PublishEvent(worker.exited), *self._grant_waiting(worker)]
            case ReportedAgain() if worker.exited is not None:
                return [PublishEvent(worker.exited)]
            case GraceOver() if worker.phase is ProcessPhase.RETIRING:
                worker.phase = ProcessPhase.STOPPING
                return [Terminate(worker.worker)]
            case GraceOver() if worker.phase is ProcessPhase.STOPPING:
                return [Kill(worker.worker)]
            case LogsStored() if worker.phase is ProcessPhase.ENDED:
                worker.stored = True
        return []

    def _adopted(self, event: Adopted) -> list[Action]:
        assignment = event.assignment
        worker = WorkerState(
            worker=event.worker,
            job=assignment.job,
            version=assignment.version,
            rank=assignment.rank,
            slot=assignment.slot,
            journal=assignment.journal,
            phase=ProcessPhase.ALIVE,
            granted=assignment.granted,
            adopted=True,
            pid=event.pid,
            started_ticks=event.started_ticks,
        )
        self.workers[event.worker] = worker
        self._job(assignment.job)
        return []

    def _workspace_failed(self, event: WorkspaceFailed) -> list[Action]:
        self._job(event.job).fetching = ""
        refused = [
            worker
            for worker in self.workers.values()
            if worker.job == event.job and worker.phase is ProcessPhase.WANTED
        ]
        for worker in refused:
            del self.workers[worker.worker]
        fault: dict[str, Any] = {"error": event.error, "node_fault": event.node_fault}
        return [PublishEvent(wire.WorkerRefused(**worker.identity, **fault)) for worker in refused]

    # --- wanted against observed

    def _reconcile(self, name: JobId) -> list[Action]:
        job = self._job(name)
        units = self._reconcile_units(name, job.sweep) if job.sweep else []
        return [*units, *(self._reconcile_group(name, job, job.delta) if job.delta else [])]

    def _reconcile_units(self, name: JobId, sweep: SweepDelta) -> list[Action]:
        ordered = {unit.worker: unit for unit in sweep.units}
        actions: list[Action] = []
        for worker in self.workers.values():
            if worker.job != name or worker.phase not in LISTENING:
                continue
            unit = ordered.get(worker.worker)
            if worker.unit.withdrawn(unit, sweep.attempts):
                worker.phase = ProcessPhase.STOPPING
                actions.append(Kill(worker.worker))
            elif unit is not None and worker.unit.mark_sent(unit):
                actions.append(OrderUnit(worker.worker, unit))
        return actions

    def _reconcile_group(self, name: JobId, job: JobState, delta: wire.GroupDelta) -> list[Action]:
        wanted = {member.worker: member for member in self._members(delta)}
        actions: list[Action] = []
        for worker in [w for w in self.workers.values() if w.job == name]:
            if worker.worker not in wanted:
                actions.extend(self._withdraw(worker, delta))
        for identity, member in wanted.items():
            starts = identity == worker_id(name, delta.version, member.rank)
            if starts and identity not in self.workers and delta.version > job.ordered:
                slot = index_of(member.slot)
                state = WorkerState(identity, name, delta.version, member.rank, slot, delta.journal)
                self.workers[identity] = state
            if known := self.workers.get(identity):
                actions.extend(self._advance(job, known, delta))
        job.ordered = delta.version
        actions.extend(self._report_cleared(job, delta))
        return actions

    def _members(self, delta: wire.GroupDelta) -> list[Member]:
        members = (*(delta.group.members if delta.group else ()), *delta.former)
        return [member for member in members if node_of(member.slot) == self.node]

    def _withdraw(self, worker: WorkerState, delta: wire.GroupDelta) -> list[Action]:
        match worker.phase:
            case ProcessPhase.WANTED:
                del self.workers[worker.worker]
                return []
            case ProcessPhase.ALIVE if worker.leaving or (delta.group and worker.unit.training):
                worker.phase = ProcessPhase.RETIRING
                return self._await_exit(worker)
            case ProcessPhase.RETIRING:
                return self._await_exit(worker)
            case ProcessPhase.ALIVE:
                worker.phase = ProcessPhase.STOPPING
                return [Terminate(worker.worker)]
            case ProcessPhase.ENDED if worker.stored:
                del self.workers[worker.worker]
                return [RemoveWorker(worker.worker)]
            case _:  # STARTING: stopped once it has a process; STOPPING: about to exit
                return []

    @staticmethod
    def _await_exit(worker: WorkerState) -> list[Action]:
        """Start the grace period, at most once, after the worker has ended its unit."""
        if worker.awaited or worker.unit.training:
            return []
        worker.awaited = True
        return [AwaitExit(worker.worker)]

    def _advance(self, job: JobState, worker: WorkerState, delta: wire.GroupDelta) -> list[Action]:
        if worker.phase is ProcessPhase.WANTED:
            if job.digest != delta.snapshot:
                if job.fetching == delta.snapshot:
                    return []
                job.fetching = delta.snapshot
                return [FetchWorkspace(worker.job, delta.snapshot, delta.user, delta.journal)]
            worker.granted = not self._slot_taken(worker)
            worker.phase = ProcessPhase.STARTING
            return [StartWorker(worker.worker, worker.rank, delta, worker.granted)]
        return [*self._grant(worker), *self._order(worker, delta)]

    def _grant(self, worker: WorkerState) -> list[Action]:
        if worker.granted or worker.phase is not ProcessPhase.ALIVE or self._slot_taken(worker):
            return []
        worker.granted = True
        return [GrantSlot(worker.worker)]

    def _order(self, worker: WorkerState, delta: wire.GroupDelta) -> list[Action]:
        order = (delta.version, delta.stage)
        if (
            worker.phase is not ProcessPhase.ALIVE
            or order <= worker.newest_order
            or delta.group is None
        ):
            return []
        worker.newest_order = order
        if delta.kind == wire.SUSPEND and delta.spec is not None and delta.spec.rigid:
            worker.phase = ProcessPhase.STOPPING  # its program knows no orders
            return [Terminate(worker.worker)]
        if delta.stage == wire.WARNED and delta.spec is not None:
            warning = delta.spec.stated_warning
            return [] if warning is None else [Warn(worker.worker, warning)]
        if delta.stage == wire.SWITCH:
            worker.leaving = delta.group.member(worker.worker) is None
        return [OrderGroup(worker.worker, delta)]

    def _slot_taken(self, worker: WorkerState) -> bool:
        return any(
            other.slot == worker.slot and other.phase in LIVING and (other.granted or other.adopted)
            for other in self.workers.values()
            if other is not worker
        )

    def _grant_waiting(self, worker: WorkerState) -> list[Action]:
        waiting = {
            other.job
            for other in self.workers.values()
            if other.slot == worker.slot
            and other.phase in {ProcessPhase.WANTED, ProcessPhase.ALIVE}
        }
        return [action for job in sorted(waiting) for action in self._reconcile(job)]

    def _report_cleared(self, job: JobState, delta: wire.GroupDelta) -> list[Action]:
        mine = [worker for worker in self.workers.values() if worker.job == delta.job]
        wanted = {member.worker for member in self._members(delta)}
        older = (w for w in mine if w.version < delta.version and w.worker not in wanted)
        if any(worker.phase is not ProcessPhase.ENDED for worker in older):
            return []
        actions: list[Action] = []
        through = Version(delta.version + (delta.stage >= wire.SETTLED))
        # Processes of this version that are about to exit will settle the version.
        pending = delta.stage >= wire.SETTLED and any(
            w.phase is not ProcessPhase.ENDED for w in mine if w.worker not in wanted
        )
        if through > 1 and job.cleared < through and not pending:
            job.cleared = through
            actions.append(PublishEvent(wire.JobCleared(job=delta.job, version=through)))
        if delta.forget and not mine and delta.group is None:
            del self.jobs[delta.job]
            if job.sweep is not None:
                self.forgotten.add(delta.job)
            actions.append(ForgetJob(delta.job))
        return actions

    # --- observed state

    def seen(self) -> tuple[wire.WorkerSeen, ...]:
        """Return the hello's entries of all workers that were started."""
        started = (w for w in self.workers.values() if w.phase is not ProcessPhase.WANTED)
        return tuple(worker.seen() for worker in started)

    def _job(self, job: JobId) -> JobState:
        return self.jobs.setdefault(job, JobState())
