"""A controller's core, its nodes and their workers in virtual time: nothing happens until a test says so.

Nodes have the agent's real session and reconciler; workers do what the training library does about
their orders, one act at a time. What collective operations would tell them, they learn from `Groups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from signal import SIGKILL
from typing import Any, Generic, TypeVar

from controlplane.core.commands import Command, SendDelta, SendSweepDelta
from controlplane.core.inputs import Input, NodeGreeted, NodeLost, NodeReported
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
    slot_id,
    worker_id,
)
from schemas.nodes import Group
from schemas.session import AgentSession, Apply
from schemas.wire.agent import (
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
from schemas.wire.sweeps import SweepDelta
from schemas.wire.worker import Assignment
from tests.support.builders import (
    assignment,
    awaits,
    broken,
    epoch_end,
    finished,
    formed,
    join_failed,
    node_spec,
    proposal,
    quiesced,
    ready,
    run,
    store,
    suspended,
)
from tests.support.controller import Controller

Place = tuple[int, int]  # (epochs finished, steps taken)
NO_VERSION = Version(0)


class Groups:
    """All processes, and what the members of a group agree on without the controller."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole  # every node is in it; else those that are not do as they are told
        self.older = False  # their library is, and never says that it waits for a slot
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
    world: Groups
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
    quiesced_for: Version = Version(0)  # stands still, as this version asked
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
        if ("ready", NO_VERSION) not in self.said:
            if self.granted or not self.world.older:
                self._say("ready" if self.granted else "waits for its slot")
            return
        if self._swap():
            return
        self._obey()
        if self._swap() or self.quiesced_for:
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

    def waits_in_vain(self) -> bool:
        """Whether it waits for a boundary with somebody who is gone: it fails to join, in time."""
        job, delta = self.assignment.job, next(reversed(self.armed.values()), None)
        if not self.alive or delta is None or (job, delta.version) in self.world.passed:
            return False
        members = delta.group.members if delta.group else ()
        return not all(self.world.lives(member.worker) for member in members)

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
        if order.kind == RECOVER and order.stage == PREPARE and self.quiesced_for < order.version:
            self.quiesced_for = order.version
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
            old, self.quiesced_for = self.group, Version(0)
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
            self.world.processes[member.worker].quiesced_for
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

    def _say(self, what: str, version: Version = NO_VERSION) -> None:
        """Write a report, once about each version."""
        if what != "epoch" and (what, version) in self.said:
            return
        self.said.add((what, version))
        self.reports.append(self._report(what, version))

    def _report(self, what: str, version: Version) -> ScriptReport:
        epoch, step = self.place
        resume = self.assignment.group.resume
        group, port = {"group": version}, {"port": 29000 + self.pid}
        behind = step > 0 and (self.pid + version) % 3 == 0  # the last step was half done
        full = self.group is not None
        build, fields = {
            "ready": (ready, {"resumed": resume.epoch if resume else 0, **port}),
            "waits for its slot": (awaits, {}),
            "store": (store, {**group, **port}),
            "formed": (formed, {**group, "epoch": epoch, "step": step}),
            "cannot join": (join_failed, {**group, "error": "no"}),
            "broken": (broken, {**group, "error": "reset"}),
            "quiesced": (
                quiesced,
                {**group, **port, "step": step - behind, "epoch": epoch, "has_full_state": full},
            ),
            "suspended": (suspended, {**group, "epoch": epoch, "step": step}),
            "epoch": (partial(epoch_end, epoch=epoch), {**group, "step": step}),
            "finished": (finished, {"reason": "its epochs are done"}),
        }[what]
        me = self.assignment
        report: ScriptReport = build(
            job=me.job, version=me.version, rank=me.rank, index=len(self.reports) + 1, **fields
        )
        return report


# What an agent is busy with; it ends well or badly when the test says so.
@dataclass(frozen=True, slots=True)
class Grace:
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Storing:
    worker: WorkerId


Work = FetchWorkspace | StartWorker | Grace | Storing


class Host:
    """One host and its agent's session; each life of the agent is a boot."""

    def __init__(self, node: NodeId, slots: int) -> None:
        self.node, self.slots = node, slots
        self.boots = self.pids = 0
        self.up = True

    def restart(self) -> None:
        """Start a new agent, which knows nothing."""
        self.boots += 1
        self.session = AgentSession(self.node, BootId(f"{self.node}-boot-{self.boots}"))

    @property
    def boot(self) -> BootId:
        return self.session.boot

    def welcome(self, term: Term, committed: int) -> None:
        """The controller took the greeting, and this many events before."""
        welcome = Welcome(
            session="s", boot=self.boot, term=term, committed=committed, log_port=0, event_port=0
        )
        self.session.receive(welcome, Seconds(0.0))

    def receive(self, delta: GroupDelta | SweepDelta) -> None:
        """Apply a delta, if it is newer than what is held."""
        for output in self.session.receive(delta, Seconds(0.0)):
            if isinstance(output, Apply):
                self.apply(output.delta)

    def apply(self, delta: Any) -> None:
        raise NotImplementedError

    def said_after(self, seq: int) -> list[NodeReported]:
        return [
            NodeReported(node=self.node, boot=self.boot, seq=n.seq, event=n.event)
            for n in self.session.spool
            if n.seq > seq
        ]


