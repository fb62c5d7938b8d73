"""A real agent whose key ends while its session is open: by a revocation, or by the time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controlplane.core.model.node import NodePhase
from controlplane.service import keys as key_table
from controlplane.service import settings
from controlplane.service.app import _timings
from nodeagent.app import Agent
from nodeagent.settings import AgentSettings, Controller
from schemas.ids import JobId
from schemas.transport.keys import Identity
from schemas.wire.agent import NodeHealth
from schemas.wire.files import AskFiles
from tests.support.builders import N1
from tests.support.service import House, served, until

pytestmark = pytest.mark.slow
QUIET = "[silence]\nsuspect_s = 1.5\nlost_s = 2.0\n"  # heartbeats are a second apart


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(key_table, "LOOK_S", 0.01)
    async with served(tmp_path) as made:
        yield made


@pytest.fixture
async def agent(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agent]:
    async def needs_no_torch(_: Agent) -> None:
        return

    monkeypatch.setattr(Agent, "_warm_up", needs_no_torch)
    there = Controller(agents=house.ports["agents"])
    made = Agent(
        AgentSettings(node="n1", devices="cpu", controller=there, disk_reserve_bytes=0), tmp_path
    )
    stop = asyncio.Event()
    running = asyncio.create_task(made.run(stop))
    yield made
    stop.set()
    await running
    made._workers.close()


def revoke(house: House, _: pytest.MonkeyPatch) -> None:
    house.controller._keys.revoke(N1, "root")


def expire(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, public = house.controller._keys, house.keys[N1].public
    ends = keys._clock() + 3600.0
    keys.reload({**keys._listed, public: Identity("node", N1, (), ends)})
    monkeypatch.setattr(keys, "_clock", lambda: ends)
    monkeypatch.setattr(keys.known, "_clock", lambda: ends)


@pytest.mark.parametrize("end", [revoke, expire])
async def test_a_nodes_open_session_ends_with_its_key(
    end: Callable[[House, pytest.MonkeyPatch], None],
    house: House,
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = house.controller
    await until(lambda: N1 in controller._state().nodes)
    agent._record_event(NodeHealth(problems=("work: full",)))
    await until(lambda: bool(controller._state().nodes[N1].problems))
    assert controller._node_sessions.ask(N1, AskFiles(request="1", job=JobId("a-1")))

    with capture_logs() as said:
        end(house, monkeypatch)
        await until(lambda: any("refused this node" in line["event"] for line in said))
        agent._record_event(NodeHealth(problems=()))
        house.file.write_text(f'{house.settings}[policy]\nname = "fifo"\n{QUIET}')
        controller._node_sessions.use(_timings(settings.load(house.file)))
        await until(lambda: controller._state().nodes[N1].phase is NodePhase.LOST)

    assert controller._state().nodes[N1].problems == ("work: full",), (
        "what it said since is nothing"
    )
    assert not controller._node_sessions.ask(N1, AskFiles(request="2", job=JobId("a-1")))
