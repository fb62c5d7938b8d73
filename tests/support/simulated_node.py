"""A node in a few lines: the real reconciler around imaginary processes, folders and a spool."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGKILL

from controlplane.core.inputs import NodeGreeted, NodeReported
from nodeagent.reconciler import (
    Action,
    Adopted,
    AwaitExit,
    Connected,
    Desired,
    Ended,
    Event,
    FetchWorkspace,
    ForgetJob,
    GraceOver,
    GrantSlot,
    Kill,
    LogsStored,
    OrderGroup,
    ProcessPhase,
    PublishEvent,
    Reconciler,
    RemoveWorker,
    ReportRead,
    Started,
    StartFailed,
    StartWorker,
    Terminate,
    WorkspaceFailed,
    WorkspaceReady,
)
from schemas.ids import (
    BootId,
    JobId,
    NodeId,
    Rank,
    Seconds,
    SlotId,
    Term,
    Version,
    WorkerId,
    worker_id,
)
from schemas.session import AgentSession, Apply
from schemas.wire.agent import GroupDelta, JobCleared, Welcome
from tests.support.builders import assignment, formed, node_spec, ready, run
from tests.support.simulated_processes import Process, World


# What an agent is busy with; it ends well or badly when the test says so.
@dataclass(frozen=True, slots=True)
class Grace:
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Storing:
    worker: WorkerId


Work = FetchWorkspace | StartWorker | Grace | Storing


class Node:
    """One host with its agent."""

    def __init__(self, node: NodeId, slots: int, world: World | None = None) -> None:
        self.node, self.slots = node, slots
        self.world = world or World(whole=False)
        self.processes: dict[WorkerId, Process] = {}
        self.boots = 0
        self.runs = 1
        self.pids = 0
        self.restart()

    # --- lives of the agent and of the host

    def restart(self) -> None:
        """A new agent finds what the one before left."""
        self.boots += 1
        self.session = AgentSession(self.node, BootId(f"{self.node}-boot-{self.boots}"))
        self.reconciler = Reconciler(self.node)
        self.work: list[Work] = []
        for worker, process in self.processes.items():
            process.read = 0
            self._tell(Adopted(worker, process.assignment, process.pid, 7))

    def reboot(self) -> None:
        """The host goes down and comes back without any process or folder."""
        for process in self.processes.values():
            process.die()
        self.processes.clear()
        self.runs += 1
        self.restart()

    @property
    def boot(self) -> BootId:
        return self.session.boot

    # --- what the controller sees

    def hello(self) -> NodeGreeted:
        return NodeGreeted(
            node=self.node,
            boot=self.boot,
            spec=node_spec(self.node, self.slots),
            workers=self.reconciler.seen(),
            jobs=tuple(sorted(self.reconciler.jobs)),
            run_id=f"{self.node}-run-{self.runs}",
        )

    def welcome(self, term: Term, committed: int) -> None:
        """The controller took the greeting, and this many events before."""
        self.session.receive(
            Welcome(
                session="s",
                boot=self.session.boot,
                term=term,
                committed=committed,
                log_port=0,
                event_port=0,
            ),
            Seconds(0.0),
        )

    def receive(self, delta: GroupDelta) -> None:
        """Apply a delta, if it is newer than what is held."""
        for output in self.session.receive(delta, Seconds(0.0)):
            if isinstance(output, Apply) and isinstance(output.delta, GroupDelta):
                self._tell(Desired(output.delta))

    def said_after(self, seq: int) -> list[NodeReported]:
        return [
            NodeReported(node=self.node, boot=self.boot, seq=n.seq, event=n.event)
            for n in self.session.spool
            if n.seq > seq
        ]

    # --- what happens on the host

    def finish(self, work: Work, *, well: bool = True) -> None:
        """Something that the agent is busy with comes to its end."""
        self.work.remove(work)
        match work:
            case FetchWorkspace(job=job, digest=digest):
                bad = WorkspaceFailed(job, digest, "no such snapshot")
                self._tell(WorkspaceReady(job, digest) if well else bad)
            case StartWorker(worker=worker, rank=rank, delta=delta, granted=granted) if well:
                assert worker not in self.processes, f"{worker} is started twice"
                self.pids += 1
                told = assignment(delta, rank, granted=granted)
                process = Process(told, self.pids, self.world, granted=granted)
                self.processes[worker] = self.world.processes[worker] = process
                self._tell(Started(worker, self.pids, 7))
            case StartWorker(worker=worker):
                self._tell(StartFailed(worker, "no zygote"))
            case Grace(worker=worker):
                self._tell(GraceOver(worker))
            case Storing(worker=worker):
                self.processes[worker].stored = True
                self._tell(LogsStored(worker))

    def look(self, worker: WorkerId) -> None:
        """The agent notices whatever is new about a worker's process."""
        process = self.processes[worker]
        if process.alive and process.connected_to != self.boot:
            process.connected_to = self.boot
            self._read(worker)
            self._tell(Connected(worker))
        self._read(worker)
        if not process.alive and not self._knows_end(worker):
            self.work.append(Storing(worker))
            self._tell(Ended(worker, process.code, process.signal, unseen=process.code is None))

    def living(self, slot: int | None = None) -> list[WorkerId]:
        return [
            worker
            for worker, process in self.processes.items()
            if process.alive and slot in {None, process.assignment.slot}
        ]

    def granted(self, slot: int) -> list[WorkerId]:
        """The processes that may use the device of `slot`."""
        return [worker for worker in self.living(slot) if self.processes[worker].granted]

    def _knows_end(self, worker: WorkerId) -> bool:
        known = self.reconciler.workers.get(worker)
        return known is not None and known.phase is ProcessPhase.ENDED

    def _read(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        while process.read < len(process.reports):
            process.read += 1
            self._tell(ReportRead(worker, process.reports[process.read - 1]))

    def _tell(self, event: Event) -> None:
        for action in self.reconciler.handle(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case FetchWorkspace() | StartWorker():
                self.work.append(action)
            case Terminate(worker=worker):
                self.processes[worker].stopping = True
                self.work.append(Grace(worker))
            case AwaitExit(worker=worker):
                self.work.append(Grace(worker))
            case Kill(worker=worker):
                if self.processes[worker].alive:
                    self.processes[worker].die(signal=SIGKILL)
            case OrderGroup(worker=worker, delta=delta):
                if self.processes[worker].connected_to == self.boot:
                    self.processes[worker].order = delta
            case GrantSlot(worker=worker):
                if self.processes[worker].connected_to == self.boot:
                    self.processes[worker].granted = True
            case PublishEvent(event=event):
                if isinstance(event, JobCleared):
                    assert not self._older(event), f"{event}, but {self._older(event)}"
                self.session.record_event(event)
            case RemoveWorker(worker=worker):
                gone = self.processes.pop(worker, None)
                assert gone is None or not gone.alive, f"{worker} lost its folder while it lived"
                assert gone is None or gone.stored, f"{worker} lost its folder before its logs"
            case ForgetJob(job=job):
                assert not [w for w in self.processes.values() if w.assignment.job == job]
                self.session.forget_job(job)

    def _older(self, cleared: JobCleared) -> list[WorkerId]:
        job = self.reconciler.jobs.get(cleared.job)
        delta = job.delta if job else None
        group = delta.group.members if delta and delta.group else ()
        members = (*group, *(delta.former if delta else ()))
        wanted = {member.worker for member in members}
        return [
            worker
            for worker in self.living()
            if self.processes[worker].assignment.job == cleared.job
            and self.processes[worker].assignment.version < cleared.version
            and worker not in wanted
        ]


def haunt(node: Node, job: JobId, version: int, slot: SlotId) -> None:
    """Let a worker train there that no controller knows of; its agent is a new one."""
    told = assignment(run(job, version, on=slot))
    process = Process(told, pid=9000 + version, world=node.world, group=told.group)
    process.reports = [ready(job, version), formed(job, version)]
    process.said = {("ready", Version(0)), ("formed", Version(version))}
    name = worker_id(job, Version(version), Rank(0))
    node.processes[name] = node.world.processes[name] = process
    node.restart()
