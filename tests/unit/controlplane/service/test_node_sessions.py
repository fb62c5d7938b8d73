"""Sessions with agents, between sockets in memory and a journal that commits when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from controlplane.core.commands import Command, SendDelta
from controlplane.core.desired_state import desired
from controlplane.core.inputs import Input, NodeGreeted, NodeReported, NodeSuspected, OrderTooLarge
from controlplane.core.model.job_phases import Phase
from controlplane.core.model.node import NodePhase
from controlplane.core.model.rescale import RescalePhase
from controlplane.service.node_sessions import UNDER_WAY, UNDER_WAY_SHARE, NodeSessions
from schemas.codec import FROM_AGENT, MAX_BYTES, TO_AGENT, encode
from schemas.host.logging import Audit
from schemas.ids import BootId, NodeId, Seconds, Term
from schemas.jobs import SecretEnv
from schemas.session import SessionTimings
from schemas.sweeps import MAX_EPOCH_METRICS
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire import Message
from schemas.wire.agent import (
    EventsCommitted,
    Heartbeat,
    HeartbeatAck,
    Hello,
    HelloRequest,
    Numbered,
    Refused,
    Resent,
    Welcome,
    WorkerSeen,
)
from schemas.wire.files import AskFiles
from tests.support import builders
from tests.support.builders import N1, N2, S0, T0, A
from tests.support.controller import Controller, cluster_of, running, training

Effect = Callable[[], None]


class Service:
    """Sessions of a controller that handles inputs at once; effects wait for `commit`."""

    def __init__(self, controller: Controller | None = None) -> None:
        self.controller = controller or cluster_of()
        self.reactor, self.state = self.controller.reactor, self.controller.state
        self.taken: list[Input] = []
        self._effects: list[Effect] = []
        self.sent: list[tuple[str, Message]] = []
        self.keys: dict[bytes, Identity] = {}
        self.taken_out: set[bytes] = set()
        orders = SimpleNamespace(send=self._send)
        self.sessions = NodeSessions(
            commit_loop=cast("Any", self), orders=cast("Any", orders), events=cast("Any", None),
            term=Term(1), timings=SessionTimings(), ports=(1, 2), on_steps=lambda _: None, on_stall=lambda _: None,
            on_usage=lambda _: None,
            audit=Audit(),
        )  # fmt: skip

    # --- the commit loop

    def now(self) -> Seconds:
        return Seconds(self.controller.now)

    def handle(self, event: Input, before_effects: Effect | None = None) -> list[Command]:
        self.taken.append(event)
        if before_effects is not None:
            self._effects.append(before_effects)
        return self.controller.take(event)

    async def commit(self) -> None:
        """Make all inputs durable, and run their effects."""
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def greeted(self) -> list[str]:
        return [event.node for event in self.taken if isinstance(event, NodeGreeted)]

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.taken]

    # --- agents

    def _send(self, route: bytes, data: bytes) -> bool:
        self.sent.append((route.decode(), TO_AGENT.decode(data)))
        return True

    def hear(self, message: Message, *, node: NodeId = N1, route: str = "") -> None:
        """An agent sends a message; its key is its node's name."""
        FROM_AGENT.decode(encode(message))
        frames, key = ((route or node).encode(), encode(message)), node.encode()
        if key not in self.taken_out:
            self.keys.setdefault(key, Identity("node", node))
        self.sessions._receive_message(Incoming(frames, self.keys.get(key), key, self.keys))

    def take_out(self, node: NodeId) -> None:
        """A reload without the node's key."""
        del self.keys[node.encode()]
        self.taken_out.add(node.encode())
        self.sessions.cut_off_revoked()

    def said(self) -> list[tuple[str, str]]:
        """Return the routes and kinds of the messages since the last call."""
        sent, self.sent = self.sent, []
        return [(route, type(message).__name__) for route, message in sent]

    async def greet(self, hello: Hello) -> None:
        self.hear(hello, node=hello.node)
        await self.commit()
        self.said()

    def judge(self, node: NodeId, now: Seconds) -> list[str]:
        """Return the inputs that follow from the silence of a node."""
        self.taken.clear()
        for other, session in self.sessions._to_check(now):
            if other == node:
                self.sessions._check_silence(node, session, now)
        return self.kinds()