class Node(Host):
    """A host whose agent has the real reconciler, around imaginary processes, folders and a spool."""

    def __init__(self, node: NodeId, slots: int, world: Groups | None = None) -> None:
        super().__init__(node, slots)
        self.world = world or Groups(whole=False)
        self.processes: dict[WorkerId, Process] = {}
        self.runs = 1
        self.restart()

    def restart(self) -> None:
        """A new agent finds what the one before left."""
        super().restart()
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

    def hello(self) -> NodeGreeted:
        return NodeGreeted(
            node=self.node,
            boot=self.boot,
            spec=node_spec(self.node, self.slots),
            workers=self.reconciler.seen(),
            jobs=tuple(sorted(self.reconciler.jobs)),
            run_id=f"{self.node}-run-{self.runs}",
        )

    def apply(self, delta: Any) -> None:
        self._tell(Desired(delta))

    def go_on(self, epochs: int | None = None) -> bool:
        """Let the agent finish its work and each process do one thing; False if nothing changed."""
        went_on = bool(self.work)
        for work in list(self.work):
            self.finish(work)
        for worker, process in list(self.processes.items()):
            before = process.progress, len(self.session.spool)
            if process.alive:
                process.act(epochs)
            self.look(worker)
            went_on |= before != (process.progress, len(self.session.spool))
        return went_on

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
            case _:
                raise AssertionError(f"{self.node} got an unexpected action: {action}")

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


MANY = 500  # rounds: enough for everything to come about
Places = dict[JobId, dict[SlotId, int]]
H = TypeVar("H", bound=Host)


class BaseWorld(Generic[H]):
    """A core with a fake clock, nodes, and links that hold; the deltas under way wait in `orders`."""

    def __init__(self, nodes: dict[NodeId, H]) -> None:
        self.controller = Controller()
        self.controller.start()
        self.nodes = nodes
        self.orders: dict[NodeId, list[GroupDelta | SweepDelta]] = {name: [] for name in nodes}
        for node in nodes.values():
            self.greet(node)

    def take(self, event: Input) -> list[Command]:
        commands = self.controller.take(event)
        for command in commands:
            if isinstance(command, SendDelta | SendSweepDelta) and self.nodes[command.node].up:
                self.orders[command.node].append(command.delta)
        return commands

    def plan(self, placed: Mapping[JobId, Mapping[SlotId, int]]) -> None:
        """Propose a plan that is based on the present state."""
        batches = {job: dict(slots) for job, slots in placed.items()}
        self.take(proposal(batches, based_on=self.controller.state.version))

    def greet(self, node: H) -> None:
        self.orders[node.node].clear()
        self.take(node.hello())  # type: ignore[attr-defined] # each kind of host has its own
        known = self.controller.state.nodes[node.node]
        node.welcome(self.controller.state.term, known.committed)

    def said(self, node: H) -> list[NodeReported]:
        """Return the reports of a node that the controller has not taken."""
        known = self.controller.state.nodes[node.node]
        return node.said_after(known.committed if known.boot == node.boot else 0)

    def slots(self) -> list[SlotId]:
        return [slot_id(name, at) for name, node in self.nodes.items() for at in range(node.slots)]

    def later(self, seconds: float) -> None:
        self.controller.now += seconds
        for event in self.controller.due():
            self.take(event)


class World(BaseWorld[Node]):
    """Goes on in rounds: orders arrive, agents and workers do the next thing, reports arrive."""

    def __init__(self, **slots: int) -> None:
        self.world = Groups()
        names = {NodeId(name): many for name, many in slots.items()}
        super().__init__({name: Node(name, many, self.world) for name, many in names.items()})

    def train(self, placed: Mapping[JobId, Mapping[SlotId, int]], **spec: Any) -> None:
        """Submit a job for each entry, and let all of them come to train there."""
        for job in placed:
            self.controller.submit(job.rpartition("-")[0], **spec)
        self.plan(placed)
        self.settle()
        assert self.where() == {job: dict(slots) for job, slots in placed.items()}

    def settle(self) -> None:
        """Go on until nothing happens any more; nobody trains an epoch meanwhile."""
        for _ in range(MANY):
            if not self.round():
                return
        raise AssertionError("it never comes to rest")

    def round(self) -> bool:
        """Everybody does one thing; False if there was nothing to do."""
        went_on = False
        for name, node in self.nodes.items():
            arrived, self.orders[name] = self.orders[name], []
            for delta in arrived:
                node.receive(delta)
            went_on |= node.go_on()
            reports = self.said(node)
            for report in reports:
                self.take(report)
            went_on |= bool(arrived or reports)
            self.one_process_for_each_device()
        return went_on

    def one_process_for_each_device(self) -> None:
        for node in self.nodes.values():
            for slot in range(node.slots):
                assert len(node.granted(slot)) <= 1, node.granted(slot)

    def workers(self) -> list[tuple[NodeId, WorkerId]]:
        """All that live, node by node."""
        return [(name, worker) for name, node in self.nodes.items() for worker in node.living()]

    def kill(self, node: NodeId, worker: WorkerId) -> None:
        self.nodes[node].processes[worker].die(signal=SIGKILL)
        self.nodes[node].look(worker)

    def reboot(self, node: NodeId) -> None:
        """A host goes down for long enough to be given up, and comes back without anything."""
        self.take(NodeLost(node=node, silent_s=30.0))
        self.nodes[node].reboot()
        self.greet(self.nodes[node])

    def where(self) -> Places:
        """Slots and local batches of every group."""
        jobs = self.controller.state.jobs.values()
        return {
            job.job: {member.slot: member.local_batch for member in job.group.members}
            for job in jobs
            if job.group is not None
        }
