"""Connections to the controller (orders, events, bulk traffic) and to this node's workers.

The settings name only the controller's port for orders. Its welcome names the other ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from nodeagent import job_folders, settings
from nodeagent.errors import NodeWorkspaceError, WorkspaceError, log_errors
from nodeagent.folders import PASSABLE, NodeFolders
from nodeagent.logs import LogShipper
from nodeagent.process_identity import start_ticks
from nodeagent.streams import JobStreams
from schemas.codec import FROM_WORKER, TO_SHIPPER, encode
from schemas.errors import OnesError
from schemas.host.logging import Audit
from schemas.ids import NodeId, WorkerId, worker_id
from schemas.transport.keys import ServerKeys
from schemas.transport.sockets import PATIENT_RECONNECT_MS, Incoming, Link, Socket
from schemas.wire import Message
from schemas.wire.agent import GroupDelta, Welcome
from schemas.wire.feed import GetSnapshot, LogStored, SnapshotPiece
from schemas.wire.files import AskFiles, AskPiece
from schemas.wire.worker import FromWorker, GroupOrder, WorkerHello

RETRY_S: Final = 2.0  # a request without a reply is repeated after this time
MAX_READERS: Final = 4  # concurrent reads of jobs' files
MAX_LOGGED_NAME: Final = 200  # characters, in a log line
MAX_QUEUED: Final = 1000  # messages queued for a worker that does not read
MAX_WORKER_MESSAGE_BYTES: Final = 16 << 10  # bytes of a message from a worker: hints and telemetry


@dataclass(slots=True)
class _Fetch:
    digest: str
    offset: int = 0
    pieces: asyncio.Queue[SnapshotPiece] = field(default_factory=asyncio.Queue)


class SnapshotFetcher:
    """Downloader of archived working directories, which the log relay sends piece by piece."""

    def __init__(self) -> None:
        self._socket: Socket | None = None
        self._fetches: list[_Fetch] = []  # several jobs may need the same archive
        self._connected = asyncio.Event()

    def use(self, socket: Socket) -> None:
        """Use this socket to the log relay from now on. The caller closes it."""
        self._socket = socket
        self._connected.set()

    def receive(self, message: SnapshotPiece) -> None:
        """Pass a piece to every download that waits for this archive and offset."""
        for fetch in self._fetches:
            if fetch.digest == message.digest and fetch.offset == message.offset:
                fetch.pieces.put_nowait(message)

    async def fetch(self, digest: str, target: Path) -> None:
        """Download the archive with this SHA-256 to `target`.

        Raises:
            WorkspaceError: if the controller does not have the archive or the disk cannot store it.
        """
        fetch = _Fetch(digest)
        self._fetches.append(fetch)
        try:
            with target.open("wb") as file:
                total = 1
                while file.tell() < total:
                    piece = await self._piece(fetch, file.tell())
                    total = piece.total
                    if total < 0:
                        raise WorkspaceError(f"the controller has no snapshot {digest[:12]}")
                    file.write(piece.data)
        except OSError as error:
            raise NodeWorkspaceError(f"cannot store a snapshot: {error.strerror}") from None
        finally:
            self._fetches.remove(fetch)

    async def _piece(self, fetch: _Fetch, offset: int) -> SnapshotPiece:
        fetch.offset = offset
        while True:
            await self._connected.wait()
            if self._socket is not None:
                self._socket.send(encode(GetSnapshot(digest=fetch.digest, offset=offset)))
            with contextlib.suppress(TimeoutError):
                while True:
                    piece = await asyncio.wait_for(fetch.pieces.get(), RETRY_S)
                    if piece.offset == offset:
                        return piece


class ControllerPorts:
    """The socket for orders, heartbeats and events. An older controller has a port for events."""

    def __init__(
        self, link: Link, controller: settings.Controller, keys: ServerKeys, node: NodeId
    ) -> None:
        self._link = link
        self._hosts = controller.hosts
        self._port = controller.agents
        self._keys = keys
        self._welcomed_key = b""
        self._node = node
        self._ports = (0, 0)
        self._events_here = False
        self.orders = self._connect("DEALER", controller.agents, prompt=True)
        self.events: Socket | None = None

    def welcomed(self, welcome: Welcome) -> Socket | None:
        """Connect to a welcome's ports and return the bulk socket. Return None if none changed."""
        self._events_here = welcome.events_here
        ports = (0 if welcome.events_here else welcome.event_port, welcome.log_port)
        if (ports, self._keys.current) == (self._ports, self._welcomed_key):
            return None
        self._ports, self._welcomed_key = ports, self._keys.current
        if self.events is not None:
            self.events.close()
            self.events = None
        if not welcome.events_here:
            self.events = self._connect(
                "PUB", welcome.event_port, reconnect_ms=PATIENT_RECONNECT_MS
            )
        return self._connect("DEALER", welcome.log_port, reconnect_ms=PATIENT_RECONNECT_MS)

    def publish(self, data: bytes) -> None:
        """Send an event or telemetry."""
        if self._events_here:
            self.orders.send(data)
        elif self.events is not None:
            self.events.send(self._node.encode(), data)

    def _connect(self, kind: str, port: int, **options: Any) -> Socket:
        return self._link.connect(kind, self._address(port), self._keys.current, **options)

    def _address(self, port: int) -> str:
        return ",".join(f"tcp://{host}:{port}" for host in self._hosts)

    def try_other_key(self) -> None:
        """Connect with the controller's other key, if there is one."""
        if (key := self._keys.other()) is not None:
            self.orders.reconnect(self._address(self._port), key)