def hello(
    node: NodeId = N1, *workers: WorkerSeen, boot: str = "boot-1", echo: str | None = "",
    run_id: str = "",
) -> Hello:  # fmt: skip
    return Hello(
        node=node, boot=BootId(boot), spec=builders.node_spec(node), workers=workers,
        events_sent=0, echo=echo, run_id=run_id,
    )  # fmt: skip


async def test_a_repeated_hello_is_answered_without_an_input() -> None:
    service = Service()
    await service.greet(hello())

    service.hear(hello(), route="another connection")

    assert service.said() == [("another connection", "Welcome")]
    assert service.greeted() == [N1]


async def test_events_lost_with_a_journal_are_skipped() -> None:
    service = Service(running())
    node = service.state.nodes[N1]
    has = builders.seen(A)
    returned = msgspec.structs.replace(hello(N1, has), events_sent=41, events_dropped=40)
    next_one = Numbered(node=N1, boot=node.boot, seq=41, event=builders.epoch_end(A, 1))

    service.hear(returned)
    await service.commit()
    welcome = service.sent[-1][1]
    service.hear(Resent(events=(next_one,)))
    await service.commit()

    assert isinstance(welcome, Welcome)
    assert welcome.committed == 40
    assert node.committed == 41
    assert service.state.job(A).progress.epoch == 1


async def test_dropped_events_in_the_journal_are_not_lost() -> None:
    service = Service(running())
    known = service.state.nodes[N1].committed
    assert known > 0

    service.hear(msgspec.structs.replace(hello(N1, builders.seen(A)), events_dropped=known))
    await service.commit()

    assert service.kinds() == ["NodeGreeted"]


async def test_a_hello_repeated_before_it_is_durable_is_answered_once() -> None:
    service = Service()
    service.hear(hello())
    service.hear(hello())
    service.hear(hello(), route="the newest connection")

    await service.commit()
    await service.commit()

    assert service.said() == [("the newest connection", "Welcome")]
    assert service.greeted() == [N1]


@pytest.mark.parametrize(
    "news", [hello(N1, builders.seen(A)), hello(boot="boot-2")], ids=["workers", "boot"]
)
async def test_a_changed_hello_becomes_an_input(news: Hello) -> None:
    service = Service()
    await service.greet(hello())

    service.hear(news)
    await service.commit()

    assert service.said() == [(N1, "Welcome")]
    assert service.greeted() == [N1, N1]


@pytest.mark.parametrize("echo", ["1.1", None], ids=["this release", "a release without echo"])
async def test_a_lost_node_is_greeted_after_it_returns_the_echo(echo: str | None) -> None:
    service = Service()
    await service.greet(hello(echo=echo and ""))
    service.controller.lose(N1)

    if echo is not None:
        service.hear(hello())
        assert service.sent == [(N1, HelloRequest(term=Term(1), echo=echo))]
    await service.greet(hello(echo=echo))

    assert service.greeted() == [N1, N1]
    assert service.state.nodes[N1].phase is NodePhase.UP


@pytest.mark.parametrize("phase", [NodePhase.SUSPECT, NodePhase.LOST])
async def test_a_node_that_cannot_receive_keeps_its_state(phase: NodePhase) -> None:
    service = Service()
    await service.greet(hello())
    node = service.state.nodes[N1]
    service.controller.take(NodeSuspected(node=N1, silent_s=6.0))
    if phase is NodePhase.LOST:
        service.controller.lose(N1)

    for workers in ((), (builders.seen(A),)):  # with news and without
        service.hear(hello(N1, *workers))
        service.hear(hello(N1, *workers, echo="a word of another time"))
        await service.commit()

    assert service.said() == [(N1, "HelloRequest")] * 4
    assert (service.greeted(), node.phase) == ([N1], phase)


async def test_an_echo_is_valid_once() -> None:
    service = Service()
    await service.greet(hello())
    for _ in range(2):
        service.controller.lose(N1)
        service.hear(hello(echo="1.1"))
        service.hear(hello(echo="1.1"))
        await service.commit()

    assert service.greeted() == [N1, N1]
    assert service.said() == [(N1, "HelloRequest"), (N1, "Welcome"), *[(N1, "HelloRequest")] * 2]


