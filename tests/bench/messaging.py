"""One controller, real CURVE sockets and a fleet of simulated agents whose jobs come, grow and end.

The bench plays all agents and all workers, and its clock is the only one (CLOCK_MONOTONIC):

- event to commit: an agent publishes a numbered event, until it hears that the event is durable;
- commit to delta: from there until the delta arrives that the event leads to directly (the last
  newcomer's readiness lets all members switch, the last member's word settles the group, the last
  exit ends the job), on every node of the job. Deltas leave before the acknowledgement of the
  commit that they wait for, so this is 0 where they arrive first;
- event to delta: both together; `search_p99_ratio` is of these;
- plan: from the submission on free slots to the job's first delta.

Blocks with a search that never rests (B) alternate with blocks in which it answers but does not
evolve (A). Between them the controller starts again with other options of its policy.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
import zmq

from controlplane.client import Client, JobSpec
from controlplane.core.inputs import ControllerStarted, DrainRequested, Input
from controlplane.core.reactor import Reactor
from schemas.ids import JobId, NodeId, Seconds, Term, node_of
from schemas.wire.agent import (
    PREPARE,
    SETTLED,
    START,
    SWITCH,
    AgentEvent,
    EpochReported,
    EventsCommitted,
    GroupDelta,
    GroupFormed,
    Numbered,
    ResendEvents,
    StoreOpened,
    Suspended,
    ToAgent,
    Welcome,
    WorkerExited,
    WorkerReady,
)
from schemas.wire.client import SearchInfo, SubmitJob
from tests.bench import report
from tests.bench.long_journal import write
from tests.support import builders
from tests.support.agent_processes import BusyAgent, all_welcomed, processes_of
from tests.support.fleet import (
    LOG,
    Fleet,
    Job,
    SimulatedAgent,
    Training,
    TrainingAgent,
    Watch,
    Worker,
)

SLOTS: Final = 4
ENDED: Final = SETTLED + 1  # stands for the delta that ends a job
SESSION: Final = ("HeartbeatAck", "HelloRequest")  # a session's own frames
START_S: Final = 60.0  # of a controller, at most
IN_FLIGHT: Final = 64  # events of one agent in a burst
BUSY: Final = {"warmup_steps": 1, "report_interval_s": 0.5, "rescale_stall_s": 0.01}
SHIPPED: Final = {"population": 16, "patience": 10}
EVOLVES: Final = {"search": "evolution"}  # as it does by itself where GPU types differ
IDLE: Final = {**EVOLVES, "population": 16, "patience": 0}
FULL_SPEED: Final = {**EVOLVES, "population": 64, "patience": 1_000_000}
Key = tuple[JobId, int, int]  # job, version, stage


@dataclass(frozen=True)
class Scale:
    agents: int
    jobs: int  # at once
    order: str  # of blocks: A idle, B at full speed
    block_s: float
    settle_s: float  # after a restart, before a block
    shipped_s: float
    warm_s: float
    burst_s: float
    idle: int = 0  # further nodes, which are drained


FULL: Final = Scale(100, 80, "ABBAABBA", 16.0, 3.0, 24.0, 8.0, 5.0)
QUICK: Final = Scale(40, 32, "ABBABA", 6.0, 1.0, 6.0, 3.0, 3.0)


def ms(samples: Iterable[float], share: float) -> float:
    return report.quantile(samples, share) * 1000.0


# --- what is seen on the wire


@dataclass
class Window:
    """Measurements of one stretch of time, in seconds."""

    kind: str
    began: float
    event_commit: list[float] = field(default_factory=list)
    arrivals: list[tuple[Key, float]] = field(default_factory=list)
    commit_delta: list[float] = field(default_factory=list)
    event_delta: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    early: int = 0  # deltas that were read before the commit that they follow
    took_s: float = 0.0
    cpu: dict[str, float] = field(default_factory=dict)  # share of one core
    generations_per_s: float = 0.0
    rescales_per_s: float = 0.0
    resends: int = 0  # asked for by the controller


class Meter(Watch):
    def __init__(self) -> None:
        self.window: Window | None = None
        self.said: defaultdict[NodeId, deque[tuple[int, float, Key | None]]] = defaultdict(deque)
        self.causes: defaultdict[Key, list[tuple[float, float]]] = defaultdict(list)
        self.told: set[tuple[NodeId, Key]] = set()
        self.first_delta: dict[JobId, float] = {}
        self.places: defaultdict[tuple[JobId, int], set[NodeId]] = defaultdict(set)
        self.ran: set[tuple[NodeId, JobId]] = set()
        self.kinds: Counter[str] = Counter()
        self.stray: Counter[str] = Counter()
        self.examples: list[str] = []
        self.committed = 0
        self.burst: Burst | None = None

    def published(self, agent: SimulatedAgent, numbered: Numbered, at: float) -> None:
        self.said[agent.node].append((numbered.seq, at, cause_of(numbered.event)))

    def heard(self, agent: SimulatedAgent, message: ToAgent, at: float) -> None:
        self.kinds[type(message).__name__] += 1
        match message:
            case EventsCommitted(through=through):
                if not self._covered(agent.node, through, at):
                    self._stray("commits of nothing", f"{agent.node}: {message}")
                elif self.burst is not None:
                    self.burst.refill(agent)
            case GroupDelta():
                self._delta(agent, message, at)
            case Welcome(committed=committed):
                said = self.said[agent.node]
                while said and said[0][0] <= committed:
                    said.popleft()
            case ResendEvents():
                if self.window is not None:
                    self.window.resends += 1
            case _ if type(message).__name__ not in SESSION:
                self._stray(type(message).__name__, f"{agent.node}: {message}")

    def _covered(self, node: NodeId, through: int, at: float) -> int:
        said, covered = self.said[node], 0
        while said and said[0][0] <= through:
            _, began, key = said.popleft()
            covered += 1
            if key is not None:
                self.causes[key].append((at, began))
            if self.window is not None and began >= self.window.began:
                self.window.event_commit.append(at - began)
        self.committed += covered
        return covered

    def _delta(self, agent: SimulatedAgent, delta: GroupDelta, at: float) -> None:
        self._concerned(agent, delta)
        key = key_of(delta)
        if (agent.node, key) in self.told:
            return
        self.told.add((agent.node, key))
        if delta.stage == PREPARE and delta.kind == START:
            self.first_delta.setdefault(delta.job, at)
        if self.window is not None:
            self.window.arrivals.append((key, at))

    def _concerned(self, agent: SimulatedAgent, delta: GroupDelta) -> None:
        node, job = agent.node, delta.job
        members = (*(delta.group.members if delta.group else ()), *delta.former)
        here = self.places[job, delta.version]
        here |= {node_of(member.slot) for member in members}
        if node in here:
            self.ran.add((node, job))
            return
        if (node, job) not in self.ran:
            self._stray("deltas to strangers", f"{node}: {delta}")
        elif not delta.forget and node not in self.places[job, delta.version - 1]:
            workers = agent.reconciler.workers if isinstance(agent, TrainingAgent) else {}
            if not any(worker.job == job for worker in workers.values()):
                self._stray("deltas to nodes left before", f"{node}: {delta}")

    def _stray(self, what: str, example: str) -> None:
        self.stray[what] += 1
        if len(self.examples) < 3:
            self.examples.append(f"{what}: {example[:400]}")

    def match(self, window: Window) -> None:
        for key, at in window.arrivals:
            said = [cause for cause in self.causes.get(key, ()) if cause[1] <= at]
            committed, began = max(said, key=itemgetter(1), default=(0.0, 0.0))
            if began >= window.began:
                window.early += committed > at
                window.commit_delta.append(max(0.0, at - committed))
                window.event_delta.append(at - began)


def cause_of(event: AgentEvent) -> Key | None:
    match event:
        case WorkerReady():
            return (event.job, event.version, SWITCH)
        case StoreOpened():
            return (event.job, event.group, SWITCH)
        case GroupFormed() | Suspended():
            return (event.job, event.group, SETTLED)
        case WorkerExited():
            return (event.job, 0, ENDED)
    return None


def key_of(delta: GroupDelta) -> Key:
    return (delta.job, 0, ENDED) if delta.forget else (delta.job, delta.version, delta.stage)


# --- the load


class TimedClient(Client):
    sent_at = 0.0

    async def _call(self, request: Any, *rest: Any) -> Any:
        if isinstance(request, SubmitJob):
            self.sent_at = time.monotonic()
        return await super()._call(request, *rest)


class Submitter:
    def __init__(self, client: TimedClient, fleet: Fleet, training: Training, work: Path) -> None:
        self.client, self.training, self.work = client, training, work
        self.room = SLOTS * len(fleet.agents)
        self.sent: dict[JobId, float] = {}  # those that found free slots, and when
        self.count = 0
        self.open = asyncio.Event()

    async def keep(self, jobs: int) -> None:
        while True:
            await self.open.wait()
            if self.count - self.training.finished >= jobs:
                await asyncio.sleep(0.02)
                continue
            await self._submit()

    async def _submit(self) -> None:
        spec = JobSpec(
            name="job", script="train.py", workdir=str(self.work),
            family=f"family-{self.count % 6}", batch_size=64, max_batch_size=1024,
            max_local_batch=512, slots=(1, 2 * SLOTS if self.count % 3 == 0 else SLOTS - 1),
        )  # fmt: skip
        self.count += 1
        fits = self.training.busy + 2 * SLOTS <= self.room
        job = await self.client.submit(spec)
        if fits and self.open.is_set():
            self.sent[job] = self.client.sent_at


class Burst:
    """Load in which every agent with a rank 0 publishes epochs as fast as they are committed."""

    def __init__(self, training: Training, meter: Meter) -> None:
        self.training, self.said = training, meter.said
        self.turns: dict[NodeId, Iterator[tuple[Job, Worker]]] = {}

    def begin(self) -> None:
        leaders: defaultdict[NodeId, list[tuple[Job, Worker]]] = defaultdict(list)
        for job, first in self.training.leaders():
            leaders[first.agent.node].append((job, first))
        self.turns = {node: itertools.cycle(here) for node, here in leaders.items()}
        for here in leaders.values():
            self.refill(here[0][1].agent)

    def refill(self, agent: SimulatedAgent) -> None:
        turns = self.turns.get(agent.node)
        spare = IN_FLIGHT - len(self.said[agent.node]) if turns is not None else 0
        for job, worker in itertools.islice(turns or (), max(0, spare)):
            if job.group is not None:
                job.epoch, job.step = job.epoch + 1, job.step + 1
                fields = self.training.epoch_of(job, job.group, time.monotonic())
                worker.report(EpochReported, **fields)


def drained(first: int, end: int) -> Iterator[tuple[Seconds, Input]]:
    """Yield the inputs of a controller whose nodes `first` to `end - 1` are drained."""
    now = Seconds(time.time() - 3600.0)
    yield now, ControllerStarted(term=Term(1), release="")
    for node in (NodeId(f"n{at}") for at in range(first, end)):
        yield now, builders.greeting(node, slots=SLOTS)
        yield now, DrainRequested(node=node, user="admin", reason="idle", within_s=None)


# --- the floor and the control


def syncs(folder: Path, pause_s: float = 0.0, count: int = 300) -> list[float]:
    """Return the seconds of appending 4 KiB to a file durably."""
    took, block = [], os.urandom(4096)
    path = folder / "floor"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for _ in range(count):
            time.sleep(pause_s)
            began = time.monotonic()
            os.write(file, block)
            os.fdatasync(file)
            took.append(time.monotonic() - began)
    finally:
        os.close(file)
        path.unlink()
    return took


async def echo(meter: Meter) -> None:
    """Measure the delay of the bench's own loop: its share of every figure."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)  # noqa: FBT003 - its only argument
    try:
        while True:
            await asyncio.sleep(random.uniform(0.005, 0.015))  # noqa: S311 - not in step with anything
            began = time.monotonic()
            there.send(b".")
            await loop.sock_recv(here, 1)
            if meter.window is not None:
                meter.window.lag.append(time.monotonic() - began)
    finally:
        here.close()
        there.close()


