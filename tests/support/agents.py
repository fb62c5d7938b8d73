"""A node in a few lines: the real agent core around imaginary processes, folders and a spool.

The processes do what workers of the training library do about their orders, one act at a time;
what their collective operations would tell them, they learn from the `World` that they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGKILL

from controlplane.core.events import NodeGreeted, NodeReported
from nodeagent.reconciler import ProcessPhase, Reconciler
from nodeagent.reconciler_actions import (
    Action,
    AwaitExit,
    FetchWorkspace,
    ForgetJob,
    GrantSlot,
    Kill,
    OrderGroup,
    PublishEvent,
    RemoveWorker,
    StartWorker,
    Terminate,
)
from nodeagent.reconciler_events import (
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
from schemas.groups import Group
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
from schemas.messages.agent import (
    JOIN,
    PREPARE,
    RECOVER,
    SETTLED,
    START,
    SUSPEND,
    SWITCH,
    GroupDelta,
    JobCleared,
    ScriptReport,
    Welcome,
)
from schemas.messages.worker import Assignment
from schemas.session import AgentSession, Apply
from tests.support.builders import (
    assignment,
    broken,
    epoch_end,
    finished,
    formed,
    join_failed,
    node_spec,
    quiesced,
    ready,
    run,
    store,
    suspended,
)

Place = tuple[int, int]  # (epochs finished, steps taken)
NONE = Version(0)


class World:
    """All processes, and what the members of a group agree on without the controller."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole  # every node is in it; else those that are not do as they are told
        self.processes: dict[WorkerId, Process] = {}
        self.passed: dict[tuple[JobId, Version], Place] = {}  # boundaries, and where they were
        self.trained: dict[tuple[JobId, Version], Place] = {}
        self.done: set[tuple[JobId, Version]] = set()  # groups that met their stop rule

    def arm(self, delta: GroupDelta) -> None:
        """Let the boundary of a version pass if everybody who has a part in it waits for it."""
        if delta.group is None or (delta.job, delta.version) in self.passed:
            return
        parts = [member.worker for member in (*delta.group.members, *delta.former)]
        known = [self.processes[name] for name in parts if name in self.processes]
        if self.whole and len(known) < len(parts):
            return
        if all(process.alive and delta.version in process.armed for process in known):
            resume = delta.group.resume
            places = [(resume.epoch, resume.epoch * 16) if resume else (0, 0)]
            places += [process.place for process in known]
            self.passed[delta.job, delta.version] = max(places)

    def lives(self, worker: WorkerId) -> bool:
        return self.processes[worker].alive if worker in self.processes else not self.whole