async def test_hellos_of_many_nodes_become_inputs_in_bounded_batches() -> None:
    service = Service()
    names = [NodeId(f"n{number}") for number in range(2 * UNDER_WAY + 5)]
    for name in (*names, *names):
        service.hear(hello(name), node=name)

    batches = []
    while len(service.sent) < len(names):
        batches.append(len(service.greeted()))
        await service.commit()

    assert batches == [UNDER_WAY, 2 * UNDER_WAY, len(names)]
    assert service.said() == [(name, "Welcome") for name in names]
    assert service.greeted() == list(names)


async def test_more_hellos_become_inputs_at_once_in_a_large_cluster() -> None:
    service = Service()
    for number in range(50 * UNDER_WAY_SHARE):
        service.hear(hello(name := NodeId(f"n{number}")), node=name)

    first = len(service.greeted())
    await service.commit()

    assert (first, len(service.greeted())) == (50, 100)


async def test_heartbeats_are_answered_while_hellos_wait() -> None:
    service = Service()
    await service.greet(hello())
    for number in range(UNDER_WAY + 1):
        name = NodeId(f"m{number}")
        service.hear(hello(name), node=name)

    service.hear(Heartbeat(session="1.1", events_sent=0))

    assert service.said() == [(N1, "HeartbeatAck")]


async def test_a_hello_of_a_former_boot_is_refused() -> None:
    service = Service()
    await service.greet(hello(boot="boot-1"))
    await service.greet(hello(boot="boot-2"))

    service.hear(hello(boot="boot-1"), route="the former one")

    refused = Refused(
        code="stale_boot", message="boot boot-1 of n1 was replaced by boot-2",
        hint="stop this agent, or give it its own name and key",
    )  # fmt: skip
    assert service.sent == [("the former one", refused)]
    assert service.greeted() == [N1, N1]


async def test_a_copied_agent_is_refused_while_the_first_is_heard() -> None:
    service = Service()
    await service.greet(hello(boot="boot-1", run_id="first"))

    service.hear(hello(boot="boot-2", run_id="copy"), route="the copy")

    assert service.sent[-1] == (
        "the copy",
        Refused(
            code="node_in_use", message="node n1 is used by another agent, boot boot-1",
            hint="stop this agent, or give it its own name and key",
        ),
    )  # fmt: skip
    await service.greet(hello(boot="boot-3", run_id="first"))  # the first one, restarted
    assert service.state.nodes[N1].boot == "boot-3"


async def test_an_agent_returns_once_the_other_that_took_its_place_is_silent() -> None:
    service = Service()
    await service.greet(hello(boot="boot-1"))
    await service.greet(hello(boot="boot-2"))
    session = service.sessions._sessions[N1]
    session.last_received_at = Seconds(
        session.last_received_at - service.sessions.timings.suspect_s
    )

    await service.greet(hello(boot="boot-1"))

    assert service.state.nodes[N1].boot == "boot-1"
    assert list(service.state.nodes[N1].former_boots) == ["boot-2"]


async def test_events_committed_together_are_acknowledged_together() -> None:
    service = Service(running())
    boot = service.state.nodes[N1].boot
    committed = service.state.nodes[N1].committed
    await service.greet(hello(N1, builders.seen(A), boot=boot))
    service.taken.clear()

    events = tuple(
        Numbered(node=N1, boot=boot, seq=committed + epoch, event=builders.epoch_end(A, epoch))
        for epoch in (1, 2, 3)
    )
    service.hear(Resent(events=events))
    await service.commit()

    assert [type(event) for event in service.taken] == [NodeReported] * 3
    assert service.sent == [(N1, EventsCommitted(boot=boot, through=committed + 3, term=Term(1)))]


async def test_excess_metrics_are_dropped_before_the_journal() -> None:
    service = Service(running())
    node = service.state.nodes[N1]
    await service.greet(hello(N1, builders.seen(A), boot=node.boot))
    seq, said = node.committed + 1, {f"m{number}": 0.5 for number in range(5000)}

    event = builders.epoch_end(A, 1, metrics=said)
    service.hear(Resent(events=(Numbered(node=N1, boot=node.boot, seq=seq, event=event),)))

    kept = builders.epoch_end(A, 1, metrics=dict(list(said.items())[:MAX_EPOCH_METRICS]))
    assert service.taken[-1] == NodeReported(node=N1, boot=node.boot, seq=seq, event=kept)