def searching(controller: int) -> psutil.Process | None:
    for child in psutil.Process(controller).children():
        if any("search_process" in word for word in child.cmdline()):
            return child
    return None


def cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return float("nan")
    times = process.cpu_times()
    return float(times.user + times.system)


# --- the run


class Bench:
    def __init__(self, scale: Scale, base: Path) -> None:
        self.scale, self.base = scale, base
        self.meter, self.training = Meter(), Training()
        training = partial(TrainingAgent, slots=SLOTS, watch=self.meter, training=self.training)
        names = iter(range(scale.agents + scale.idle))

        def make(*given: Any) -> SimulatedAgent:
            trains = next(names) < scale.agents
            return training(*given) if trains else BusyAgent(*given, slots=SLOTS)

        options = BUSY | SHIPPED
        home, work = base / "home", base / "work"
        home.mkdir()
        work.mkdir()
        (work / "train.py").write_text("")
        count = scale.agents + scale.idle
        self.fleet = Fleet(home, count, options=options, policy="ones", make=make)
        self.idle = processes_of(self.fleet.agents[scale.agents :])
        del self.fleet.agents[scale.agents :]
        if scale.idle:
            (home / "state").mkdir()
            write(home / "state" / "journal.sqlite", drained(scale.agents, count), Reactor())
        self.fleet.context.set(zmq.MAX_SOCKETS, 4 * scale.agents + 100)
        self.client = TimedClient(home, timeout=START_S)  # which waits for a controller that starts
        self.submitter = Submitter(self.client, self.fleet, self.training, work)
        self.windows: list[Window] = []
        self.floor: list[float] = []  # with pauses, as commits have them
        self.floor_pressed: list[float] = []  # without
        self.mib_per_1000 = 0.0
        self.msgs_per_s = 0.0
        self.burst_cpu: dict[str, float] = {}
        self.burst_agents = self.burst_resends = 0
        self.search_restarts = 0

    async def run(self) -> None:
        scale = self.scale
        self._sound()
        self.fleet.start()
        async with self.client:
            await self._join()
            try:
                await self._measure(scale)
            finally:
                for part in self.idle:
                    part.end()
                await self.fleet.__aexit__()
        self._sound()

    def _sound(self) -> None:
        self.floor += syncs(self.base, pause_s=0.004)
        self.floor_pressed += syncs(self.base)

    async def _join(self) -> None:
        await self.client.cluster()
        await asyncio.sleep(1.0)
        controller = psutil.Process(self.fleet.process.pid)
        before = controller.memory_info().rss
        for part in self.idle:
            part.ask("open")
        await all_welcomed(self.idle, self.scale.idle)
        await self.fleet.join()
        await asyncio.sleep(1.5 + self.scale.idle / 250)  # until all connections are made
        grown = controller.memory_info().rss - before
        self.mib_per_1000 = grown / 2**20 / (self.scale.agents + self.scale.idle) * 1000

    async def _measure(self, scale: Scale) -> None:
        for work in (self.training.run(), echo(self.meter), self.submitter.keep(scale.jobs)):
            self.fleet.tasks.append(asyncio.create_task(work))
        self.submitter.open.set()
        report.now(f"{scale.agents} agents, the search as shipped")
        await asyncio.sleep(scale.warm_s)
        await self._block("shipped", scale.shipped_s)
        for kind in report.counted("block", scale.order, len(scale.order)):
            self.submitter.open.clear()
            await asyncio.sleep(0.2)
            await self.fleet.restart(**(FULL_SPEED if kind == "B" else IDLE))
            self.submitter.open.set()
            await asyncio.sleep(scale.settle_s)
            await self._block(kind, scale.block_s)
        report.now("a burst of events")
        await self._burst(scale.burst_s)

    async def _block(self, kind: str, seconds: float) -> None:
        before, used = await self.client.search(), self._cpu()
        window = Window(kind, time.monotonic())
        self.windows.append(window)
        self.meter.window = window
        await asyncio.sleep(seconds)
        self.meter.window = None
        window.took_s = time.monotonic() - window.began
        after = await self.client.search()
        window.cpu = {name: (now - used[name]) / window.took_s for name, now in self._cpu().items()}
        self._note(window, before, after)
        await asyncio.sleep(0.1)
        self.meter.match(window)
        for job, sent in self.submitter.sent.items():
            if sent >= window.began and job in self.meter.first_delta:
                window.plan.append(self.meter.first_delta[job] - sent)

    def _note(self, window: Window, before: SearchInfo, after: SearchInfo) -> None:
        window.generations_per_s = (after.generations - before.generations) / window.took_s
        changes = after.rescales + after.batch_changes - before.rescales - before.batch_changes
        window.rescales_per_s = changes / window.took_s
        self.search_restarts += after.restarts - before.restarts

    async def _burst(self, seconds: float) -> None:
        self.submitter.open.clear()
        self.training.frozen = True
        await asyncio.sleep(0.5)
        burst = self.meter.burst = Burst(self.training, self.meter)
        burst.begin()
        await asyncio.sleep(0.5)
        began, count, used = time.monotonic(), self.meter.committed, self._cpu()
        resent = self.meter.kinds["ResendEvents"]
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        self.msgs_per_s = (self.meter.committed - count) / took_s
        self.burst_cpu = {name: (now - used[name]) / took_s for name, now in self._cpu().items()}
        self.burst_resends = self.meter.kinds["ResendEvents"] - resent
        self.meter.burst = None
        self.burst_agents = len(burst.turns)

    def _cpu(self) -> dict[str, float]:
        controller = psutil.Process(self.fleet.process.pid)
        return {
            "bench": time.process_time(),
            "controller": cpu_s(controller),
            "search": cpu_s(searching(controller.pid)),
        }

    # --- what came of it

    def of(self, kind: str) -> list[Window]:
        return [window for window in self.windows if window.kind == kind]

    @property
    def faults(self) -> int:
        log = (self.fleet.home / LOG).read_text()
        return sum('"level": "error"' in line or "Traceback" in line for line in log.splitlines())


