"""Connections to the controller: orders at a port that settings name, the others where it says."""

from __future__ import annotations

import asyncio
from typing import Final

from nodeagent import agent_settings, job_files
from nodeagent.agent_errors import passed_over
from nodeagent.log_shipper import LogShipper
from nodeagent.snapshot_fetcher import SnapshotFetcher
from nodeagent.worker_folders import NodeFolders
from schemas.codec import TO_SHIPPER, encode
from schemas.ids import NodeId
from schemas.link import Link, Socket
from schemas.messages.agent import Welcome
from schemas.messages.files import AskFiles, AskPiece
from schemas.messages.logs import LogStored, SnapshotPiece

READERS: Final = 4  # of files of jobs, at once


class ControllerPorts:
    """Orders and heartbeats on one socket, events on another."""

    def __init__(
        self, link: Link, controller: agent_settings.Controller, key: bytes, node: NodeId
    ) -> None:
        self._link = link
        self._host = controller.host
        self._key = key
        self._node = node
        self._told = (0, 0)
        self.orders = self._connect("DEALER", controller.agents)
        self.events: Socket | None = None

    def welcomed(self, welcome: Welcome) -> Socket | None:
        """Connect to the ports that a welcome tells.

        Args:
            welcome: of this or another incarnation.

        Returns:
            The socket of its bulk port; None: it is as it was.
        """
        ports = (welcome.event_port, welcome.log_port)
        if ports == self._told:
            return None
        self._told = ports
        if self.events is not None:
            self.events.close()
        self.events = self._connect("PUB", welcome.event_port)
        return self._connect("DEALER", welcome.log_port)

    def publish(self, data: bytes) -> None:
        """Say what happens here, to whoever listens."""
        if self.events is not None:
            self.events.send(self._node.encode(), data)

    def _connect(self, kind: str, port: int) -> Socket:
        return self._link.connect(kind, f"tcp://{self._host}:{port}", self._key)


class BulkTraffic:
    """What is large: output and files of jobs up, archives of working directories down."""

    def __init__(self, folders: NodeFolders, shipper: LogShipper, fetcher: SnapshotFetcher) -> None:
        self._folders = folders
        self._shipper = shipper
        self._fetcher = fetcher
        self._reading = asyncio.Semaphore(READERS)
        self._answering: set[asyncio.Task[None]] = set()
        self._receiving: asyncio.Task[None] | None = None
        self.socket: Socket | None = None

    def use(self, socket: Socket) -> None:
        """Go on over this one; the one before is closed.

        Args:
            socket: DEALER of the controller's bulk port.
        """
        self.close()
        self.socket = socket
        self._receiving = asyncio.create_task(self._receive(socket))
        self._shipper.use(socket)
        self._fetcher.use(socket)

    def answer(self, asked: AskFiles | AskPiece) -> None:
        """Answer a question about files of a job, when the disk gives them."""
        task = asyncio.create_task(self._answer(asked))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def close(self) -> None:
        """Hear and say nothing more."""
        if self._receiving is not None:
            self._receiving.cancel()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    async def _receive(self, socket: Socket) -> None:
        async for incoming in socket:
            with passed_over("message of the relay"):
                match TO_SHIPPER.decode(incoming.frames[-1]):
                    case LogStored() as stored:
                        self._shipper.receive(stored)
                    case SnapshotPiece() as piece:
                        self._fetcher.receive(piece)

    async def _answer(self, asked: AskFiles | AskPiece) -> None:
        with passed_over("question about files", kind=type(asked).__name__):
            async with self._reading:
                found = await asyncio.to_thread(job_files.answer, asked, self._folders)
            if self.socket is not None:
                self.socket.send(encode(found))
