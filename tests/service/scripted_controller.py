"""A controller that only says what a test says, to real agents."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

import zmq

from nodeagent.__main__ import end_workers
from nodeagent.folders import NodeFolders
from nodeagent.job_folders import MARK
from schemas.codec import FROM_AGENT, PUBLISHED, encode
from schemas.ids import JobId, NodeId, Seconds, Term
from schemas.session import ControllerOutput, ControllerSession, Deliver, ToNode
from schemas.transport.keys import Identity, load_keys, write_keys
from schemas.transport.sockets import Link, Socket
from schemas.wire.agent import AgentEvent, GroupDelta, Hello, Numbered
from schemas.wire.sweeps import SweepDelta

LIMIT_S: Final = 60.0
TICK_S: Final = 0.25
SNAPSHOT: Final = "5" * 64
E = TypeVar("E", bound=AgentEvent)


@dataclass
class Node:
    """One node: its session with the controller, and what it told."""

    node: NodeId
    home: Path
    folders: NodeFolders
    session: ControllerSession
    process: subprocess.Popen[bytes] | None = None

    hello: Hello | None = None
    route: bytes = b""
    events: list[AgentEvent] = field(default_factory=list)

    def kill(self) -> None:
        """As kill -9 does; its workers go on."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class ScriptedController:
    """Sessions with a few agents; deltas go out as they are given."""

    def __init__(self, home: Path) -> None:
        self.home = home
        keys = home / "keys"
        self._known: dict[bytes, Identity] = {}
        write_keys(keys, "server")
        self._link = Link(load_keys(keys / "server.key_secret"))
        self.nodes: dict[NodeId, Node] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        authority = self._link.authority(self._known, lambda *_: None)
        self._orders = self._link.bind("ROUTER", "tcp://127.0.0.1:*")
        self._events = self._link.bind("SUB", "tcp://127.0.0.1:*")
        self._bulk = self._link.bind("ROUTER", "tcp://127.0.0.1:*")
        for work in (authority.run(), self._hear(), self._listen(), self._tick()):
            self._tasks.append(asyncio.create_task(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()
            await asyncio.to_thread(end_workers, node.folders, 0.0)
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)
        self._link.close()

    # --- nodes

    async def node(self, name: str, slots: int) -> Node:
        """An agent that is welcome."""
        pair = write_keys(self.home / "keys", name)
        self._known[pair.public] = Identity("node", name)
        home = self.home / name
        home.mkdir()
        folders = NodeFolders(home / "run", home / "work", home / "checkpoints")
        node = Node(NodeId(name), home, folders, ControllerSession(NodeId(name), Term(1)))
        self.nodes[node.node] = node
        await self.begin(node, slots)
        return node

    async def begin(self, node: Node, slots: int) -> None:
        """Start its agent, and wait until it has greeted."""
        file = node.home / "agent.toml"
        keys = self.home / "keys"
        file.write_text(
            f'node = "{node.node}"\nkey = "{keys}/{node.node}.key_secret"\n'
            f'devices = "cpu"\nslots = {slots}\n'
            f'[controller]\nagents = {_port(self._orders)}\nkey = "{keys}/server.key"\n'
        )
        node.hello = None
        node.process = _agent(file)
        await self.until(lambda: node.hello is not None, f"{node.node} greets")

    def lay_out(self, node: Node, job: JobId, **files: str) -> Path:
        """A job's working directory, as if it had been fetched."""
        folder = node.folders.job(job)
        folder.mkdir(parents=True)
        (folder / MARK).write_text(f"{SNAPSHOT}\n{{}}\n")
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    # --- what is said, and heard

    def order(self, node: Node, delta: GroupDelta | SweepDelta) -> None:
        """Until it is acknowledged."""
        self._do(node, node.session.order(delta, self._now()))

    async def until(self, there: Callable[[], bool], what: str) -> None:
        """Wait for something that is heard."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not there():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {LIMIT_S} s: {what}\n{self.said()}") from None

    async def heard(
        self, node: Node, kind: type[E], when: Callable[[E], bool] = lambda _: True
    ) -> E:
        """The first event of a kind that a node tells."""
        found: list[E] = []

        def there() -> bool:
            found[:] = [one for one in node.events if isinstance(one, kind) and when(one)]
            return bool(found)

        await self.until(there, f"{kind.__name__} of {node.node}")
        return found[0]

    def said(self) -> str:
        """For a test that fails."""
        parts = []
        for node in self.nodes.values():
            parts += [repr(event)[:200] for event in node.events]
            for folder in node.folders.workers():
                log = folder.path / "log"
                parts.append(log.read_text()[-1500:] if log.exists() else "")
        return "\n".join(parts)

    # --- how

    async def _hear(self) -> None:
        async for incoming in self._orders:
            message = FROM_AGENT.decode(incoming.frames[-1])
            assert incoming.identity is not None
            node = self.nodes[NodeId(incoming.identity.name)]
            node.route = incoming.route
            if isinstance(message, Hello):
                ports = (_port(self._bulk), _port(self._events))
                self._do(node, node.session.open_session(message, 0, self._now(), *ports))
                node.hello = message
            else:
                self._do(node, node.session.receive(message, self._now()))
            self._changed.set()

    async def _listen(self) -> None:
        async for incoming in self._events:
            message = PUBLISHED.decode(incoming.frames[-1])
            if isinstance(message, Numbered):
                node = self.nodes[message.node]
                self._do(node, node.session.receive_events([message], self._now()))
                self._changed.set()

    async def _tick(self) -> None:
        while True:
            for node in self.nodes.values():
                self._do(node, node.session.tick(self._now()))
            await asyncio.sleep(TICK_S)

    def _do(self, node: Node, outputs: list[ControllerOutput]) -> None:
        for output in outputs:
            match output:
                case ToNode(message=message):
                    self._orders.send(node.route, encode(message))
                case Deliver(numbered=numbered):
                    node.events.append(numbered.event)
                    self._do(node, node.session.acknowledge(numbered.seq))

    @staticmethod
    def _now() -> Seconds:
        return Seconds(asyncio.get_running_loop().time())


def _port(socket: Socket) -> int:
    endpoint = socket._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


def _agent(file: Path) -> subprocess.Popen[bytes]:
    with file.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "nodeagent", "--config", str(file)]
        return subprocess.Popen(command, stdout=log, stderr=log)
