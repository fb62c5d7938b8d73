"""A real controller process with many simulated agents: sockets and sessions, no processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from controlplane.cli.local import ROLES, _free_ports
from nodeagent.devices import cpu_slots
from schemas.cluster import NodeSpec
from schemas.codec import TO_AGENT, encode
from schemas.ids import BootId, NodeId, Seconds
from schemas.link import KeyPair, Link, Wire, write_keys
from schemas.messages.agent import AgentEvent, GroupDelta, Hello
from schemas.session import AgentOutput, AgentSession, Apply, Publish, SayHello, ToController


@dataclass
class SimulatedAgent:
    """The agent's end of the conversation, with nothing behind it."""

    node: NodeId
    keys: KeyPair
    server_key: bytes
    ports: dict[str, int]
    frames: Counter[str] = field(default_factory=Counter)
    deltas: list[GroupDelta] = field(default_factory=list)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.link = Link(self.keys)
        self.session = AgentSession(self.node, BootId("boot"))
        self.orders = self._connect("DEALER", "agents")
        self.events = self._connect("PUB", "events")

    def _connect(self, kind: str, port: str) -> Wire:
        return self.link.connect(kind, f"tcp://127.0.0.1:{self.ports[port]}", self.server_key)

    async def listen(self) -> None:
        async for incoming in self.orders:
            message = TO_AGENT.decode(incoming.frames[-1])
            self.frames[type(message).__name__] += 1
            self.do(self.session.receive(message, self.now()))
            if self.session.session:
                self.welcomed.set()

    async def live(self) -> None:
        while True:
            self.do(self.session.tick(self.now()))
            await asyncio.sleep(0.1)

    def happen(self, event: AgentEvent) -> None:
        self.do(self.session.happened(event))

    def do(self, outputs: list[AgentOutput]) -> None:
        for output in outputs:
            match output:
                case ToController(message=message):
                    self.orders.send(encode(message))
                case Publish(numbered=numbered):
                    self.events.send(self.node.encode(), encode(numbered))
                case SayHello():
                    self.orders.send(encode(self.hello()))
                case Apply(delta=delta):
                    self.deltas.append(delta)
                    self.news.set()

    def hello(self) -> Hello:
        spec = NodeSpec(
            node=self.node,
            host="simulated",
            address="127.0.0.1",
            slots=cpu_slots(1),
            cores=1,
            memory_bytes=1,
            release="test",
        )
        return Hello(
            node=self.node,
            boot=BootId("boot"),
            spec=spec,
            workers=(),
            events_sent=self.session.sent,
        )

    async def delta(self, count: int) -> GroupDelta:
        """The delta of that number, when it is here."""
        while len(self.deltas) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 20)
        return self.deltas[count - 1]

    @staticmethod
    def now() -> Seconds:
        return Seconds(asyncio.get_running_loop().time())


class Fleet:
    """One controller process and `count` simulated agents."""

    def __init__(self, home: Path, count: int) -> None:
        server = write_keys(home / "keys", "server")
        ports = dict(zip(ROLES, _free_ports(len(ROLES)), strict=True))
        authorised, self.agents = [], []
        for role, name in [("admin", "admin"), *(("node", f"n{i}") for i in range(count))]:
            keys = write_keys(home / "keys", name)
            public = keys.public.decode()
            authorised.append(f'[[key]]\npublic = "{public}"\nname = "{name}"\nrole = "{role}"\n')
            if role == "node":
                self.agents.append(SimulatedAgent(NodeId(name), keys, server.public, ports))
        listed = home / "keys" / "authorised.toml"
        listed.write_text("\n".join(authorised))
        listed.chmod(0o600)
        listen = "\n".join(f"{role} = {port}" for role, port in ports.items())
        (home / "controller.toml").write_text(f"[listen]\n{listen}\n")
        (home / "client.toml").write_text(f'endpoint = "tcp://127.0.0.1:{ports["clients"]}"\n')
        self.home = home
        self.tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        self.process = subprocess.Popen(  # noqa: ASYNC220 - it must outlive this call
            [
                sys.executable,
                "-m",
                "controlplane.service",
                "--config",
                self.home / "controller.toml",
            ],
            stderr=subprocess.DEVNULL,
        )
        for agent in self.agents:
            self.tasks.append(asyncio.create_task(agent.listen()))
            self.tasks.append(asyncio.create_task(agent.live()))
        waits = [agent.welcomed.wait() for agent in self.agents]
        await asyncio.wait_for(asyncio.gather(*waits), 30)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for agent in self.agents:
            agent.link.close()
        self.process.terminate()
        self.process.wait(10)
