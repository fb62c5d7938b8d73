"""A real controller process with many simulated agents: sockets and sessions, no processes.

A `SimulatedAgent` has the conversation and nothing behind it. A `TrainingAgent` has the real
reconciler behind it, and workers that do what the training library does about their orders; what their
collective operations would tell them, they learn from the `Training` that they share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import zmq.asyncio

from controlplane.cli.local import ROLES, _free_ports
from schemas.ids import NodeId
from schemas.transport.keys import KeyPair, write_keys
from tests.support.simulated_agent import SimulatedAgent

JOINING_S: Final = 30.0
LOG: Final = "controller.log"
Make = Callable[[NodeId, KeyPair, bytes, dict[str, int]], SimulatedAgent]


class Fleet:
    """One controller process and `count` simulated agents.

    Args:
        home: its folder.
        count: of agents.
        policy: of the controller.
        options: of the policy.
        make: the agents.
    """

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
        for agent in self.agents:
            agent.open(self.context)
            self.tasks.append(asyncio.create_task(agent.listen()))
            self.tasks.append(asyncio.create_task(agent.live()))
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