def pooled(windows: Sequence[Window], name: str) -> list[float]:
    return [sample for window in windows for sample in getattr(window, name)]


def figures_of(bench: Bench) -> dict[str, float]:
    every, idle, full = bench.windows, bench.of("A"), bench.of("B")
    outer, inner = [idle[0], idle[-1]], idle[1:-1]

    def ratio(name: str, above: Sequence[Window], below: Sequence[Window]) -> float:
        return report.quantile(pooled(above, name), 0.99) / report.quantile(
            pooled(below, name), 0.99
        )

    return {
        "agents": bench.scale.agents,
        "unaffected_frames": sum(bench.meter.stray.values()),
        "event_commit_p50_ms": ms(pooled(every, "event_commit"), 0.5),
        "event_commit_p99_ms": ms(pooled(every, "event_commit"), 0.99),
        "commit_delta_p50_ms": ms(pooled(every, "commit_delta"), 0.5),
        "commit_delta_p99_ms": ms(pooled(every, "commit_delta"), 0.99),
        "fdatasync_p99_ms": ms(bench.floor, 0.99),
        "plan_ms": ms(pooled(every, "plan"), 0.5),
        "plan_p99_ms": ms(pooled(every, "plan"), 0.99),
        "search_p99_ratio": ratio("event_delta", full, idle),
        "search_p99_ratio_control": ratio("event_delta", inner, outer),
        "msgs_per_s": bench.msgs_per_s,
        "mib_per_1000_agents": bench.mib_per_1000,
        "lag_p99_ms": ms(pooled(every, "lag"), 0.99),
    }


