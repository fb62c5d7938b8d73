"""An agent's end of the conversation with the controller: sockets and sessions, nothing behind it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import zmq.asyncio

from nodeagent.devices import cpu_slots
from schemas.codec import TO_AGENT, encode
from schemas.ids import BootId, NodeId, Seconds
from schemas.nodes import NodeSpec
from schemas.session import AgentOutput, AgentSession, Apply, Publish, SendHello, ToController
from schemas.transport.keys import KeyPair
from schemas.transport.sockets import Link, Socket
from schemas.wire.agent import AgentEvent, GroupDelta, Hello, Numbered, ToAgent, Welcome, WorkerSeen

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

    def open(self, context: zmq.asyncio.Context) -> None:
        """Connect; all agents share the threads of one context."""
        self.link = Link(self.keys)
        self.link.close()  # its own context, which has no socket yet
        self.link._context = context
        self.session = AgentSession(self.node, BootId("boot"), chance=random.random)
        self.orders = self._connect("DEALER", "agents")
        self.events = self._connect("PUB", "events")
        self.spec = NodeSpec(
            node=self.node,
            host="simulated",
            address="127.0.0.1",
            slots=cpu_slots(self.slots),
            cores=self.slots,
            memory_bytes=1,
            release="test",
        )

    def _connect(self, kind: str, port: str) -> Socket:
        return self.link.connect(kind, f"tcp://127.0.0.1:{self.ports[port]}", self.server_key)

    async def listen(self) -> None:
        async for incoming in self.orders:
            at = time.monotonic()
            message = TO_AGENT.decode(incoming.frames[-1])
            self.frames[type(message).__name__] += 1
            self.watch.heard(self, message, at)
            self.do(self.session.receive(message, self.now()))
            if isinstance(message, Welcome):
                self.welcomed.set()

    async def live(self) -> None:
        while True:
            self.do(self.session.tick(self.now()))
            await asyncio.sleep(0.1)

    def happen(self, event: AgentEvent) -> None:
        self.do(self.session.record_event(event))

    def do(self, outputs: list[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self.orders.send(encode(message))
                case Publish(numbered=numbered):
                    self.watch.published(self, numbered, time.monotonic())
                    self.events.send(self.node.encode(), encode(numbered))
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
            node=self.node,
            boot=BootId("boot"),
            spec=self.spec,
            workers=self.seen(),
            events_sent=self.session.sent,
            echo=self.session.echo,
        )

    async def delta(self, count: int) -> GroupDelta:
        """The delta of that number, when it is here."""
        while len(self.deltas) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)
        return self.deltas[count - 1]

    @staticmethod
    def now() -> Seconds:
        return Seconds(asyncio.get_running_loop().time())
