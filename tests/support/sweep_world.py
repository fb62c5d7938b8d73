"""Nodes whose workers train the units of sweeps: real sessions, imaginary processes, files and training.

A state is its history: what was trained on what, in order. So two states are equal if and only if
they were trained equally, and the digest of one says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from controlplane.core.commands import Announce, Command, RequestPlan
from controlplane.core.handlers import sweeps
from controlplane.core.history import Record
from controlplane.core.inputs import ControllerStarted, Input, NodeGreeted, NodeLost
from controlplane.core.model.job import Job
from controlplane.core.model.sweep import JobSweep
from schemas.ids import (
    JobId,
    NodeId,
    Rank,
    SlotId,
    Term,
    Version,
    WorkerId,
    index_of,
    node_of,
    worker_id,
)
from schemas.nodes import Member, NodeSpec, SlotSpec
from schemas.sweeps import Parameter, RandomSearch, SearchSpec, SweepSpec
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
    WorkerExited,
    WorkerReady,
    WorkerSeen,
    WorkerStarted,
)
from schemas.wire.feed import FeedEvent
from schemas.wire.sweeps import (
    StateCopied,
    StateNotCopied,
    StateSource,
    SweepDelta,
    UnitOrder,
    WantedState,
)
from tests.support.sweeps import History, goodness, loss_and_samples, step
from tests.support.world import BaseWorld, Host

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
            UnitEnded, attempt=unit.attempt, metrics={"loss": loss},
            samples=host.samples_of(unit.partition), seconds=2.0,
            scores={"accuracy": goodness(after)} if unit.evaluate else {}, digest=digest_of(after),
            size=100,
        )  # fmt: skip

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
class SweepNodes:
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


class HopperNode(Host):
    """A host whose agent applies each delta at once."""

    def __init__(self, node: NodeId, slots: int, world: SweepNodes) -> None:
        super().__init__(node, slots)
        self.world = world
        world.nodes[node] = self
        self.processes: dict[WorkerId, Hopper] = {}
        self.files: dict[File, History] = {}
        self.sizes: dict[int, int] = {}  # of partitions that are other than elsewhere
        self.restart()

    def restart(self) -> None:
        """A new agent finds processes, their reports and files."""
        super().restart()
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
            node=self.node, host=self.node, address=self.node,
            slots=tuple(SlotSpec(index=index, kind="cpu") for index in range(self.slots)), cores=64,
            memory_bytes=1 << 30, release="", states_port=STATES_PORT,
        )  # fmt: skip

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

    def happen(self, event: AgentEvent) -> None:
        self.session.record_event(event)

    def apply(self, delta: Any) -> None:
        if isinstance(delta, GroupDelta):
            self._group(delta)
        else:
            self._sweep(delta)

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
            self.session.held.pop((delta.job, False), None)

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


ENOUGH = 20_000


def sweep_spec(**changes: Any) -> SweepSpec:
    """A small sweep, with changes; those of its search by their names."""
    search: dict[str, Any] = {
        "space": {"lr": Parameter(log_uniform=(1e-4, 0.1))},
        "searcher": RandomSearch(3),
        "epochs": 2,
        "metric": "accuracy",
    }
    fields: dict[str, Any] = {
        "input_fn": "data:load",
        "model_fn": "models:build",
        "train_fn": "models:train",
        "eval_fn": "models:evaluate",
        "partitions": 2,
    }
    for name, value in changes.items():
        (search if name in SearchSpec.__struct_fields__ else fields)[name] = value
    return SweepSpec(search=SearchSpec(**search), **fields)


def sweep_job(slots: tuple[int, int] = (1, 4), **changes: Any) -> dict[str, Any]:
    """What a job has that is a sweep."""
    return {
        "script": "sweep",
        "slots": slots,
        "batch_size": slots[1],
        "max_batch_size": "keep",
        "sweep": sweep_spec(**changes),
    }


class SweepCluster(BaseWorld[HopperNode]):
    """Deltas arrive, hoppers go on, reports arrive: one at a time, whichever is chosen."""

    def __init__(self, **slots: int) -> None:
        self.world = SweepNodes()
        self.asked = False
        self.told: list[FeedEvent] = []  # announcements
        self.records: list[Record] = []  # of what happened
        for name, many in slots.items():
            HopperNode(NodeId(name), many, self.world)
        super().__init__(self.world.nodes)

    def nothing_was_passed_over(self) -> None:
        """To hold every sweep against its job changes nothing: those that matter were."""
        ctx = self.controller.reactor._ctx
        before = len(ctx.out), ctx.plan_needed
        sweeps.reconcile_sweeps(ctx, list(ctx.state.sweeps))
        assert (len(ctx.out), ctx.plan_needed) == before

    # --- what people and machines do

    def take(self, event: Input) -> list[Command]:
        commands = super().take(event)
        self.records += self.controller.reactor.records
        self.nothing_was_passed_over()
        self.asked = self.asked or RequestPlan() in commands
        self.told += [command.event for command in commands if isinstance(command, Announce)]
        self.check()
        return commands

    def check(self) -> None:
        """A unit is in one place, a slot has one unit, a trial has one unit."""
        for job in self.controller.state.jobs.values():
            if job.sweep is not None:
                counted = [one for one in job.sweep.engine.state.leases.values() if not one.ignored]
                trials = [one.trial for one in counted]
                assert len(trials) == len(set(trials)), "a trial has one unit at a time"
                assert set(job.sweep.units) == {
                    one.order.worker for one in job.sweep.engine.state.leases.values()
                }

    def submit(self, name: str = "a", **spec: Any) -> JobId:
        self.asked = RequestPlan() in self.controller.submit(name, **spec) or self.asked
        return JobId(f"{name}-{self.controller.state.jobs_accepted}")

    def job(self, name: JobId) -> Job:
        return self.controller.job(name)

    def sweep(self, name: JobId) -> JobSweep:
        found = self.job(name).sweep
        assert found is not None
        return found

    def place(self, placed: Mapping[JobId, list[SlotId]]) -> None:
        """Propose a plan: these slots, the batch of each job in equal shares."""
        batches: dict[JobId, dict[SlotId, int]] = {}
        for job, slots in placed.items():
            share, more = divmod(self.job(job).spec.batch_size, max(1, len(slots)))
            batches[job] = {slot: share + (at < more) for at, slot in enumerate(slots)}
        self.plan(batches)

    def restart_controller(self) -> None:
        """The next incarnation; what was under way to nodes is lost."""
        for orders in self.orders.values():
            orders.clear()
        self.take(ControllerStarted(term=Term(self.controller.state.term + 1), release=""))
        for node in self.world.nodes.values():
            if node.up:
                self.greet(node)

    def restart_agent(self, node: HopperNode) -> None:
        node.restart()
        self.greet(node)

    def lose(self, node: HopperNode) -> None:
        """A host is silent for long; its processes are gone."""
        node.up = False
        self.orders[node.node].clear()
        for process in node.living():
            process.alive = False
        self.take(NodeLost(node=node.node, silent_s=30.0))

    def bring_back(self, node: HopperNode, *, disk: bool = True) -> None:
        node.up = True
        node.reboot(disk=disk)
        self.greet(node)

    # --- what happens by itself

    def possible(self) -> list[Callable[[], None]]:
        """Everything that could happen next."""
        found: list[Callable[[], None]] = []
        for name, node in self.world.nodes.items():
            if not node.up:
                continue
            if self.orders[name]:
                found.append(partial(self._arrives, node))
            if reports := self.said(node):
                found.append(partial(self._reports, reports[0]))
            found += [partial(node.fetch, 0)] * bool(node.fetching)
            for process in node.living():
                found += _next_of(process)
        return found

    def _arrives(self, node: HopperNode) -> None:
        node.receive(self.orders[node.node].pop(0))

    def _reports(self, report: Input) -> None:
        self.take(report)

    def settle(self, *, training: bool = False) -> None:
        """Everything arrives, in order; units begin, and end only if `training`."""
        for _ in range(ENOUGH):
            ready = [one for one in self.possible() if training or not _is_end(one)]
            if not ready:
                return
            ready[0]()
        raise AssertionError("it never comes to rest")

    def end_unit(self, name: JobId, trial: int | None = None) -> None:
        """The first unit that is under way ends, or that of a trial."""
        self.settle()
        for node in self.world.nodes.values():
            for process in node.living():
                unit = process.unit
                if process.job != name or unit is None or not process.begun:
                    continue
                if trial is None or unit.result.trial == trial:
                    process.end()
                    self.settle()
                    return
        raise AssertionError("no unit is under way")

    def step(self, rng: Random) -> bool:
        """One thing happens, by chance; False if nothing can."""
        found = self.possible()
        if found:
            found[rng.randrange(len(found))]()
        return bool(found)

    def hoppers(self, name: JobId) -> list[Hopper]:
        return [p for n in self.world.nodes.values() for p in n.living() if p.job == name]


def _next_of(process: Hopper) -> list[Callable[[], None]]:
    if process.unit is not None:
        return [process.end] if process.begun else [process.begin]
    return [partial(process.die, 0, None)] if process.leaving else []


def _is_end(one: Callable[[], None]) -> bool:
    return getattr(one, "__name__", "") == "end"