class BulkTraffic:
    """Traffic on the bulk port: output and files of jobs, snapshots, and streams."""

    def __init__(self, folders: NodeFolders, shipper: LogShipper, fetcher: SnapshotFetcher) -> None:
        self._folders = folders
        self._shipper = shipper
        self._fetcher = fetcher
        self._reading = asyncio.Semaphore(MAX_READERS)
        self._answering: set[asyncio.Task[None]] = set()
        self._receiving: asyncio.Task[None] | None = None
        self.socket: Socket | None = None
        self.streams: JobStreams | None = None

    def send(self, data: bytes) -> bool:
        """Send to the relay. Return False if it is not connected."""
        return self.socket is not None and self.socket.send(data)

    def use(self, socket: Socket) -> None:
        """Use this DEALER socket of the bulk port, and close the previous socket."""
        self.close()
        self.socket = socket
        self._receiving = asyncio.create_task(self._receive(socket))
        self._shipper.use(socket)
        self._fetcher.use(socket)

    def answer(self, asked: AskFiles | AskPiece) -> None:
        """Start to answer a request for a job's files."""
        task = asyncio.create_task(self._answer(asked))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Close the connection."""
        if self._receiving is not None:
            self._receiving.cancel()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    async def _receive(self, socket: Socket) -> None:
        async for incoming in socket:
            with log_errors("message of the relay"):
                match TO_SHIPPER.decode(incoming.frames[-1]):
                    case LogStored() as stored:
                        self._shipper.receive(stored)
                    case SnapshotPiece() as piece:
                        self._fetcher.receive(piece)
                    case _ as message:
                        if self.streams is not None:
                            self.streams.receive(message)

    async def _answer(self, asked: AskFiles | AskPiece) -> None:
        with log_errors("request for files", kind=type(asked).__name__):
            async with self._reading:
                found = await asyncio.to_thread(job_folders.answer, asked, self._folders)
            if self.socket is not None:
                self.socket.send(encode(found))


class WorkerChannel:
    """Connections of the workers, each identified by its worker's token.

    Once a connection has sent a worker's token, all of its messages are attributed to that worker,
    even if they name another job, version or rank. `token_of` returns None for an unknown worker,
    and an empty token for a worker with an older library that sends no token. `link` is a second
    address of the same socket, in a folder of its own.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[WorkerId, FromWorker], None],
        token_of: Callable[[WorkerId], str | None],
        *,
        open_to_all: bool = False,
        link: str = "",
    ) -> None:
        self._address = address
        self._open_to_all = open_to_all
        self._second = link
        self._on_message = on_message
        self._token_of = token_of
        self._audit = Audit()
        self._link = Link()
        self.socket = self._link.bind(
            "ROUTER", address, queued=MAX_QUEUED, largest=MAX_WORKER_MESSAGE_BYTES
        )
        self._routes: dict[WorkerId, bytes] = {}
        self._senders: dict[bytes, tuple[WorkerId, WorkerHello]] = {}
        self._open_to_workers()

    def _open_to_workers(self) -> None:
        path, link = (Path(one.removeprefix("ipc://")) for one in (self._address, self._second))
        if self._open_to_all:
            path.chmod(0o666)
        if self._second:
            link.parent.mkdir(exist_ok=True)
            link.parent.chmod(PASSABLE)
            link.unlink(missing_ok=True)
            link.hardlink_to(path)

    def listen(self) -> None:
        """Bind again, for example after the socket was deleted. Existing connections stay open."""
        self.socket.listen(self._address)
        self._open_to_workers()

    async def receive(self) -> None:
        """Process messages of workers until cancelled."""
        async for incoming in self.socket:
            try:
                message = FROM_WORKER.decode(incoming.frames[-1])
            except OnesError as error:
                self._audit.refused("message of a worker", str(error))
                continue
            with log_errors("message of a worker"):
                self._handle(incoming, message)

    async def watch(self) -> None:
        """Disconnect workers that send faster than the agent reads, until cancelled."""
        await self._link.guard_connections(partial(self._audit.refused, "connection of a worker"))

    def _handle(self, incoming: Incoming, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self._accept_greeting(incoming.route, message)
        if (sender := self._senders.get(incoming.route)) is None:
            if not isinstance(message, WorkerHello):
                self._audit.refused("message of a worker", "no greeting before")
            return
        worker, hello = sender
        own = replace(message, job=hello.job, version=hello.version, rank=hello.rank)
        self._on_message(worker, own)

    def _accept_greeting(self, route: bytes, hello: WorkerHello) -> None:
        """Assign a connection to the worker with the token in `hello`. Ignore an invalid token.

        Children of a worker inherit its token, so a second process is refused while the first runs.
        """
        self.forget(self._senders.get(route, ("", None))[0])
        worker = worker_id(hello.job, hello.version, hello.rank)
        token = self._token_of(worker)
        if token is None or not hmac.compare_digest(token.encode(), hello.token.encode()):
            why = "unknown worker" if token is None else "wrong token"
            self._audit.refused("greeting of a worker", why, worker=worker[:MAX_LOGGED_NAME])
            return
        former = self._senders.get(self._routes.get(worker, b""))
        if former is not None and former[1].pid != hello.pid and start_ticks(former[1].pid):
            why = f"process {hello.pid} is not the worker's process {former[1].pid}"
            self._audit.refused("greeting of a worker", why, worker=worker[:MAX_LOGGED_NAME])
            return
        self.forget(worker)
        self._routes[worker] = route
        self._senders[route] = worker, hello

    def forget(self, worker: str) -> None:
        """Forget the connection of a worker, such as one that has exited."""
        if (route := self._routes.pop(WorkerId(worker), None)) is not None:
            self._senders.pop(route, None)

    def order(self, worker: WorkerId, delta: GroupDelta) -> None:
        """Send the desired group to a worker. Ignore a delta without a group."""
        if delta.group is not None:
            order = GroupOrder(
                version=delta.version,
                stage=delta.stage,
                kind=delta.kind,
                group=delta.group,
                former=delta.former,
                store=delta.store,
                source=delta.source,
            )
            self.send(worker, order)

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send to a worker if it is connected. When a worker connects, it gets everything again."""
        if (route := self._routes.get(worker)) is not None:
            self.socket.send(route, encode(message))

    def close(self) -> None:
        """Close the socket. Workers continue without it."""
        self._link.close()
