"""A real controller process with many simulated agents: sockets and sessions, no processes.

A `SimulatedAgent` has the conversation and nothing behind it. A `TrainingAgent` has the real
reconciler behind it, and workers that do, in real time, what the training library does about their
orders; the results of collective operations come from the `Training` that they share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import zmq.asyncio

from controlplane.cli.local import ROLES, _free_ports
from nodeagent.devices import cpu_slots
from nodeagent.reconciler import (
    Action,
    Connected,
    Desired,
    Ended,
    Event,
    FetchWorkspace,
    ForgetJob,
    GrantSlot,
    Kill,
    LogsStored,
    OrderGroup,
    PublishEvent,
    Reconciler,
    RemoveWorker,
    ReportRead,
    Started,
    StartWorker,
    Terminate,
    WorkspaceReady,
)
from schemas.codec import TO_AGENT, encode
from schemas.epochs import EpochFacts
from schemas.ids import BootId, JobId, NodeId, Rank, Seconds, Version, WorkerId
from schemas.nodes import Group, NodeSpec
from schemas.session import AgentOutput, AgentSession, Apply, Publish, SendHello, ToController
from schemas.transport.keys import KeyPair, write_keys
from schemas.transport.sockets import PATIENT_RECONNECT_MS, Link, Socket
from schemas.wire.agent import (
    JOIN,
    RECOVER,
    SETTLED,
    SUSPEND,
    SWITCH,
    AgentEvent,
    EpochReported,
    GroupDelta,
    GroupFormed,
    Hello,
    Numbered,
    Quiesced,
    ScriptReport,
    SlotAwaited,
    StepsReported,
    StoreOpened,
    Suspended,
    Telemetry,
    ToAgent,
    TrainingFinished,
    Welcome,
    WorkerReady,
    WorkerSeen,
)

Seen = tuple[WorkerSeen, ...]


class Watch:
    """Whoever wants to see what agents say and hear; `at` is CLOCK_MONOTONIC in seconds."""

    def published(self, agent: SimulatedAgent, numbered: Numbered, at: float) -> None: ...

    def heard(self, agent: SimulatedAgent, message: ToAgent, at: float) -> None: ...


@dataclass
class SimulatedAgent:
    """The agent's end of the conversation, with nothing behind it."""

    node: NodeId
    keys: KeyPair
    server_key: bytes
    ports: dict[str, int]
    slots: int = 1
    watch: Watch = field(default_factory=Watch)
    frames: Counter[str] = field(default_factory=Counter)
    deltas: list[GroupDelta] = field(default_factory=list)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    shipper: Socket | None = None

    def open(self, context: zmq.asyncio.Context) -> None:
        """Connect; all agents share the threads of one context.

        As a real agent's, the connection for output follows the first welcome.
        """
        self.link = Link(self.keys)
        self.link.close()  # its own context, which has no socket yet
        self.link._context = context
        self.session = AgentSession(self.node, BootId("boot"), chance=random.random)
        self.orders = self._connect("DEALER", "agents")
        self.spec = NodeSpec(
            node=self.node, host="simulated", address="127.0.0.1", slots=cpu_slots(self.slots),
            cores=self.slots, memory_bytes=1, release="test",
        )  # fmt: skip

    def _connect(self, kind: str, port: str, **options: Any) -> Socket:
        address = f"tcp://{self.address}:0;127.0.0.1:{self.ports[port]}"
        return self.link.connect(kind, address, self.server_key, **options)

    @property
    def address(self) -> str:
        """An address of its own in the loopback network, from which it connects."""
        high, low = divmod(int(self.node.removeprefix("n")), 250)
        return f"127.0.{high + 1}.{low + 1}"

    async def listen(self) -> None:
        async for incoming in self.orders:
            at = time.monotonic()
            message = TO_AGENT.decode(incoming.frames[-1])
            self.frames[type(message).__name__] += 1
            self.watch.heard(self, message, at)
            self.do(self.session.receive(message, self.now()))
            if isinstance(message, Welcome):
                if self.shipper is None:  # it sends nothing
                    self.shipper = self._connect(
                        "DEALER", "shippers", reconnect_ms=PATIENT_RECONNECT_MS
                    )
                self.welcomed.set()

    def tick(self) -> None:
        self.do(self.session.tick(self.now()))

    def happen(self, event: AgentEvent) -> None:
        self.do(self.session.record_event(event))

    def publish(self, data: bytes) -> None:
        self.orders.send(data)

    def do(self, outputs: list[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self.orders.send(encode(message))
                case Publish(numbered=numbered):
                    self.watch.published(self, numbered, time.monotonic())
                    self.publish(encode(numbered))
                case SendHello():
                    if not self.orders.send(encode(self.hello())):
                        self.session.hello_not_sent(self.now())
                case Apply(delta=GroupDelta() as delta):
                    self.deltas.append(delta)
                    self.news.set()
                    self.apply(delta)

    def apply(self, delta: GroupDelta) -> None:
        """Make it so; here nothing comes of it."""

    def seen(self) -> Seen:
        """The processes that it finds on its node."""
        return ()

    def hello(self) -> Hello:
        return Hello(
            node=self.node, boot=BootId("boot"), spec=self.spec, workers=self.seen(),
            events_sent=self.session.sent, echo=self.session.echo,
        )  # fmt: skip

    async def delta(self, count: int) -> GroupDelta:
        """The delta of that number, when it is here."""
        while len(self.deltas) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)
        return self.deltas[count - 1]

    @staticmethod
    def now() -> Seconds:
        return Seconds(asyncio.get_running_loop().time())


@dataclass
class Job:
    """How far a job's training is; all of its members are at the same place."""

    job: JobId
    epoch_samples: int
    epochs: int
    epoch: int = 0
    step: int = 0
    group_step: int = 0  # at which its group began to train
    samples: float = 0.0
    said_at: float = 0.0  # telemetry
    epoch_at: float = 0.0
    group: Group | None = None
    over: bool = False

    def speed(self, slots: int) -> float:
        """Samples per second: a further slot is worth a little less."""
        return float(1000.0 * slots**0.85)


class Training:
    """All workers of the fleet, and what the members of a group agree on among themselves."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a load, not a secret
        self.workers: dict[WorkerId, Worker] = {}
        self.jobs: dict[JobId, Job] = {}
        self.frozen = False
        self.finished = 0
        self.recoveries = 0

    def job(self, job: JobId) -> Job:
        if job not in self.jobs:
            samples, epochs = self.rng.randint(800, 2400), self.rng.randint(10, 20)
            self.jobs[job] = Job(job, samples, epochs)
        return self.jobs[job]

    def later(self, least_s: float, most_s: float, act: Callable[..., object], *args: Any) -> None:
        delay_s = self.rng.uniform(least_s, most_s)
        asyncio.get_running_loop().call_later(delay_s, act, *args)

    @property
    def busy(self) -> int:
        """Slots with a process."""
        return len({(worker.agent.node, worker.slot) for worker in self.workers.values()})

    def leaders(self) -> Iterator[tuple[Job, Worker]]:
        """Every job that trains, and the worker that is rank 0 of its group."""
        for job in list(self.jobs.values()):
            if job.group is not None and not job.over:
                first = self.workers.get(job.group.members[0].worker)
                if first is not None:
                    yield job, first

    def arm(self, delta: GroupDelta) -> None:
        """Let all members pass into the next group if every one of them waits for it."""
        group = delta.group
        if group is None:
            return
        involved = [member.worker for member in (*group.members, *delta.former)]
        found = [self.workers[name] for name in involved if name in self.workers]
        if len(found) < len(involved) or not all(delta.version in w.armed for w in found):
            return
        job = self.job(delta.job)
        job.group, job.group_step = (group if group.members else None), job.step
        if job.said_at == 0.0:
            job.said_at = job.epoch_at = time.monotonic()
        for worker in found:
            del worker.armed[delta.version]
            worker.quiescing = False
            self.later(0.0, 0.01, worker.swap, delta)

    async def run(self, tick_s: float = 0.05) -> None:
        """Train, for ever."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if not self.frozen:
                for job, first in self.leaders():
                    self._train(job, first, now - before, now)
            before = now

    def _train(self, job: Job, first: Worker, passed_s: float, now: float) -> None:
        group = job.group
        members = [self.workers.get(member.worker) for member in group.members] if group else []
        if group is None or any(worker is None or worker.quiescing for worker in members):
            return
        gained = job.speed(len(members)) * passed_s
        job.samples += gained
        job.step += max(1, round(gained / group.global_batch))
        if job.samples >= (job.epoch + 1) * job.epoch_samples:
            job.epoch += 1
            first.report(EpochReported, **self.epoch_of(job, group, now))
            job.epoch_at = now
        if job.epoch >= job.epochs:
            if any(worker and worker.armed for worker in members):
                return  # they go on to the boundary that they agreed on
            job.over = True
            self.finished += 1
            self.later(5.0, 5.0, self.jobs.pop, job.job, None)
            first.report(TrainingFinished, reason="its epochs are done")
            for worker in members:
                if worker is not None:
                    self.later(0.0, 0.02, worker.end, 0)
        elif now - job.said_at >= 1.0:
            job.said_at = now
            first.say_steps(job, group)

    def epoch_of(self, job: Job, group: Group, now: float) -> dict[str, Any]:
        """The fields of a report of the epoch that just ended."""
        facts = EpochFacts(
            epoch=job.epoch, step=job.step, samples_done=job.epoch * job.epoch_samples,
            epoch_samples=job.epoch_samples,
            samples_per_s=job.epoch_samples / max(0.001, now - job.epoch_at),
            train_loss=1.0 / job.epoch, metrics={"accuracy": 0.5},
            global_batch=group.global_batch, lr=0.1,
        )  # fmt: skip
        return {
            "group": group.version, "stated_epochs": job.epochs,
            "duration_s": now - job.epoch_at, "facts": facts,
        }  # fmt: skip


@dataclass
class Worker:
    """A worker's process: what it does about its orders."""

    agent: TrainingAgent
    name: WorkerId
    job: JobId
    version: Version
    rank: Rank
    slot: int
    training: Training
    reports: int = 0
    ready: bool = False
    in_group: bool = False
    quiescing: bool = False
    opened: Version = Version(0)  # the newest version that it opened a store for
    armed: dict[Version, GroupDelta] = field(default_factory=dict)

    def report(self, kind: type[ScriptReport], **fields: Any) -> None:
        """Write the next report."""
        if self.name in self.training.workers:
            self.reports += 1
            who: dict[str, Any] = {"job": self.job, "version": self.version, "rank": self.rank}
            self.agent.tell(ReportRead(self.name, kind(**who, index=self.reports, **fields)))

    def say_steps(self, job: Job, group: Group) -> None:
        """Telemetry, which nobody numbers."""
        steps = StepsReported(
            job=self.job, version=self.version, rank=self.rank, group=group.version,
            epoch=job.epoch + 1, step=job.step, samples_done=int(job.samples),
            samples_per_s=job.speed(len(group.members)), train_loss=0.5,
            global_batch=group.global_batch, lr=0.1, group_steps=job.step - job.group_step,
        )  # fmt: skip
        self.agent.publish(encode(Telemetry(node=self.agent.node, steps=steps)))

    def waits(self) -> None:
        """All is built that needs no device, if that is not its own by now."""
        if not self.ready:
            self.report(SlotAwaited)

    def granted(self) -> None:
        """The device is its own: model, optimizer and data can be built."""
        if not self.ready:
            self.ready = True
            self.training.later(0.01, 0.05, self._built)

    def _built(self) -> None:
        job = self.training.job(self.job)
        self.report(
            WorkerReady,
            epoch_samples=job.epoch_samples,
            resumed_epoch=job.epoch,
            parameters=1000,
            store_port=29000,
        )

    def order(self, delta: GroupDelta) -> None:
        """Do what the training library does about a new delta."""
        group = delta.group
        if group is None:
            return
        if delta.stage == SWITCH:
            self.armed[delta.version] = delta
            self.training.arm(delta)
        elif delta.stage >= SETTLED:
            self.armed = {v: armed for v, armed in self.armed.items() if v > delta.version}
        elif delta.kind == RECOVER:
            self._quiesce(delta)
        elif delta.kind == JOIN and self._serves(group):
            self.opened = group.version
            self.training.later(0.0, 0.01, self._open)

    def _serves(self, group: Group) -> bool:
        """Whether a group meets at the store of this incumbent, and it has none open for it."""
        first = group.members[0].worker == self.name and len(group.members) > 1
        return first and self.in_group and self.opened < group.version

    def _open(self) -> None:
        self.report(StoreOpened, group=self.opened, port=29001)

    def _quiesce(self, delta: GroupDelta) -> None:
        job = self.training.job(self.job)
        self.training.recoveries += 1
        self.quiescing = True
        self.armed.clear()
        self.report(
            Quiesced, group=delta.version, step=job.step, epoch=job.epoch, has_full_state=self.in_group,
            port=29002,
        )  # fmt: skip

    def swap(self, delta: GroupDelta) -> None:
        """Pass the boundary into `delta`'s group, or leave at it."""
        job, group = self.training.job(self.job), delta.group
        if group is not None and group.member(self.name) is not None:
            self.in_group = True
            self.report(GroupFormed, group=group.version, epoch=job.epoch, step=job.step)
            return
        if delta.kind == SUSPEND and delta.former and delta.former[0].worker == self.name:
            done = {"step": job.step, "samples_done": int(job.samples)}
            self.report(Suspended, group=delta.version, epoch=job.epoch, **done)
        self.training.later(0.0, 0.02, self.end, 0)

    def end(self, code: int | None, signal: int | None = None) -> None:
        """The process is gone."""
        if self.training.workers.pop(self.name, None) is not None:
            self.agent.tell(Ended(self.name, code, signal, unseen=False))
            self.agent.tell(LogsStored(self.name))


@dataclass
class TrainingAgent(SimulatedAgent):
    """The real agent core, around imaginary processes."""

    training: Training = field(default_factory=Training)
    pids: int = 0

    def open(self, context: zmq.asyncio.Context) -> None:
        super().open(context)
        self.reconciler = Reconciler(self.node)

    def seen(self) -> Seen:
        return self.reconciler.seen()

    def apply(self, delta: GroupDelta) -> None:
        self.tell(Desired(delta))

    def tell(self, event: Event) -> None:
        for action in self.reconciler.handle(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        workers, training = self.training.workers, self.training
        match action:
            case FetchWorkspace(job=job, digest=digest):
                training.later(0.0, 0.005, self.tell, WorkspaceReady(job, digest))
            case StartWorker():
                training.later(0.005, 0.02, self._start, action)
            case OrderGroup(worker=worker, delta=delta) if worker in workers:
                workers[worker].order(delta)
            case GrantSlot(worker=worker) if worker in workers:
                workers[worker].granted()
            case Terminate(worker=worker) if worker in workers:
                training.later(0.005, 0.02, workers[worker].end, None, 15)
            case Kill(worker=worker) if worker in workers:
                workers[worker].end(None, 9)
            case PublishEvent(event=event):
                self.happen(event)
            case ForgetJob(job=job):
                self.session.forget_job(job)
            case RemoveWorker():
                pass

    def _start(self, action: StartWorker) -> None:
        self.pids += 1
        state = self.reconciler.workers[action.worker]
        self.training.workers[action.worker] = Worker(
            agent=self, name=action.worker, job=state.job, version=state.version, rank=state.rank,
            slot=state.slot, training=self.training,
        )  # fmt: skip
        self.tell(Started(action.worker, self.pids, 7))
        self.tell(Connected(action.worker))
        if not action.granted:
            self.training.later(0.01, 0.05, self.training.workers[action.worker].waits)


JOINING_S: Final = 30.0
LOG: Final = "controller.log"
TICK_S: Final = 0.25  # as a real agent's
TURNS: Final = 25  # in a tick, so that agents do not act at the same time
Make = Callable[[NodeId, KeyPair, bytes, dict[str, int]], SimulatedAgent]


def open_all(
    agents: Sequence[SimulatedAgent], context: zmq.asyncio.Context
) -> list[asyncio.Task[None]]:
    """Connect agents, and return the tasks by which they live."""
    for agent in agents:
        agent.open(context)
    listening = [asyncio.create_task(agent.listen()) for agent in agents]
    return [*listening, asyncio.create_task(_tick_all(agents))]


async def _tick_all(agents: Sequence[SimulatedAgent]) -> None:
    """Tick each agent every `TICK_S`, with one timer, as timers of all would keep a core busy."""
    for turn in itertools.cycle(range(TURNS)):
        for agent in agents[turn::TURNS]:
            agent.tick()
        await asyncio.sleep(TICK_S / TURNS)


class Fleet:
    """One controller process and `count` simulated agents."""

    def __init__(
        self,
        home: Path,
        count: int,
        *,
        policy: str = "fifo",
        options: Mapping[str, Any] | None = None,
        make: Make = SimulatedAgent,
    ) -> None:
        server = write_keys(home / "keys", "server")
        self.ports = dict(zip(ROLES, _free_ports(len(ROLES)), strict=True))
        authorised, self.agents = [], []
        for role, name in [("admin", "admin"), *(("node", f"n{i}") for i in range(count))]:
            keys = write_keys(home / "keys", name)
            public = keys.public.decode()
            authorised.append(f'[[key]]\npublic = "{public}"\nname = "{name}"\nrole = "{role}"\n')
            if role == "node":
                self.agents.append(make(NodeId(name), keys, server.public, self.ports))
        listed = home / "keys" / "authorised.toml"
        listed.write_text("\n".join(authorised))
        listed.chmod(0o600)
        endpoint = f"tcp://127.0.0.1:{self.ports['clients']}"
        (home / "client.toml").write_text(f'endpoint = "{endpoint}"\n')
        self.home, self.policy, self.options = home, policy, dict(options or {})
        self.context = zmq.asyncio.Context()
        self.tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        self.start()
        await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        faults = [task.exception() for task in self.tasks if task.done() and not task.cancelled()]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.context.destroy(linger=0)
        await self.stop()
        for fault in faults:
            if fault is not None:
                raise fault

    def start(self) -> None:
        """Begin the controller."""
        listen = "\n".join(f"{role} = {port}" for role, port in self.ports.items())
        options = "\n".join(f"{name} = {json.dumps(v)}" for name, v in self.options.items())
        (self.home / "controller.toml").write_text(
            f"[listen]\n{listen}\n[policy]\nname = {json.dumps(self.policy)}\n"
            f"[policy.options]\n{options}\n"
        )
        command = [sys.executable, "-m", "controlplane.service", "--config"]
        with (self.home / LOG).open("ab") as log:
            self.process = subprocess.Popen([*command, self.home / "controller.toml"], stderr=log)

    async def stop(self) -> None:
        """End it."""
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 60)

    async def join(self) -> None:
        """Connect all agents, and wait until each is welcome."""
        self.tasks += open_all(self.agents, self.context)
        await self.welcome()

    async def welcome(self) -> None:
        waits = [agent.welcomed.wait() for agent in self.agents]
        await asyncio.wait_for(asyncio.gather(*waits), JOINING_S)

    async def restart(self, **options: Any) -> None:
        """The next controller, with these options of the policy changed; the agents find it."""
        await self.stop()
        for agent in self.agents:
            agent.welcomed.clear()
        self.options |= options
        self.start()
        await self.welcome()
