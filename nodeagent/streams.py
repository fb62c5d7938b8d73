"""Streams of clients on this node: terminals and shells are passed on, TCP ports end here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from nodeagent import job_ports, terminals
from nodeagent.errors import StartError, log_errors
from nodeagent.folders import FRAME
from nodeagent.owned_files import acting_as, owner_of, remove_tree
from schemas.codec import FROM_TERMINAL, encode
from schemas.errors import OnesError
from schemas.ids import WorkerId
from schemas.transport.stream_ends import LOST_S, StreamEnd, StreamError, StreamGapError
from schemas.wire import Message
from schemas.wire.streams import (
    MAX_REASON,
    PIECE,
    PORT,
    SHELL,
    OpenStream,
    StreamAlive,
    StreamClosed,
    StreamData,
    StreamOpened,
    ToNode,
)

log = structlog.get_logger("streams")
MAX_STREAMS: Final = 1000
MAX_UNREAD: Final = 1 << 20  # bytes that a terminal has not read; then its stream ends
APPEARS_S: Final = 5.0  # until a started program has its terminal
LOOK_S: Final = 0.02
TICK_S: Final = 1.0


class StreamPlace(NamedTuple):
    """Worker of a stream, as this node knows it."""

    folder: Path  # the agent's folder of the worker
    own: Path  # folder of the worker's files
    journal: str
    runs: bool
    interactive: bool


@dataclass(eq=False, slots=True)
class _Stream:
    asked: OpenStream
    task: asyncio.Task[None] | None = None
    writer: asyncio.StreamWriter | None = None
    end: StreamEnd | None = None  # of a port
    room: asyncio.Event | None = None  # of a port: the peer gave credit
    heard_at: float = 0.0
    is_lossy: bool = False  # a message could not be sent


class JobStreams:
    """Streams of a node. A stream is forgotten when its client is silent, or its end is closed.

    `send` sends to the relay and returns False if it is not connected. `place` returns what is
    known of a worker. `start_shell` starts the program of a shell, and returns its folder. `pids`
    returns the processes of a worker.
    """

    def __init__(
        self,
        *,
        send: Callable[[bytes], bool],
        place: Callable[[WorkerId], StreamPlace | None],
        start_shell: Callable[[OpenStream, Path], Awaitable[None]],
        pids: Callable[[WorkerId], list[int]],
    ) -> None:
        self._send_bytes = send
        self._place = place
        self._start_shell = start_shell
        self._pids = pids
        self._streams: dict[str, _Stream] = {}

    def open(self, asked: OpenStream) -> None:
        """Open a stream, or open it again."""
        stream = self._streams.get(asked.stream)
        if stream is not None and stream.asked.worker == asked.worker:
            stream.heard_at, stream.is_lossy = time.monotonic(), False
            if stream.writer is not None and stream.end is None:
                self._pass_on(stream, asked)
            elif stream.end is not None:
                self._reopen_port(stream, stream.end, asked)
            return
        if stream is not None or len(self._streams) >= MAX_STREAMS:
            self._refuse(asked.stream, "too many streams are open on this node")
            return
        stream = self._streams[asked.stream] = _Stream(asked, heard_at=time.monotonic())
        stream.task = asyncio.create_task(self._run(stream))

    def receive(self, message: ToNode) -> None:
        """Process a message of the client of a stream."""
        stream = self._streams.get(message.stream)
        if stream is None:
            if not isinstance(message, StreamClosed):
                self._refuse(message.stream, "the stream is not known here", again=True)
            return
        stream.heard_at = time.monotonic()
        if stream.end is not None:
            self._to_port(stream, stream.end, message)
        else:
            self._pass_on(stream, message)
        if isinstance(message, StreamClosed):
            self._drop(stream)

    async def run(self) -> None:
        """Keep streams alive and forget silent ones, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if now - stream.heard_at > LOST_S:
                    self._drop(stream)
                    continue
                if stream.is_lossy:
                    why = "messages were lost"
                    stream.is_lossy = not self._refuse(stream.asked.stream, why, again=True)
                if stream.end is not None:
                    self._send(stream, *stream.end.due(now))

    def close(self) -> None:
        """Drop all streams. Terminals stay."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    # --- both kinds

    async def _run(self, stream: _Stream) -> None:
        asked = stream.asked
        reason = "the stream failed; see the log of the agent"
        try:
            with log_errors("stream", worker=asked.worker[:200]):
                reason = await self._serve(stream)
        except asyncio.CancelledError:
            return
        if self._streams.get(asked.stream) is stream:
            if reason:
                self._refuse(asked.stream, reason)
            stream.task = None
            self._drop(stream)

    async def _serve(self, stream: _Stream) -> str:
        """Serve a stream to its end. Return a reason if the client was not told one."""
        asked = stream.asked
        place = self._place(asked.worker)
        if place is None or not place.runs or place.journal != asked.journal:
            return "the worker does not run any more"
        if asked.what == PORT:
            return await self._serve_port(stream)
        folder = place.own
        if asked.what == SHELL:
            folder = place.folder / f"shell-{asked.stream}"
            if asked.received is None and not folder.exists():
                try:
                    await self._start_shell(asked, folder)
                except (StartError, OSError) as error:
                    return f"the shell could not be started: {error}"
        elif not place.interactive:
            return "the job has no terminal: `ones shell` opens one beside it"
        reason = await self._serve_terminal(stream, folder)
        if asked.what == SHELL and not reason:  # it has ended
            await asyncio.to_thread(remove_tree, folder)
        return reason

    def _refuse(self, stream: str, reason: str, *, again: bool = False) -> bool:
        closed = StreamClosed(stream=stream, reason=reason[:MAX_REASON], again=again)
        return self._send_bytes(encode(closed))

    def _send(self, stream: _Stream, *messages: Message) -> None:
        for message in messages:
            if not self._send_bytes(encode(message)):
                stream.is_lossy = True

    def _drop(self, stream: _Stream) -> None:
        self._streams.pop(stream.asked.stream, None)
        if stream.task is not None:
            stream.task.cancel()
        if stream.writer is not None:
            stream.writer.close()

    # --- terminals

    async def _serve_terminal(self, stream: _Stream, folder: Path) -> str:
        connection = await _connect(folder)
        if connection is None:
            return "the program has ended"
        reader, stream.writer = await asyncio.open_unix_connection(sock=connection)
        self._pass_on(stream, stream.asked)
        try:
            while True:
                (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > terminals.MAX_FRAME:
                    return "its terminal sent too large a message"
                data = await reader.readexactly(length)
                message = FROM_TERMINAL.decode(data)
                if message.stream != stream.asked.stream:
                    return "its terminal sent a message of another stream"
                if not self._send_bytes(data):
                    stream.is_lossy = True
                if isinstance(message, StreamClosed) and not message.again:
                    return ""
        except OnesError:
            return "its terminal sent a message that is not valid"
        except (OSError, EOFError):
            return "the terminal is gone"

    def _pass_on(self, stream: _Stream, message: Message) -> None:
        """Pass a message to the terminal. One that does not read loses its stream."""
        if (writer := stream.writer) is None or writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_UNREAD:
            self._refuse(stream.asked.stream, "its terminal does not read")
            self._drop(stream)
            return
        data = encode(message)
        writer.write(FRAME.pack(len(data)) + data)

    # --- ports

    async def _serve_port(self, stream: _Stream) -> str:
        asked = stream.asked
        if asked.received is not None:
            return "the connection was lost"
        address = await self._address(asked)
        if address is None:
            return f"port {asked.port} is not one at which {asked.job} listens"
        try:
            reader, writer = await asyncio.open_connection(address, asked.port)
        except OSError as error:
            return f"port {asked.port}: {error.strerror}"
        stream.writer = writer
        if await self._address(asked) is None:  # it closed the port, and another process has it
            return f"port {asked.port} is not one at which {asked.job} listens"
        now = time.monotonic()
        stream.end, stream.room = StreamEnd(asked.stream, now), asyncio.Event()
        self._send(stream, StreamOpened(stream=asked.stream, received=0, offset=0))
        outgoing = stream.end.outgoing
        try:
            while True:
                while outgoing.room <= 0:
                    stream.room.clear()
                    await stream.room.wait()
                data = await reader.read(min(PIECE, outgoing.room))
                if not data:
                    break
                self._send(stream, *outgoing.send(asked.stream, data))
        except OSError as error:
            return f"port {asked.port}: {error.strerror}"
        self._send(stream, *outgoing.end(asked.stream))
        while not (stream.end.incoming.ended and outgoing.received == outgoing.sent):
            stream.room.clear()
            await stream.room.wait()
        self._refuse(asked.stream, "")
        return ""

    async def _address(self, asked: OpenStream) -> str | None:
        return await asyncio.to_thread(
            lambda: job_ports.address_of(asked.port, self._pids(asked.worker))
        )

    def _reopen_port(self, stream: _Stream, end: StreamEnd, asked: OpenStream) -> None:
        end.heard(time.monotonic())
        with contextlib.suppress(StreamError):
            end.outgoing.mark_received(asked.received or 0)
        received, offset = end.incoming.consumed, end.outgoing.received
        opened = StreamOpened(stream=asked.stream, received=received, offset=offset)
        self._send(stream, opened, *end.outgoing.again(asked.stream))
        if stream.room is not None:
            stream.room.set()

    def _to_port(self, stream: _Stream, end: StreamEnd, message: ToNode) -> None:
        if not isinstance(message, StreamData | StreamAlive) or stream.writer is None:
            return
        try:
            data = end.take(message, time.monotonic())
        except StreamGapError as error:
            self._refuse(end.stream, error.message, again=True)
            return
        except StreamError as error:
            self._refuse(end.stream, error.message)
            self._drop(stream)
            return
        if data:
            stream.writer.write(data)
        self._grant(stream)
        if end.incoming.ended and not data and stream.writer.can_write_eof():
            with contextlib.suppress(OSError):
                stream.writer.write_eof()
        if stream.room is not None:
            stream.room.set()

    def _grant(self, stream: _Stream) -> None:
        """Grant credit for what the kernel has taken from the stream."""
        if stream.end is None or stream.writer is None or stream.writer.is_closing():
            return
        incoming, unsent = stream.end.incoming, stream.writer.transport.get_write_buffer_size()
        written = max(0, incoming.arrived - incoming.consumed - unsent)
        self._send(stream, *stream.end.consume(written, time.monotonic()))
        if unsent:
            asyncio.get_running_loop().call_later(LOOK_S, self._grant, stream)


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