async def test_a_heartbeat_of_an_unknown_session_requests_a_hello() -> None:
    service = Service()
    await service.greet(hello())

    service.hear(Heartbeat(session="0.9", events_sent=0))
    service.hear(Heartbeat(session="1.1", events_sent=0))

    assert service.sent == [
        (N1, HelloRequest(term=Term(1), echo="1.1")),
        (N1, HeartbeatAck(session="1.1", term=Term(1), committed=0)),
    ]


# --- a key that is taken out

DENIED = Refused(
    code="denied", message="this key is no longer authorised", hint="ask an admin for a new key"
)


async def test_a_node_with_a_removed_key_is_refused_and_gets_no_orders() -> None:
    service = Service(running())
    boot = service.state.nodes[N1].boot
    await service.greet(hello(N1, builders.seen(A), boot=boot))
    await service.greet(hello(N2))
    heard_at = service.sessions._sessions[N1].last_received_at
    service.taken.clear()

    service.take_out(N1)

    assert service.sent == [(N1, DENIED)]
    service.hear(Heartbeat(session="1.1", events_sent=0))
    service.hear(hello(N1, builders.seen(A), boot="another"))
    service.hear(hello(N2), node=N2)
    assert service.said() == [(N1, "Refused")] * 3 + [(N2, "Welcome")]
    service.sessions.send(SendDelta(N1, builders.stop(A, 9)))
    assert not service.sessions.ask(N1, AskFiles(request="1", job=A))
    assert (service.sent, service.taken) == ([], [])
    assert service.sessions._sessions[N1].last_received_at == heard_at


async def test_a_waiting_hello_of_a_removed_key_starts_no_session() -> None:
    service = Service()
    service.hear(hello())

    service.take_out(N1)
    await service.commit()

    assert service.sent == []


async def test_a_node_with_a_restored_key_continues() -> None:
    service = Service()
    await service.greet(hello())
    service.take_out(N1)
    service.taken_out.clear()

    service.hear(Heartbeat(session="1.1", events_sent=0))
    service.hear(hello())

    assert service.said() == [(N1, "Refused"), (N1, "HelloRequest"), (N1, "Welcome")]


# --- silence


def broken_group() -> Controller:
    """A job on two nodes, whose member on the first says that the group broke, and stands still."""
    controller = training(cluster_of(n1=1, n2=1), S0, T0)
    controller.tell(N1, builders.broken(A, index=3, group=1, error="connection reset"))
    return controller


async def silent(controller: Controller, seconds: float) -> list[str]:
    """What is thought of nodes of which one spoke lately, and the other so long ago."""
    service = Service(controller)
    for name in (N1, N2):
        boot = controller.state.nodes[name].boot
        here = controller.state.slot_index.workers_on(name)
        workers = [builders.seen(job.job, rank=worker.rank) for job, worker in here]
        spec = controller.state.nodes[name].spec
        greeting = msgspec.structs.replace(hello(name, *workers, boot=boot), spec=spec)
        await service.greet(greeting)
    now = service.sessions._now()
    service.sessions._sessions[N2].last_received_at = Seconds(now - seconds)
    return [kind for name in (N1, N2) for kind in service.judge(name, now)]


async def test_a_silent_node_missed_by_peers_is_lost_early() -> None:
    controller = broken_group()
    controller.tell(N1, builders.quiesced(A, index=4, group=2))

    assert await silent(controller, 1.0) == []
    assert await silent(controller, 5.5) == ["NodeLost"]
    assert controller.state.nodes[N2].phase is NodePhase.LOST
    change = controller.job(A).change
    assert change is not None
    assert (change.phase, [m.slot for m in change.group.members]) == (RescalePhase.REJOINING, [S0])


async def test_a_silent_node_not_missed_by_peers_is_not_lost_early() -> None:
    assert await silent(training(cluster_of(n1=1, n2=1), S0, T0), 5.5) == []
    assert await silent(broken_group(), 5.5) == [], "those elsewhere do not stand still yet"
    assert await silent(training(cluster_of(n1=1, n2=1), S0, T0), 6.5) == ["NodeSuspected"]


