"""Streams of clients on this node: terminals and shells are passed on, TCP ports end here."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nodeagent import terminals
from nodeagent.errors import StartError, log_errors
from nodeagent.folders import WorkerFolder
from nodeagent.owned_files import acting_as, owner_of, remove_tree
from schemas.codec import FROM_TERMINAL, encode
from schemas.errors import OnesError
from schemas.host.fork_server import framed, read_frame
from schemas.ids import WorkerId
from schemas.transport.stream_ends import StreamEnd
from schemas.wire import Message
from schemas.wire.streams import (
    MAX_REASON,
    PORT,
    SHELL,
    OpenStream,
    StreamClosed,
    StreamData,
    ToNode,
)

MAX_STREAMS: Final = 1000
MAX_UNREAD: Final = 1 << 20  # bytes that a terminal has not read; then its messages get lost
APPEARS_S: Final = 5.0  # until a started program has its terminal
LOOK_S: Final = 0.02
LISTENER: Final = r"^ *\d+: ([0-9A-F]+):{:04X} \S+ 0A(?: +\S+){{5}} +(\d+)"  # of /proc/net/tcp
LOCAL: Final = {  # addresses that accept connections from this host, and where to connect to them
    "00000000": "127.0.0.1",
    "0100007F": "127.0.0.1",
    "0" * 32: "127.0.0.1",
    "0000000000000000FFFF00000100007F": "127.0.0.1",
    "00000000000000000000000001000000": "::1",
}


@dataclass(eq=False, slots=True)
class _Stream:
    asked: OpenStream
    task: asyncio.Task[None] | None = None
    take: Callable[[Message], None] = lambda _: None  # passes a message on; at first it is lost


class JobStreams:
    """Streams of a node.

    `send` sends to the relay, or loses the message. `worker` returns a running worker's folder.
    `start_shell` starts the program of a shell in a folder. `pids` returns a worker's processes.
    """

    def __init__(
        self,
        *,
        send: Callable[[bytes], object],
        worker: Callable[[OpenStream], WorkerFolder | None],
        start_shell: Callable[[OpenStream, Path], Awaitable[None]],
        pids: Callable[[WorkerId], list[int]],
    ) -> None:
        self._send_bytes = send
        self._worker = worker
        self._start_shell = start_shell
        self._pids = pids
        self._streams: dict[str, _Stream] = {}

    def receive(self, message: OpenStream | ToNode) -> None:
        """Process a message of the client of a stream. The first one opens it."""
        stream = self._streams.get(message.stream)
        if stream is not None:
            stream.take(message)
            if isinstance(message, StreamClosed) and stream.task is not None:
                stream.task.cancel()
        elif isinstance(message, OpenStream):
            if len(self._streams) >= MAX_STREAMS:
                self._refuse(message.stream, "too many streams are open on this node")
                return
            stream = self._streams[message.stream] = _Stream(message)
            stream.task = asyncio.create_task(self._run(stream))

    def close(self) -> None:
        """End all streams. Terminals stay."""
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()

    async def _run(self, stream: _Stream) -> None:
        reason: str | None = "the stream failed; see the log of the agent"
        try:
            with log_errors("stream", worker=stream.asked.worker[:200]):
                reason = await self._serve(stream)
            if reason is not None:
                self._refuse(stream.asked.stream, reason)
        finally:
            del self._streams[stream.asked.stream]

    async def _serve(self, stream: _Stream) -> str | None:
        """Serve a stream to its end. Return the reason for the client, unless it knows of it."""
        asked = stream.asked
        if (worker := self._worker(asked)) is None:
            return "the worker does not run any more"
        if asked.what == PORT:
            return await self._serve_port(stream)
        if asked.what == SHELL:
            if not asked.argv and not asked.again:
                return "argv: is missing; name a program"
            folder = worker.path / f"shell-{asked.stream}"
            if not asked.again and not folder.exists():
                try:
                    await self._start_shell(asked, folder)
                except (StartError, OSError) as error:
                    return f"the shell could not be started: {error}"
            return await self._serve_terminal(stream, folder)
        assignment = worker.assignment()
        if assignment is None or assignment.spec.kind != "interactive":
            return "the job has no terminal: `ones shell` opens one beside it"
        return await self._serve_terminal(stream, worker.own)

    def _refuse(self, stream: str, reason: str) -> None:
        self._send(StreamClosed(stream=stream, reason=reason[:MAX_REASON]))

    def _send(self, message: Message) -> None:
        self._send_bytes(encode(message))

    async def _serve_terminal(self, stream: _Stream, folder: Path) -> str | None:
        connection = await _connect(folder)
        if connection is None:
            return "the program has ended"
        reader, writer = await asyncio.open_unix_connection(sock=connection)

        def take(message: Message) -> None:
            if writer.transport.get_write_buffer_size() < MAX_UNREAD:
                writer.write(framed(message))

        stream.take = take
        take(stream.asked)
        try:
            while True:
                data = await read_frame(reader, terminals.MAX_FRAME)
                message = FROM_TERMINAL.decode(data)
                if message.stream != stream.asked.stream:
                    return "its terminal sent a message of another stream"
                self._send_bytes(data)
                if isinstance(message, StreamClosed):
                    break
        except OnesError:
            return "its terminal sent a message that is not valid"
        except (OSError, EOFError):  # a client that still wants it opens the stream again
            return None
        finally:
            writer.close()
        if stream.asked.what == SHELL:
            await asyncio.to_thread(remove_tree, folder)
        return None

    async def _serve_port(self, stream: _Stream) -> str | None:
        asked = stream.asked
        if asked.again:
            return "the connection was lost"
        foreign = f"port {asked.port} is not one at which {asked.job} listens"
        address = await self._address(asked)
        if address is None:
            return foreign
        try:
            reader, writer = await asyncio.open_connection(address, asked.port)
        except OSError as error:
            return f"port {asked.port}: {error.strerror}"
        if await self._address(asked) is None:  # it closed the port, and another process has it
            writer.close()
            return foreign
        end = StreamEnd(asked.stream, self._send)

        def take(message: Message) -> None:
            if isinstance(message, StreamData):
                end.receive(message)
            elif isinstance(message, OpenStream):
                end.tell()

        stream.take = take
        end.tell()
        keeping = asyncio.create_task(end.keep_alive())
        try:
            await end.join(reader, writer)
            while end.unreceived and not end.over:
                await end.wait()
        except OSError as error:
            return f"port {asked.port}: {error.strerror}"
        finally:
            keeping.cancel()
        return None if end.over else ""

    async def _address(self, asked: OpenStream) -> str | None:
        return await asyncio.to_thread(lambda: address_of(asked.port, self._pids(asked.worker)))


async def _connect(folder: Path) -> socket.socket | None:
    until = time.monotonic() + APPEARS_S
    owner = owner_of(folder)
    while True:
        try:
            with acting_as(owner):
                return terminals.connect(folder, os.geteuid() if owner is None else owner.uid)
        except OSError as error:
            wrong = isinstance(error, PermissionError | NotADirectoryError)
            if wrong or time.monotonic() > until:
                return None
        await asyncio.sleep(LOOK_S)


def address_of(port: int, pids: Iterable[int]) -> str | None:
    """Return the address of a port that belongs to these processes, or None if it does not.

    All sockets that may get the connection must belong to them.
    """
    found = listeners(port)
    if not found or not {f"socket:[{inode}]" for _, inode in found} <= _open_files(pids):
        return None
    return found[0][0]


def listeners(port: int, net: Path = Path("/proc/net")) -> list[tuple[str, str]]:
    """Return address and inode of the sockets that accept connections to a port from this host."""
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            text = (net / table).read_text(encoding="ascii")
            found += re.findall(LISTENER.format(port), text, re.MULTILINE)
    return [(LOCAL[where], inode) for where, inode in found if where in LOCAL]


def _open_files(pids: Iterable[int]) -> set[str]:
    held = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    held.add(os.readlink(entry))  # noqa: PTH115 - a path object costs more
    return held
