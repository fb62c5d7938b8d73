"""Two controllers on loopback that share a lease, with agents, as processes of their own."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from controlplane.client import BlockingClient
from controlplane.service.standby.lease import Record
from controlplane.service.standby.lease_stores import open_store
from schemas.errors import OnesError
from tests.support.cluster import Cluster
from tests.support.commands import Finished, ones

HOSTS: Final = ("127.0.0.1", "127.0.0.2")
SETTLED_S: Final = 3.0  # longer than `silence_s`
LIMIT_S: Final = 60.0
NODE: Final = "node"  # host of the agents, for `at`
USER: Final = "user"  # host of clients
AGENT: Final = (sys.executable, "-P", "-m", "nodeagent")


class Standbys:
    """A cluster whose folder has one folder for each controller, and `client` for clients."""

    def __init__(
        self,
        folder: Path,
        lease: str,
        *,
        slots: int = 2,
        agents: int = 2,
        hosts: tuple[str, ...] = HOSTS,
        at: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """Make the folders. `at` is a context in which the processes of a host are started."""
        folder.mkdir(exist_ok=True)
        self.folder, self.lease, self.agents = folder, lease, agents
        self.hosts, self._at = hosts, at
        self.variables: dict[str, dict[str, str]] = {}  # of a process, by its name
        self.cluster = Cluster(folder / "client", folder / "jobs", slots=slots, agents=agents)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster.up()
        self.cluster.down()
        home = self.cluster.home
        shutil.rmtree(home / "state")
        both = ",".join(hosts)
        text = (home / "controller.toml").read_text(encoding="ascii")
        for host in hosts:
            own = folder / host
            (own / "run").mkdir(parents=True)
            shutil.copytree(home / "keys", own / "keys")
            shared = (
                f'\n[standby]\nlease = "{lease}"\nhosts = {list(hosts)}\nport = {_port(text) + 1}\n'
            )
            named = re.sub(r'host = ".*"', f'host = "{host}"', text)
            (own / "controller.toml").write_text(named + shared.replace("'", '"'), encoding="ascii")
        (home / "controller.toml").unlink()
        for path in home.glob("agent-*.toml"):
            agent = path.read_text(encoding="ascii")
            text = re.sub(r'host = ".*"', f'host = "{both}"', agent)
            path.write_text(
                f'{text}\n[jobs]\nrun_as = "agent"\ntrust_each_other = true\n', encoding="ascii"
            )
        client = home / "client.toml"
        port = client.read_text(encoding="ascii").rpartition(":")[2].strip().strip('"')
        ends = ",".join(f"tcp://{host}:{port}" for host in hosts)
        client.write_text(f'endpoint = "{ends}"\n', encoding="ascii")

    def start(self, host: str) -> None:
        """Start a controller."""
        self._start(host, "controlplane.service", self.folder / host / "controller.toml")

    def start_agents(self) -> None:
        """Start all agents."""
        for number in range(1, self.agents + 1):
            self._start(f"agent-{number}", "nodeagent", self.cluster.home / f"agent-{number}.toml")

    def _start(self, name: str, module: str, config: Path) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        command = [sys.executable, "-P", "-m", module, "--config", str(config)]
        with self._at(name if name in self.hosts else NODE):
            env = {**os.environ, **self.variables.get(name, {})}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        log.close()

    def kill(self, name: str, sign: int = signal.SIGKILL) -> None:
        """Kill a process and wait for its end, or send it another signal."""
        self.processes[name].send_signal(sign)
        if sign in {signal.SIGKILL, signal.SIGTERM}:
            self.processes.pop(name).wait(LIMIT_S)

    def until_said(self, name: str, text: str, times: int = 1) -> None:
        """Wait until the log of a process has a text."""
        path = self.folder / f"{name}.log"
        self.until(
            lambda: path.exists() and path.read_text().count(text) >= times, f"{name}: {text}"
        )

    def until(self, holds: Callable[[], Any], what: str = "") -> Any:
        """Wait until a condition holds, and return its value."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                if found := holds():
                    return found
            except OnesError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"{what}\n{self.said()}")

    def record(self) -> Record:
        """Return the record of the lease."""

        async def read() -> Record:
            store = open_store(self.lease, "ones", self.folder)
            try:
                return (await store.read()).record
            finally:
                await store.close()

        with self._at(USER):
            return asyncio.run(read())

    def until_complete(self) -> None:
        """Wait until the record has listed both controllers for `SETTLED_S`.

        A controller that was killed or cut off stays listed for `silence_s`.
        """
        since = time.monotonic()

        def lasts() -> bool:
            nonlocal since
            if self.record().complete != self.hosts:
                since = time.monotonic()
            return time.monotonic() - since > SETTLED_S

        self.until(lasts, "complete")

    def client(self) -> BlockingClient:
        """Return a client that knows both controllers."""
        with self._at(USER):
            return BlockingClient(self.cluster.home)

    def ones_on(self, host: str, *arguments: str) -> Finished:
        """Run `ones` with the settings of a controller."""
        return ones(*arguments, "--of", str(self.folder / host), limit_s=LIMIT_S)

    def term(self) -> int:
        """Return the term of the active controller."""
        with self.client() as client:
            return client.cluster().term

    def said(self) -> str:
        """Return the end of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in logs)

    def end(self) -> None:
        """End all processes, and those of jobs."""
        for name in list(self.processes):
            self.kill(name, signal.SIGCONT)
            self.kill(name, signal.SIGTERM)
        for config in self.cluster.home.glob("agent-*.toml"):
            command = [*AGENT, "--config", str(config), "--end-workers"]
            subprocess.run(command, check=True, capture_output=True)


def _port(text: str) -> int:
    return max(int(port) for port in re.findall(r"= (\d{4,5})", text))


@contextmanager
def standbys(folder: Path, lease: str, **how: Any) -> Iterator[Standbys]:
    """Run a cluster with two controllers; both are up and complete at the start."""
    made = Standbys(folder, lease, **how)
    try:
        made.start(made.hosts[0])
        made.until_said(made.hosts[0], "controller ready")
        made.start(made.hosts[1])
        made.until_complete()
        made.start_agents()
        yield made
    finally:
        made.end()
