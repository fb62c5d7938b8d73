"""An agent whose words arrive and which hears nothing, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq.asyncio

from controlplane.client import Client
from schemas.ids import Seconds
from schemas.session import AgentOutput, AgentSession, SessionTimings
from schemas.wire.agent import Hello, ToSession
from tests.support.fleet import Fleet, SimulatedAgent

pytestmark = pytest.mark.slow  # a cluster or devices of its own

LIMIT_S = 60.0
QUICK = SessionTimings(heartbeat_s=0.1, suspect_s=0.5)


class DeafSession(AgentSession):
    """While it is deaf nothing that arrives is taken."""

    deaf = False

    def receive(self, message: ToSession, now: Seconds) -> list[AgentOutput]:
        return [] if self.deaf else super().receive(message, now)


class Deaf(SimulatedAgent):
    """One that greets without a pause."""

    hellos = 0

    def open(self, context: zmq.asyncio.Context) -> None:
        super().open(context)
        self.session = DeafSession(self.node, self.session.boot, QUICK)

    def hello(self) -> Hello:
        self.hellos += 1
        self.session.unheard(self.now())
        return super().hello()


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not found():
            await asyncio.sleep(0.01)


async def test_a_lost_node_that_cannot_receive_stays_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONES__SILENCE__SUSPECT_S", "1.0")
    monkeypatch.setenv("ONES__SILENCE__LOST_S", "1.5")
    heard: list[str] = []

    async def follow(client: Client) -> None:
        async for event in client.events(follow=True):
            heard.extend([event.event] * (event.node is not None))

    async with Fleet(tmp_path, 1, make=Deaf) as fleet, Client(tmp_path) as client:
        (agent,) = fleet.agents
        assert isinstance(agent, Deaf)
        assert isinstance(agent.session, DeafSession)
        fleet.tasks.append(asyncio.create_task(follow(client)))
        agent.session.deaf = True
        await until(lambda: "node.lost" in heard)
        said = agent.hellos
        await until(lambda: agent.hellos >= said + 10)
        deaf = list(heard)
        agent.session.deaf = False
        await until(lambda: "node.up" in heard)

    assert deaf == ["node.joined", "node.suspect", "node.lost"]
