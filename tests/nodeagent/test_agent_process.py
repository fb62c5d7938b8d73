"""The agent's own sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nodeagent.agent_process import Agent
from nodeagent.agent_settings import AgentSettings
from schemas.ids import BootId, Term
from schemas.link.key_files import write_keys
from schemas.messages.agent import Welcome


def welcome(log_port: int, event_port: int) -> Welcome:
    return Welcome(
        session="s", boot=BootId("b"), term=Term(1), committed=0,
        log_port=log_port, event_port=event_port,
    )  # fmt: skip


async def test_sockets_to_the_ports_of_a_former_controller_are_closed(tmp_path: Path) -> None:
    for name in ("server", "n1"):
        write_keys(tmp_path / "keys", name)
    agent = Agent(AgentSettings(node="n1", devices="cpu"), tmp_path)
    async with asyncio.TaskGroup() as agent._tasks:
        agent._welcomed(welcome(1, 2))
        former = (agent._bulk, agent._events)
        agent._welcomed(welcome(3, 4))
        present = (agent._bulk, agent._events)
        agent._bulk_receiving.cancel()
    closed = [socket._socket.closed for socket in (*former, *present)]
    agent._manager.close()
    agent._link.close()
    agent._workers._socket.context.destroy(linger=0)

    assert closed == [True, True, False, False]
