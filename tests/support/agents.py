"""A node in a few lines: the real agent core around imaginary processes, folders and a spool."""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGKILL

from controlplane.core.events import NodeGreeted, NodeReported
from nodeagent.actions import (
    Action,
    FetchWorkspace,
    ForgetJob,
    Kill,
    OrderSwitch,
    RemoveWorker,
    Say,
    StartWorker,
    Terminate,
)
from nodeagent.core import AgentCore, Phase
from nodeagent.events import (
    Adopted,
    Connected,
    Desired,
    Ended,
    Event,
    GraceOver,
    LogsStored,
    ReportRead,
    Started,
    StartFailed,
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
from schemas.messages.agent import GroupDelta, JobCleared, ScriptReport, Welcome
from schemas.messages.worker import Assignment
from schemas.session import AgentSession, Apply
from tests.support.builders import (
    assignment,
    epoch_end,
    finished,
    formed,
    node_spec,
    ready,
    run,
)


@dataclass(slots=True)
class Process:
    """A worker's process and its folder; both outlive the agent, the folder also the process."""

    assignment: Assignment
    pid: int
    alive: bool = True
    code: int | None = None
    signal: int | None = None
    stopping: bool = False  # was sent TERM
    may_join: bool = False  # was told to switch
    connected_to: str = ""  # the life of the agent
    reports: list[ScriptReport] = field(default_factory=list)  # its file
    read: int = 0  # by the present agent
    stored: bool = False  # all of its output
    epoch: int = 0

    def act(self, epochs: int) -> None:
        """Do the next thing that the training library would do."""
        job, version = self.assignment.job, self.assignment.version
        index = len(self.reports) + 1
        resume = self.assignment.group.resume
        if index == 1:
            self.epoch = resume.epoch if resume else 0
            self.reports.append(ready(job, version, resumed=self.epoch))
        elif index == 2:
            if self.may_join:
                self.reports.append(formed(job, version, epoch=self.epoch))
        elif self.epoch < epochs:
            self.epoch += 1
            self.reports.append(epoch_end(job, self.epoch, version, index=index))
        else:
            self.reports.append(finished(job, version, index=index, why="its epochs are done"))
            self.die(code=0)

    def die(self, code: int | None = None, signal: int | None = None) -> None:
        self.alive, self.code, self.signal = False, code, signal


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

    def __init__(self, node: NodeId, slots: int) -> None:
        self.node, self.slots = node, slots
        self.processes: dict[WorkerId, Process] = {}
        self.boots = 0
        self.pids = 0
        self.restart()

    # --- lives of the agent and of the host

    def restart(self) -> None:
        """A new agent finds what the one before left."""
        self.boots += 1
        self.session = AgentSession(self.node, BootId(f"{self.node}-boot-{self.boots}"))
        self.core = AgentCore(self.node)
        self.work: list[Work] = []
        for worker, process in self.processes.items():
            process.read = 0
            self._tell(Adopted(worker, process.assignment, process.pid, 7))

    def reboot(self) -> None:
        """The host goes down and comes back without any process or folder."""
        self.processes.clear()
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
            workers=self.core.seen(),
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
            if isinstance(output, Apply):
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
            case StartWorker(worker=worker, rank=rank, delta=delta) if well:
                assert worker not in self.processes, f"{worker} is started twice"
                self.pids += 1
                self.processes[worker] = Process(assignment(delta, rank), self.pids)
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

    def _knows_end(self, worker: WorkerId) -> bool:
        known = self.core.workers.get(worker)
        return known is not None and known.phase is Phase.ENDED

    def _read(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        while process.read < len(process.reports):
            process.read += 1
            self._tell(ReportRead(worker, process.reports[process.read - 1]))

    def _tell(self, event: Event) -> None:
        for action in self.core.handle(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case FetchWorkspace() | StartWorker():
                self.work.append(action)
            case Terminate(worker=worker):
                self.processes[worker].stopping = True
                self.work.append(Grace(worker))
            case Kill(worker=worker):
                if self.processes[worker].alive:
                    self.processes[worker].die(signal=SIGKILL)
            case OrderSwitch(worker=worker):
                if self.processes[worker].connected_to == self.boot:
                    self.processes[worker].may_join = True
            case Say(event=event):
                if isinstance(event, JobCleared):
                    assert not self._older(event), f"{event}, but {self._older(event)}"
                self.session.happened(event)
            case RemoveWorker(worker=worker):
                gone = self.processes.pop(worker, None)
                assert gone is None or not gone.alive, f"{worker} lost its folder while it lived"
                assert gone is None or gone.stored, f"{worker} lost its folder before its logs"
            case ForgetJob(job=job):
                assert not [w for w in self.processes.values() if w.assignment.job == job]
                self.session.forget_job(job)

    def _older(self, cleared: JobCleared) -> list[WorkerId]:
        return [
            worker
            for worker in self.living()
            if self.processes[worker].assignment.job == cleared.job
            and self.processes[worker].assignment.version < cleared.version
        ]


def haunt(node: Node, job: JobId, version: int, slot: SlotId) -> None:
    """Let a worker train there that no controller knows of; its agent is a new one."""
    process = Process(assignment(run(job, version, on=slot)), pid=9000 + version)
    process.reports = [ready(job, version), formed(job, version)]
    node.processes[worker_id(job, Version(version), Rank(0))] = process
    node.restart()
