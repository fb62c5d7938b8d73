"""The simulation and the live service: equal inputs at equal times lead to equal commands."""

from __future__ import annotations

import asyncio
import selectors
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from controlplane.core.commands import Command, RequestPlan, SendDelta
from controlplane.core.history import Record
from controlplane.core.inputs import (
    CancelRequested,
    ControllerStarted,
    Input,
    NodeGreeted,
    NodeLost,
    NodeReported,
    PlanProposed,
)
from controlplane.core.reactor import Reactor
from controlplane.journal.database import input_from
from controlplane.journal.reader import Reader
from controlplane.journal.replay import replay
from controlplane.policy.registry import make
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.planner.plan_coordinator import PlanCoordinator, PolicyObserver
from controlplane.service.planner.planner import InlinePlanner
from controlplane.service.worker_telemetry import TelemetryTable
from controlplane.sim.cluster import NodeGroup
from controlplane.sim.results import SimulationResult
from controlplane.sim.run import simulate
from controlplane.sim.scenario import Scenario
from schemas.codec import encode
from schemas.ids import NodeId, Seconds
from schemas.wire.agent import Quiesced, ScriptFailed, StoreOpened, Suspended
from tests.support import builders
from tests.support.world import Groups, Node

T = TypeVar("T")
Event = tuple[Seconds, Input, list[Command]]
POLICIES: Final = ("fifo", "tiresias", "ones", "slaq", "oasis", "drl", "harmony", "harmony-drl")
SAME: Final = 1e-6  # seconds between a timer of the loop and the moment that it was set for
SCENARIO: Final = Scenario(
    jobs=8, interval_s=20.0, nodes=(NodeGroup(count=4, slots=2),), crash_share=0.2,
    cancel_share=0.2, node_loss_s=500.0, node_back_s=60.0, latency_s=0.0, generations=1,
    warm_up=0.0,
)  # fmt: skip

CROWDED: Final = replace(  # some are rejected
    SCENARIO, utilities=True, knowledge="L3", jobs=16, interval_s=5.0
)


# --- a loop whose time is virtual, except that journals are awaited