@dataclass(slots=True)
class Process:
    """A worker's process and its folder; both outlive the agent, the folder also the process."""

    assignment: Assignment
    pid: int
    world: World
    granted: bool = True  # its device is its own, as far as it was told
    alive: bool = True
    code: int | None = None
    signal: int | None = None
    stopping: bool = False  # was sent TERM
    connected_to: str = ""  # the life of the agent
    reports: list[ScriptReport] = field(default_factory=list)  # its file
    read: int = 0  # by the present agent
    stored: bool = False  # all of its output
    order: GroupDelta | None = None  # the newest that it was told
    armed: dict[Version, GroupDelta] = field(default_factory=dict)  # boundaries that it waits for
    group: Group | None = None  # that it takes its steps in
    rests: Version = Version(0)  # stands still, as this version asked
    said: set[tuple[str, Version]] = field(default_factory=set)

    @property
    def name(self) -> WorkerId:
        return worker_id(self.assignment.job, self.assignment.version, self.assignment.rank)

    @property
    def place(self) -> Place:
        """Where its parameters are."""
        key = (self.assignment.job, self.group.version if self.group else Version(0))
        return self.world.trained.get(key, (0, 0))

    @property
    def in_group(self) -> Version:
        """That it takes its next step in; a boundary is passed by all at once."""
        job = self.assignment.job
        passed = [version for version in self.armed if (job, version) in self.world.passed]
        return max([*passed, self.group.version if self.group else Version(0)])

    @property
    def progress(self) -> object:
        """Changes whenever an act changed anything."""
        return (
            len(self.reports),
            self.alive,
            sorted(self.armed),
            self.in_group,
            self.place,
            (self.assignment.job, self.in_group) in self.world.done,
        )

    def act(self, epochs: int | None) -> None:
        """Do the next thing that the training library would do; None: everything but train."""
        if not self.reports:
            if self.granted:
                self._say("ready")
            return
        if self._swap():
            return
        self._obey()
        if self._swap() or self.rests:
            return
        if self.group is None:
            self._waits_for_nobody()
            return
        if self._meets_a_fault():
            self._say("broken", self.group.version)
        else:
            self._train(self.group, epochs)

    def fail_to_join(self) -> None:
        """It cannot build a group that it was told of."""
        waits = [v for v in self.armed if (self.assignment.job, v) not in self.world.passed]
        if waits:
            del self.armed[waits[-1]]
            self._say("cannot join", waits[-1])

    def die(self, code: int | None = None, signal: int | None = None) -> None:
        self.alive, self.code, self.signal = False, code, signal

    def _obey(self) -> None:
        order = self.order
        if order is None or order.group is None:
            return
        if order.stage >= SETTLED or order.kind == RECOVER:
            self.armed = {
                version: delta
                for version, delta in self.armed.items()
                if (order.job, version) in self.world.passed or version == order.version
            }
        if order.kind == RECOVER and order.stage == PREPARE and self.rests < order.version:
            self.rests = order.version
            self._say("quiesced", order.version)
        if order.stage == PREPARE and order.kind == JOIN and self.group is not None:
            first = order.group.members[0].worker
            if first == self.name and len(order.group.members) > 1:
                self._say("store", order.version)
        in_time = self.in_group < order.version and ("cannot join", order.version) not in self.said
        if order.stage == SWITCH and in_time:
            self.armed[order.version] = order
            self.world.arm(order)

    def _swap(self) -> bool:
        """Pass a boundary that all have agreed on."""
        job = self.assignment.job
        for version in sorted(self.armed):
            if (job, version) not in self.world.passed:
                continue
            delta = self.armed.pop(version)
            assert delta.group is not None
            old, self.rests = self.group, Version(0)
            if delta.group.member(self.name) is None:
                if delta.kind == SUSPEND and old is not None and old.members[0].worker == self.name:
                    self._say("suspended", version)
                self.die(code=0)
            else:
                self.group = delta.group
                self.world.trained.setdefault((job, version), self.world.passed[job, version])
                self._say("formed", version)
            return True
        return False

    def _waits_for_nobody(self) -> None:
        """The first group of a job cannot form without one of its members."""
        for version, delta in self.armed.items():
            members = delta.group.members if delta.group and delta.kind == START else ()
            if not all(self.world.lives(member.worker) for member in members):
                self._say("broken", version)

    def _meets_a_fault(self) -> bool:
        group, job = self.group, self.assignment.job
        if group is None or (job, group.version) in self.world.done:
            return False
        processes = self.world.processes
        return any(
            not self.world.lives(member.worker)
            or (member.worker in processes and processes[member.worker].in_group != group.version)
            for member in group.members
        )

    def _train(self, group: Group, epochs: int | None) -> None:
        key = (self.assignment.job, group.version)
        if key in self.world.done:
            self._say("finished")
            self.die(code=0)
        elif epochs is None or any(
            self.world.processes[member.worker].rests
            for member in group.members
            if member.worker in self.world.processes
        ):
            return
        elif group.members[0].worker == self.name:
            epoch, step = self.place
            if epoch < epochs:
                self.world.trained[key] = (epoch + 1, step + 16)
                self._say("epoch", group.version)
            else:
                self.world.done.add(key)

    def _say(self, what: str, version: Version = NONE) -> None:
        """Write a report, once about each version."""
        if what != "epoch" and (what, version) in self.said:
            return
        self.said.add((what, version))
        job, index = self.assignment.job, len(self.reports) + 1
        who = (job, self.assignment.version)
        rank, port = self.assignment.rank, 29000 + self.pid
        epoch, step = self.place
        report: ScriptReport
        match what:
            case "ready":
                resume = self.assignment.group.resume
                resumed = resume.epoch if resume else 0
                report = ready(*who, rank=rank, index=index, resumed=resumed, port=port)
            case "store":
                report = store(*who, rank=rank, index=index, group=version, port=port)
            case "formed":
                report = formed(*who, rank=rank, index=index, group=version, epoch=epoch, step=step)
            case "cannot join":
                report = join_failed(*who, rank=rank, index=index, group=version, error="no")
            case "broken":
                report = broken(*who, rank=rank, index=index, group=version, error="reset")
            case "quiesced":
                behind = step > 0 and (self.pid + version) % 3 == 0  # the last step was half done
                report = quiesced(
                    *who,
                    rank=rank,
                    index=index,
                    group=version,
                    step=step - behind,
                    epoch=epoch,
                    full=self.group is not None,
                    port=port,
                )
            case "suspended":
                report = suspended(
                    *who, rank=rank, index=index, group=version, epoch=epoch, step=step
                )
            case "epoch":
                report = epoch_end(
                    job, epoch, who[1], rank=rank, index=index, group=version, step=step
                )
            case _:
                report = finished(*who, rank=rank, index=index, why="its epochs are done")
        self.reports.append(report)


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
                self.session.happened(event)
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
    name = worker_id(job, Version(version), Rank(0))
    node.processes[name] = node.world.processes[name] = process
    node.restart()