def show(bench: Bench, figures: dict[str, float], took_s: float) -> None:
    columns = ["search", "event to commit", "commit to delta", "event to delta", "plan", "own echo"]
    names = ["event_commit", "commit_delta", "event_delta", "plan", "lag"]
    kinds = {"shipped": "as shipped", "A": "idle (A)", "B": "full speed (B)"}
    groups = [(title, bench.of(kind)) for kind, title in kinds.items()]
    report.table(
        "p50 / p99 in ms (samples), by what the search does",
        columns,
        [(title, *(cell(pooled(windows, name)) for name in names)) for title, windows in groups],
    )
    report.table(
        "each block: p99 in ms, and the CPU that was used, in cores",
        [
            "block", "event to commit", "commit to delta", "own echo", "generations/s",
            "changes/s", "deltas/s", "events/s", "controller", "search", "bench",
        ],
        [
            (
                f"{number} {window.kind}",
                ms(window.event_commit, 0.99),
                ms(window.commit_delta, 0.99),
                ms(window.lag, 0.99),
                window.generations_per_s,
                window.rescales_per_s,
                len(window.arrivals) / window.took_s,
                len(window.event_commit) / window.took_s,
                *(window.cpu[name] for name in ("controller", "search", "bench")),
            )
            for number, window in enumerate(bench.windows)
        ],
    )  # fmt: skip
    early = sum(window.early for window in bench.windows)
    resends = sum(window.resends for window in bench.windows)
    kinds_seen = bench.meter.kinds
    beside: dict[str, str] = {
        "unaffected_frames": f"must be 0; of {kinds_seen['GroupDelta']} deltas, {kinds_seen['EventsCommitted']} commits",
        "event_commit_p99_ms": f"fdatasync p99 {figures['fdatasync_p99_ms']:.3g} ms",
        "commit_delta_p99_ms": f"own echo p99 {figures['lag_p99_ms']:.3g} ms; {early} read before the acknowledgement of their commit: 0",
        "fdatasync_p99_ms": f"p50 {ms(bench.floor, 0.5):.3g} ms, 4 KiB every 4 ms; without pauses "
        f"{ms(bench.floor_pressed, 0.5):.3g} / {ms(bench.floor_pressed, 0.99):.3g} ms",
        "search_p99_ratio": f"event to delta; idle against idle {figures['search_p99_ratio_control']:.3g}",
        "msgs_per_s": f"{bench.burst_agents} agents, {IN_FLIGHT} in flight each; cores: "
        + ", ".join(f"{name} {used:.2f}" for name, used in bench.burst_cpu.items()),
        "mib_per_1000_agents": f"from 0 to {bench.scale.agents} agents, 3 connections each",
    }
    report.table(
        "figures",
        ["key", "value", "beside it"],
        [(key, value, beside.get(key, "")) for key, value in figures.items()],
    )
    scale, submitter = bench.scale, bench.submitter
    print(  # noqa: T201
        f"{scale.agents} agents with {SLOTS} slots, {scale.jobs} jobs at once ({submitter.count} submitted, "
        f"{bench.training.finished} finished), blocks {scale.order} of {scale.block_s:g} s and one as "
        f"shipped of {scale.shipped_s:g} s, {os.cpu_count()} cores, {took_s:.0f} s in all; "
        f"{bench.training.recoveries} recoveries, {bench.search_restarts} restarts of the search, "
        f"{resends} resends asked for within blocks and {bench.burst_resends} in the burst, {bench.faults} errors in the controller's log; "
        f"frames {dict(kinds_seen)}"
    )
    for example in bench.meter.examples:
        print(f"stray: {example}")  # noqa: T201


def cell(samples: Sequence[float]) -> str:
    return f"{ms(samples, 0.5):.3g} / {ms(samples, 0.99):.3g} ({len(samples)})"


def main() -> None:
    chosen = report.arguments(
        __doc__,
        "fewer agents, shorter blocks",
        agents=(int, None, "default: 100, quick 40; jobs stay as many"),
    )
    began = time.monotonic()
    scale = QUICK if chosen.quick else FULL
    scale = replace(scale, agents=chosen.agents) if chosen.agents else scale
    with report.folder() as folder:
        bench = Bench(scale, folder)
        uvloop.run(bench.run())
        figures = figures_of(bench)
        show(bench, figures, time.monotonic() - began)
    report.write(figures, chosen.json)
    if not all(window.generations_per_s for window in bench.of("B")):
        sys.exit("the search was to evolve at full speed in each block B, and did not")


if __name__ == "__main__":
    main()
