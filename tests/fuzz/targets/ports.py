"""Open ports of a running controller and agent, to which strangers and holders of keys send anything.

The servers are the real ones, on TCP and Unix sockets of this process. After each input, each of them
answers a client that keeps to the protocol, and no task has ended or logged a fault.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, Final

import structlog

from nodeagent.connections import WorkerChannel
from schemas.codec import (
    FROM_AGENT,
    FROM_SHIPPER,
    FROM_WORKER,
    PUBLISHED,
    READ_LOG,
    REQUEST,
    TO_STATES,
    encode,
)
from schemas.host.metrics_server import MetricsServer
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.transport.sockets import ThreadDealer
from schemas.transport.state_transfer import MemoryTarget, StateServer, fetch_state
from schemas.wire.client import Cluster, GetCluster
from schemas.wire.files import AskState
from schemas.wire.worker import Reported, WorkerHello
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import hostile_bytes
from tests.fuzz.targets.controller import FAULTS, KNOWN
from tests.fuzz.targets.folders import base
from tests.support.schemas_links import GREETING, READY, HeldLink, connected, framed, free_address
from tests.support.service import House, Person, served

LIMIT_S: Final = 10.0
KEPT: Final = 50  # connections that stay open
KEYED: Final = {
    "clients": ("ann", "DEALER", REQUEST), "followers": ("bob", "DEALER", READ_LOG),
    "agents": ("n1", "DEALER", FROM_AGENT), "events": ("n1", "PUB", PUBLISHED),
    "shippers": ("n1", "DEALER", FROM_SHIPPER),
}  # fmt: skip
ENCRYPTED: Final = GREETING.replace(b"NULL\0", b"CURVE")
HELLO_COMMAND: Final = b"\x04\xc8\x05HELLO\x01\x00"  # the rest of its 200 bytes are zeros
HTTP: Final = b"GET /metrics HTTP/1.1\r\n"
JOB: Final = JobId("s-3")
WORKER: Final = WorkerId("a-1.v1.r0")
TOKEN: Final = "a" * 64
_numbers = itertools.count(1)


class Site:
    """The servers, and a client of each that keeps to the protocol."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.faults: list[str] = []
        self._stack = AsyncExitStack()
        self._open: list[asyncio.StreamWriter] = []
        structlog.configure(processors=[self._note])
        self.loop.set_exception_handler(lambda _, context: self.faults.append(repr(context)))
        self.loop.run_until_complete(self._start())
        atexit.register(self.close)

    async def _start(self) -> None:
        folder = base() / "ports"
        folder.mkdir()
        self.house: House = await self._stack.enter_async_context(served(folder))
        self.states = StateServer("127.0.0.1", lambda _: "key", lambda _: [b"a state"])
        self.reported: asyncio.Queue[int] = asyncio.Queue()
        self._socket = f"{folder}/workers"
        self._channel = WorkerChannel(f"ipc://{self._socket}", self._take, {WORKER: TOKEN}.get)
        self._metrics = int(free_address().rpartition(":")[2])
        metrics = MetricsServer(lambda _: (b"", ""))
        await self._stack.enter_async_context(metrics.served("127.0.0.1", self._metrics))
        parts = (self._channel.receive(), self._channel.watch())
        self._tasks = [asyncio.create_task(part) for part in parts]
        self._root = Person(self.house, self.house.keys["root"])
        await connected(self._root.requests)
        self._worker = ThreadDealer(f"ipc://{self._socket}")
        self._links = {name: HeldLink(self.house.keys[name]) for name in ("ann", "bob", "n1")}
        self.keyed = {
            port: self._links[name].connect(
                kind, f"tcp://127.0.0.1:{self.house.ports[port]}", self.house.keys["server"].public
            )
            for port, (name, kind, _) in KEYED.items()
        }

    def _note(self, logger: Any, method: str, event: dict[str, Any]) -> Any:
        if event["event"] in FAULTS:
            self.faults.append(repr(event))
        raise structlog.DropEvent

    def _take(self, worker: WorkerId, message: object) -> None:
        if isinstance(message, Reported):
            self.reported.put_nowait(message.count)

    async def connect(self, port: str) -> asyncio.StreamWriter:
        """Open a connection, and close the oldest that is still open."""
        ports = {**self.house.ports, "states": self.states.port, "metrics": self._metrics}
        opening: Any = (
            asyncio.open_unix_connection(self._socket)
            if port == "workers"
            else asyncio.open_connection("127.0.0.1", ports[port])
        )
        _, writer = await opening
        self._open.append(writer)
        if len(self._open) > KEPT:
            self._open.pop(0).transport.abort()
        return writer  # type: ignore[no-any-return]

    async def check(self) -> None:
        """Every server answers, and none has a fault."""
        assert isinstance(await self._root.ask(GetCluster()), Cluster)
        asked = AskState(job=JOB, trial=0, version=1, digest="", offset=0)
        where, whole = [self.states.address], MemoryTarget()
        await asyncio.to_thread(fetch_state, where, asked, "key", whole, lambda: None)
        assert whole.content == b"a state"
        await self._worker_is_heard()
        assert all(not task.done() for task in self._tasks)
        assert not self.faults, self.faults.pop()

    async def _worker_is_heard(self) -> None:
        number = next(_numbers)
        own: dict[str, Any] = {"job": JobId("a-1"), "version": Version(1), "rank": Rank(0)}
        while True:  # again, if the connection was ended with all others
            self._worker.send(encode(WorkerHello(**own, pid=1, token=TOKEN)))
            self._worker.send(encode(Reported(**own, count=number)))
            with contextlib.suppress(TimeoutError):
                while await asyncio.wait_for(self.reported.get(), 1.0) != number:
                    pass
                return

    def close(self) -> None:
        """Stop the servers."""

        async def stop() -> None:
            for writer in self._open:
                writer.transport.abort()
            for task in self._tasks:
                task.cancel()
            for link in self._links.values():
                link.close()
            self._root.close()
            self._worker.close()
            await self._stack.aclose()

        self.states.close()
        self.loop.run_until_complete(stop())


