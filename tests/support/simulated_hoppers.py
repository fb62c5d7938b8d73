"""Nodes whose workers take units of sweeps: real sessions, imaginary processes, files and training.

A state is its history: what was trained on what, in order. So two states are the same if and only if
they were trained the same way, and the digest of one says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.inputs import NodeGreeted, NodeReported
from schemas.ids import (
    BootId,
    JobId,
    NodeId,
    Rank,
    Seconds,
    Term,
    Version,
    WorkerId,
    index_of,
    node_of,
    worker_id,
)
from schemas.nodes import Member, NodeSpec, SlotSpec
from schemas.session import AgentSession, Apply
from schemas.wire.agent import (
    PREPARE,
    RECOVER,
    SETTLED,
    SUSPEND,
    SWITCH,
    AgentEvent,
    GroupDelta,
    GroupFormed,
    JobCleared,
    Quiesced,
    ScriptReport,
    SlotAwaited,
    StoreOpened,
    Suspended,
    SweepWorkerReady,
    UnitEnded,
    UnitFailed,
    UnitStarted,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkerSeen,
    WorkerStarted,
)
from schemas.wire.sweeps import (
    StateCopied,
    StateNotCopied,
    StateSource,
    SweepDelta,
    UnitOrder,
    WantedState,
)
from tests.support.sweep_site import History, goodness, loss_and_samples, step

File = tuple[JobId, int, int]  # job, trial, version
STATES_PORT = 7706


def digest_of(history: History) -> str:
    return hashlib.sha256(repr(history).encode()).hexdigest()


@dataclass
class Hopper:
    """One process."""

    host: HopperNode
    job: JobId
    name: WorkerId
    version: Version
    rank: Rank
    slot: int
    pid: int
    alive: bool = True
    waits: bool = False  # for its slot
    leaving: bool = False
    formed: set[Version] = field(default_factory=set)
    reports: list[ScriptReport] = field(default_factory=list)
    exited: WorkerExited | None = None
    unit: UnitOrder | None = None
    begun: bool = False
    done: set[int] = field(default_factory=set)  # attempts
    memory: dict[File, History] = field(default_factory=dict)

    def report(self, kind: Any, **fields: Any) -> None:
        index = len(self.reports) + 1
        event = kind(job=self.job, version=self.version, rank=self.rank, index=index, **fields)
        self.reports.append(event)
        self.host.happen(event)

    def ready(self) -> None:
        self.waits = False
        self.report(SweepWorkerReady, address=f"{self.host.node}:{self.pid}")
        self.report(
            WorkerReady, epoch_samples=1, resumed_epoch=0, parameters=1, store_port=self.pid
        )

    def order(self, delta: GroupDelta) -> None:
        """Answer the group protocol at once."""
        group = delta.group
        assert group is not None
        member = group.member(self.name)
        version = group.version
        if self.waits or version in self.formed:
            return
        if delta.kind == RECOVER and delta.stage == PREPARE and member is not None:
            self.report(
                Quiesced, group=version, step=0, epoch=0, has_full_state=True, port=self.pid
            )
        elif delta.stage == PREPARE and member is not None and member.rank == 0:
            if self.version != version:
                self.report(StoreOpened, group=version, port=self.pid)
        elif delta.stage == SWITCH:
            self.leaving = member is None
            if delta.kind == SUSPEND and delta.former and delta.former[0].worker == self.name:
                self.report(Suspended, group=version, epoch=0, step=0, samples_done=0)
            if member is not None:
                self.formed.add(version)
                self.report(GroupFormed, group=version, epoch=0, step=0)

    def take(self, unit: UnitOrder) -> None:
        if self.alive and unit.attempt not in self.done and self.unit is None:
            self.unit, self.begun = unit, False

    def begin(self) -> None:
        assert self.unit is not None
        self.begun = True
        samples = self.host.samples_of(self.unit.partition)
        self.report(
            UnitStarted, attempt=self.unit.attempt, samples=samples, waited_s=0.0, staged_s=0.0
        )

    def end(self) -> None:
        """Train the unit: from its state if anybody has it."""
        unit, host = self.unit, self.host
        assert unit is not None
        self.unit = None
        self.done.add(unit.attempt)
        before: History | None = ()
        if unit.state is not None:
            file = (self.job, unit.state.trial, unit.state.version)
            before = host.world.read(host, self, file, unit.state.digest, unit.sources)
        if before is None:
            self.report(UnitFailed, attempt=unit.attempt, reason="nobody has it", fault="state")
            return
        if any(value == host.world.poison for value in unit.values.values()):
            self.report(UnitFailed, attempt=unit.attempt, reason="model_fn raised", fault="trial")
            return
        after = step(before, unit.values, unit.epoch, unit.partition)
        name = (self.job, unit.result.trial, unit.result.version)
        self.memory = {name: after}
        host.files[name] = after
        loss, _ = loss_and_samples(unit.partition)
        self.report(
            UnitEnded,
            attempt=unit.attempt,
            metrics={"loss": loss},
            samples=host.samples_of(unit.partition),
            seconds=2.0,
            scores={"accuracy": goodness(after)} if unit.evaluate else {},
            digest=digest_of(after),
            size=100,
        )

    def die(self, code: int | None = None, signal: int | None = 9) -> None:
        if not self.alive:
            return
        self.alive, self.unit = False, None
        self.exited = WorkerExited(
            job=self.job, version=self.version, rank=self.rank, code=code, signal=signal
        )
        self.host.happen(self.exited)
        for other in self.host.processes.values():
            if other.alive and other.waits and other.slot == self.slot:
                other.ready()
                other.host.tell_group(other)


@dataclass
class World:
    """All nodes, and what is the same for all."""

    nodes: dict[NodeId, HopperNode] = field(default_factory=dict)
    poison: object = "poison"  # a value with which model_fn raises

    def read(
        self,
        host: HopperNode,
        worker: Hopper,
        file: File,
        digest: str,
        sources: tuple[StateSource, ...],
    ) -> History | None:
        """A state from the node's own file, or from one of these."""
        found = [host.files.get(file), worker.memory.get(file)]
        found += [self.fetch(source, file) for source in sources]
        return next((one for one in found if one is not None and digest_of(one) == digest), None)

    def fetch(self, source: StateSource, file: File) -> History | None:
        node = self.nodes[source.node]
        if not node.up:
            return None
        if source.address.endswith(f":{STATES_PORT}"):
            return node.files.get(file)
        alive = [one for one in node.processes.values() if one.alive]
        memories = [p.memory for p in alive if source.address == f"{node.node}:{p.pid}"]
        return memories[0].get(file) if memories else None