class Selector(selectors.SelectSelector):
    """Does not wait for a timer but lets its time come; waits for a journal that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.writing = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.writing:
            return super().select(0 if timeout == 0 else None)
        if timeout is None:
            raise RuntimeError("nothing will ever happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run(work: Callable[[Loop], Coroutine[Any, Any, T]]) -> T:
    loop = Loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work(loop))


class Live(CommitLoop):
    """The service's commit loop with its journal, planner and news, in virtual time."""

    def __init__(
        self, journal: Path, loop: Loop, policy: str = "", moments: Sequence[float] = ()
    ) -> None:
        self.virtual = loop.virtual
        self.told: list[Event] = []
        self.orders: list[SendDelta] = []
        self._moments = sorted(moments)
        self._exact: Seconds | None = None
        self._written = asyncio.Event()
        super().__init__(journal, self._do, self._learn)
        self.plans = PlanCoordinator(self, loop.time)  # planning takes no virtual time
        self.observer: PolicyObserver | None = None
        if policy:
            planner = InlinePlanner(make(policy), self.plans.view_now, self.plans.propose)
            self.plans.planner = planner
            self.observer = PolicyObserver(self, planner, TelemetryTable())

    def now(self) -> Seconds:
        """The moment of the recording; a timer's rounding does not make it another one."""
        if self._exact is not None:
            return self._exact
        now = self.virtual.now
        place = bisect_left(self._moments, now)
        near = [m for m in self._moments[max(0, place - 1) : place + 1] if abs(m - now) < SAME]
        return Seconds(min(near, key=lambda moment: abs(moment - now), default=now))

    def handle(
        self, event: Input, before_effects: Callable[[], None] | None = None,
        after_effects: Callable[[list[Command]], None] | None = None,
    ) -> None:  # fmt: skip
        self.virtual.writing += 1
        super().handle(event, before_effects, partial(self._done, self.now(), event))

    async def at(self, when: float, *events: Input) -> None:
        """Let the time come, take `events` at once, and all that follows."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        if when > self.virtual.now:
            self._exact = None
            loop.call_at(when, come.set)
            await come.wait()
        self._exact = Seconds(when)
        for event in events:
            self.handle(event)
        while self.virtual.writing or self.plans.plan_requested:
            self._written.clear()
            if self.virtual.writing:  # by a thread, which a loop that turns would hold up
                await self._written.wait()
            else:
                await asyncio.sleep(0.0)

    def _done(self, now: Seconds, event: Input, commands: list[Command]) -> None:
        self.virtual.writing -= 1
        self._written.set()
        self.told.append((now, event, commands))

    def _do(self, command: Command) -> None:
        if isinstance(command, SendDelta):
            self.orders.append(command)
        if isinstance(command, RequestPlan):
            self.plans.request_plan()

    def _learn(self, record: Record) -> None:
        if self.observer is not None:
            self.observer.recorded(record)


@pytest.fixture(autouse=True)
def no_effect_fails() -> Iterator[None]:
    """The loop bears one that does, and says so; here that would hide what is compared."""
    with capture_logs() as said:
        yield
    assert [line["event"] for line in said if line["log_level"] == "error"] == []


# --- what was simulated


@cache
def simulated(policy: str) -> tuple[SimulationResult, tuple[Event, ...]]:
    found: list[Event] = []
    result = simulate(
        policy, CROWDED if policy == "oasis" else SCENARIO, 17,
        record=lambda now, event, commands: found.append((now, event, list(commands))),
    )  # fmt: skip
    return result, tuple(found)


def kinds(events: Sequence[Event]) -> Counter[type]:
    return Counter(
        type(event.event if isinstance(event, NodeReported) else event) for _, event, _ in events
    )


def apart(ours: Sequence[Event], theirs: Sequence[Event]) -> list[tuple[Event, Event]]:
    """The first pair that differs, so that a failure can be read."""
    return [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]][:1]


def test_the_compared_runs_contain_every_kind_of_event() -> None:
    seen = {policy: kinds(simulated(policy)[1]) for policy in POLICIES}

    for each in seen.values():
        assert each.keys() >= {CancelRequested, NodeLost, ScriptFailed, PlanProposed}
        assert each[NodeGreeted] > 4  # one came back
    assert Suspended in seen["tiresias"]
    assert StoreOpened in seen["ones"]
    assert any(Quiesced in each for each in seen.values())
    states = {ended.state for policy in POLICIES for ended in simulated(policy)[0].jobs}
    assert states == {"succeeded", "cancelled", "rejected"}


@pytest.mark.parametrize("policy", ["fifo", pytest.param("tiresias", marks=pytest.mark.slow)])
def test_the_live_service_plans_and_orders_like_the_simulation(policy: str, tmp_path: Path) -> None:
    _, events = simulated(policy)

    live = run(partial(_live_again, tmp_path / "journal.sqlite", policy, events))

    assert apart(live.told, events) == []
    assert live.told == list(events)


@pytest.mark.parametrize("policy", ["ones", "slaq", "oasis", "drl", "harmony-drl"])
def test_the_live_service_orders_like_a_simulated_search(policy: str, tmp_path: Path) -> None:
    _, events = simulated(policy)

    live = run(partial(_live_again, tmp_path / "journal.sqlite", "", events))

    assert apart(live.told, events) == []
    assert live.told == list(events)


async def _live_again(journal: Path, policy: str, events: Sequence[Event], loop: Loop) -> Live:
    """Feed what came from outside; with a policy, plans are the live service's own.

    What came between two plans at one moment came at once.
    """
    live = Live(journal, loop, policy, [now for now, _, _ in events])
    try:
        for (now, is_plan), found in groupby(events, lambda told: _place(told, policy)):
            await live.at(now, *[] if is_plan else [event for _, event, _ in found])
    finally:
        live.close()
    return live


def _place(told: Event, policy: str) -> tuple[float, bool]:
    now, event, _ = told
    return now, bool(policy) and isinstance(event, PlanProposed)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_of_a_simulation_replay_to_the_same_commands_and_state(policy: str) -> None:
    _, events = simulated(policy)
    stored = [(now, encode(event)) for now, event, _ in events]
    simulation, reactor, again = Reactor(), Reactor(), list[Event]()

    for now, event, _ in events:
        simulation.handle(event, now)
        assert simulation.due(now) == [], "a deadline passed"
    for now, body in stored:
        event = input_from(body)
        again.append((now, event, list(reactor.handle(event, now))))

    assert apart(again, events) == []
    assert reactor.state == simulation.state
    assert replay((now, input_from(body)) for now, body in stored).state == reactor.state


# --- the other way round


async def _live_run(journal: Path, policy: str, loop: Loop) -> Live:
    """Real agent cores around imaginary processes: a loss, a cancel, and jobs that go on."""
    live = Live(journal, loop, policy)
    processes = Groups()
    nodes = {name: Node(name, 2, processes) for name in (builders.N1, builders.N2)}
    try:
        await live.at(1.0, ControllerStarted(term=live.reactor.state.term, release="0"))
        for node in nodes.values():
            await _greet(live, node, 1.0)
        for number, name in enumerate("abcd"):
            await live.at(2.0 + number, builders.submission(name, slots=(1, 2), slots_wanted=2))
        for now in map(float, range(6, 60)):
            if now == 15:
                await live.at(now, builders.cancelled(builders.B))
            if now == 30:
                nodes[builders.N2].reboot()
                await live.at(now, NodeLost(node=builders.N2, silent_s=30.0))
            if now == 40:
                await _greet(live, nodes[builders.N2], now)
            for node in nodes.values():
                await _go_on(live, node, now, nodes)
    finally:
        live.close()
    return live


async def _greet(live: Live, node: Node, now: float) -> None:
    await live.at(now, node.hello())
    node.welcome(live.reactor.state.term, live.reactor.state.nodes[node.node].committed)


async def _go_on(live: Live, node: Node, now: float, nodes: Mapping[NodeId, Node]) -> None:
    orders, live.orders = live.orders, []
    for order in orders:
        nodes[order.node].receive(order.delta)
    node.go_on(epochs=8)
    known = live.reactor.state.nodes[node.node]
    said = node.said_after(known.committed if known.boot == node.boot else 0)
    await live.at(now, *said)


@pytest.mark.parametrize("policy", ["fifo", "tiresias"])
def test_the_journal_of_a_live_run_leads_to_the_same_commands(policy: str, tmp_path: Path) -> None:
    live = run(partial(_live_run, tmp_path / "journal.sqlite", policy))
    reader, reactor, again = Reader(tmp_path / "journal.sqlite"), Reactor(), list[Event]()
    phases: dict[str, str] = {}

    for now, event in reader.inputs():
        again.append((now, event, list(reactor.handle(event, now))))
        phases |= {name: job.phase.value for name, job in reactor.state.jobs.items()}
    reader.close()

    ended = Counter(phases.values())
    assert ended == {"succeeded": 3, "cancelled": 1}
    assert {PlanProposed, NodeLost, CancelRequested} <= kinds(again).keys()
    assert apart(again, live.told) == []
    assert again == live.told
    assert reactor.state == live.reactor.state