async def test_a_fenced_node_is_lost_after_its_workers_exited() -> None:
    def fenced(fenced_s: float) -> Controller:
        controller = broken_group()
        controller.tell(N1, builders.quiesced(A, index=4, group=2))
        node = controller.state.nodes[N2]
        node.spec = msgspec.structs.replace(node.spec, fenced_s=fenced_s)
        return controller

    found = {
        (fenced_s, after): await silent(fenced(fenced_s), after)
        for fenced_s in (0.0, 42.0, 1e9, float("nan"), -1.0)
        for after in (5.5, 41.0, 43.0)
    }

    early = {(42.0, 5.5): ["NodeSuspected"], (42.0, 41.0): ["NodeSuspected"]}
    assert found == {key: early.get(key, ["NodeLost"]) for key in found}


async def test_silence_counts_from_the_start_of_the_controller() -> None:
    controller = running()
    controller.start()
    service = Service(controller)
    now = service.sessions._now()

    judged = {after: service.judge(N1, Seconds(now + after)) for after in (1.0, 29.0, 31.0)}

    assert judged == {1.0: [], 29.0: [], 31.0: ["NodeLost"]}  # it gets no work before its hello


async def test_a_suspected_node_that_is_heard_again_is_up() -> None:
    service = Service()
    await service.greet(hello())
    session, now = service.sessions._sessions[N1], service.sessions._now()
    session.last_received_at = Seconds(now - 7.0)
    assert service.judge(N1, now) == ["NodeSuspected"]

    session.last_received_at = now
    assert service.judge(N1, now) == ["NodeHeard"]


async def test_a_first_hello_under_way_is_not_silence() -> None:
    service = Service()
    service.hear(hello())

    assert service.judge(N1, service.sessions._now()) == []


async def test_new_timings_apply_to_known_and_new_nodes() -> None:
    service = Service()
    await service.greet(hello())

    service.sessions.use(SessionTimings(suspect_s=1.0, lost_s=2.0))
    said = service.said()
    await service.greet(hello(N2))

    found = {node: session.timings.lost_s for node, session in service.sessions._sessions.items()}
    assert found == {N1: 2.0, N2: 2.0}
    assert said == [(N1, "Welcome")]  # with its new pause between heartbeats


async def test_a_job_with_oversized_orders_fails() -> None:
    controller = running(args=("x" * MAX_BYTES,))  # of a release that took any job file
    service = Service(controller)
    await service.greet(msgspec.structs.replace(hello(), workers=(builders.seen(A),)))
    delta = desired(controller.state, controller.job(A), N1)
    size = len(encode(delta))

    service.sessions.send(SendDelta(N1, delta))
    await asyncio.sleep(0)

    assert service.said() == []
    failed = OrderTooLarge(job=A, node=N1, size=size, most=MAX_BYTES)
    assert service.taken[-1] == failed
    assert controller.job(A).phase is Phase.FAILED
    assert controller.job(A).reason == (
        f"orders for node n1 take {size} bytes, the limit is {MAX_BYTES}: "
        "move large args, env and choices into files in the working directory"
    )
    assert service.sessions._sessions[N1].outstanding == {}


def test_an_ended_job_does_not_fail_again() -> None:
    controller = running()
    controller.take(builders.cancelled(A))

    controller.take(OrderTooLarge(job=A, node=N1, size=5_000_000, most=MAX_BYTES))

    assert controller.job(A).phase is Phase.CANCELLED
    assert controller.replayed() == controller.state


async def test_values_of_secret_variables_are_added_when_a_delta_leaves() -> None:
    controller = running(secret_env=SecretEnv(names=("TOKEN",), id="f00d"))
    service = Service(controller)
    service.sessions.secrets = lambda spec: dict.fromkeys(spec.secret_names, "hunter2")
    await service.greet(msgspec.structs.replace(hello(), workers=(builders.seen(A),)))
    delta = desired(controller.state, controller.job(A), N1)

    service.sessions.send(SendDelta(N1, delta))

    sent = msgspec.structs.replace(delta, secrets={"TOKEN": "hunter2"})
    assert service.sent == [(N1, sent)]