class HopperNode:
    """One host with its agent."""

    def __init__(self, node: NodeId, slots: int, world: World) -> None:
        self.node, self.slots, self.world = node, slots, world
        world.nodes[node] = self
        self.processes: dict[WorkerId, Hopper] = {}
        self.files: dict[File, History] = {}
        self.pids = self.boots = 0
        self.up = True
        self.sizes: dict[int, int] = {}  # of partitions that are other than elsewhere
        self.restart()

    def restart(self) -> None:
        """A new agent finds processes, their reports and files."""
        self.boots += 1
        self.session = AgentSession(self.node, BootId(f"{self.node}-boot-{self.boots}"))
        self.groups: dict[JobId, GroupDelta] = {}
        self.sweeps: dict[JobId, SweepDelta] = {}
        self.ordered: dict[JobId, Version] = {}
        self.fetching: list[tuple[JobId, WantedState]] = []
        self.session.session = "s"
        for process in self.processes.values():
            self.ordered[process.job] = max(
                self.ordered.get(process.job, Version(0)), process.version
            )
            self.happen(self._started(process))
            for report in process.reports:
                self.happen(report)  # type: ignore[arg-type] # every one is an AgentEvent
            if process.exited is not None:
                self.happen(process.exited)

    def reboot(self, *, disk: bool) -> None:
        """The host goes down and comes back without processes, perhaps without its disk."""
        self.processes.clear()
        if not disk:
            self.files.clear()
        self.restart()

    def samples_of(self, partition: int) -> int:
        return self.sizes.get(partition, loss_and_samples(partition)[1])

    # --- what the controller hears

    def spec(self) -> NodeSpec:
        return NodeSpec(
            node=self.node,
            host=self.node,
            address=self.node,
            slots=tuple(SlotSpec(index=index, kind="cpu") for index in range(self.slots)),
            cores=64,
            memory_bytes=1 << 30,
            release="0",
            states_port=STATES_PORT,
        )

    def hello(self) -> NodeGreeted:
        seen = tuple(
            WorkerSeen(
                job=one.job,
                version=one.version,
                rank=one.rank,
                slot=one.slot,
                pid=one.pid,
                started_ticks=7,
                ended=not one.alive,
            )
            for one in self.processes.values()
        )
        return NodeGreeted(node=self.node, boot=self.session.boot, spec=self.spec(), workers=seen)

    def welcome(self, term: Term, committed: int) -> None:
        welcome = Welcome(
            session="s", boot=self.session.boot, term=term, committed=committed, log_port=0,
            event_port=0,
        )  # fmt: skip
        self.session.receive(welcome, Seconds(0.0))

    def said_after(self, seq: int) -> list[NodeReported]:
        return [
            NodeReported(node=self.node, boot=self.session.boot, seq=n.seq, event=n.event)
            for n in self.session.spool
            if n.seq > seq
        ]

    def happen(self, event: AgentEvent) -> None:
        self.session.happened(event)

    # --- what it hears

    def receive(self, delta: GroupDelta | SweepDelta) -> None:
        for output in self.session.receive(delta, Seconds(0.0)):
            match output:
                case Apply(delta=GroupDelta() as group):
                    self._group(group)
                case Apply(delta=SweepDelta() as sweep):
                    self._sweep(sweep)

    def _group(self, delta: GroupDelta) -> None:
        self.groups[delta.job] = delta
        wanted = {member.worker: member for member in self._members(delta)}
        for process in [p for p in self.processes.values() if p.job == delta.job and p.alive]:
            if process.name not in wanted and not process.leaving:
                process.die()
        for name, member in wanted.items():
            born = name == worker_id(delta.job, delta.version, member.rank)
            if born and name not in self.processes:
                if delta.version > self.ordered.get(delta.job, Version(0)):
                    self._start(delta, member)
            elif name in self.processes and self.processes[name].alive:
                self.processes[name].order(delta)
        self.ordered[delta.job] = max(self.ordered.get(delta.job, Version(0)), delta.version)
        through = Version(delta.version + (delta.stage >= SETTLED))
        living = [p for p in self.processes.values() if p.job == delta.job and p.alive]
        if not any(p.version < through and p.name not in wanted for p in living):
            self.happen(JobCleared(job=delta.job, version=through))
        if delta.forget:
            self.session.held.pop(delta.job, None)

    def _members(self, delta: GroupDelta) -> list[Member]:
        members = (*(delta.group.members if delta.group else ()), *delta.former)
        return [member for member in members if node_of(member.slot) == self.node]

    def _start(self, delta: GroupDelta, member: Member) -> None:
        self.pids += 1
        slot = index_of(member.slot)
        taken = any(p.alive and p.slot == slot for p in self.processes.values())
        process = Hopper(
            self, delta.job, member.worker, delta.version, member.rank, slot, self.pids, waits=taken
        )
        self.processes[member.worker] = process
        self.happen(self._started(process))
        if taken:
            process.report(SlotAwaited)
        else:
            process.ready()
            self.tell_group(process)

    def tell_group(self, process: Hopper) -> None:
        """The newest order of its group."""
        delta = self.groups.get(process.job)
        if delta is not None and delta.group is not None and process.alive:
            process.order(delta)

    @staticmethod
    def _started(process: Hopper) -> WorkerStarted:
        return WorkerStarted(
            job=process.job,
            version=process.version,
            rank=process.rank,
            pid=process.pid,
            started_ticks=7,
        )

    def _sweep(self, delta: SweepDelta) -> None:
        job = delta.job
        self.sweeps[job] = delta
        attempts = {unit.attempt for unit in delta.units}
        for process in list(self.processes.values()):
            unit = process.unit
            if process.job != job or unit is None or unit.attempt > delta.attempts:
                continue
            if unit.attempt not in attempts:
                process.die()
        for unit in delta.units:
            if unit.worker in self.processes:
                self.processes[unit.worker].take(unit)
        wanted = {(job, want.state.trial, want.state.version) for want in delta.wanted}
        results = {(job, unit.result.trial, unit.result.version) for unit in delta.units}
        under_way = {
            (job, p.unit.result.trial, p.unit.result.version)
            for p in self.processes.values()
            if p.job == job and p.unit is not None
        }
        for file in [file for file in self.files if file[0] == job]:
            if file not in wanted | results | under_way:
                del self.files[file]
        self.fetching = [one for one in self.fetching if one[0] != job]
        for want in delta.wanted:
            file = (job, want.state.trial, want.state.version)
            here = file in self.files and digest_of(self.files[file]) == want.state.digest
            if want.sources and here:
                self.happen(StateCopied(job=job, trial=file[1], version=file[2]))
            elif want.sources:
                self.fetching.append((job, want))
            elif not here:
                self.happen(
                    StateNotCopied(job=job, trial=file[1], version=file[2], reason="no file")
                )

    def fetch(self, at: int) -> None:
        """A copy comes to its end."""
        job, want = self.fetching.pop(at)
        file = (job, want.state.trial, want.state.version)
        found = [self.world.fetch(source, file) for source in want.sources]
        good = [one for one in found if one is not None and digest_of(one) == want.state.digest]
        if good:
            self.files[file] = good[0]
            self.happen(StateCopied(job=job, trial=file[1], version=file[2]))
        else:
            self.happen(StateNotCopied(job=job, trial=file[1], version=file[2], reason="nobody"))

    # --- what can happen next

    def living(self) -> list[Hopper]:
        return [process for process in self.processes.values() if process.alive]