@cache
def _site() -> Site:
    return Site()


def ports(data: bytes) -> None:
    """Bytes of strangers and messages of holders of keys leave each server serving."""
    site, choices = _site(), Choices(data)

    async def talk() -> None:
        async with asyncio.timeout(LIMIT_S):
            for _ in range(1 + choices.below(5)):
                await (_say_with_a_key if choices.flag() else _say_raw)(site, choices)
            await site.check()

    site.loop.run_until_complete(talk())


async def _say_with_a_key(site: Site, choices: Choices) -> None:
    port = choices.pick(tuple(KEYED))
    body = hostile_bytes(choices, KEYED[port][2].tags, KNOWN)
    before = [choices.take(choices.below(8)) for _ in range(choices.below(4))]
    socket = site.keyed[port]
    socket.send(*before, body)
    # Unread answers would fill the memory of this process. A socket may be readable without a message.
    with contextlib.suppress(TimeoutError):
        while KEYED[port][1] == "DEALER" and await socket._socket.poll(0):
            await asyncio.wait_for(socket.receive(), 1.0)


async def _say_raw(site: Site, choices: Choices) -> None:
    port = choices.pick(("workers", "states", "metrics", *site.house.ports))
    writer = await site.connect(port)
    writer.write(choices.pick((GREETING + READY, ENCRYPTED, HTTP, GREETING, b"")))
    tags = TO_STATES.tags if port == "states" else FROM_WORKER.tags
    frame: Callable[[], bytes] = lambda: framed(choices.below(8), hostile_bytes(choices, tags))  # noqa: E731
    blob: Callable[[], bytes] = lambda: choices.take(choices.below(64))  # noqa: E731
    hello: Callable[[], bytes] = lambda: HELLO_COMMAND + choices.take(64).ljust(192, b"\0")  # noqa: E731
    for _ in range(choices.below(6)):
        writer.write(choices.pick((frame, frame, blob, hello))())
        if choices.flag():
            await asyncio.sleep(0)
    if choices.flag():
        writer.transport.abort()
