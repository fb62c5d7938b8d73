"""Streams to running jobs: terminals, shells and TCP ports, through lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Final, Literal

from msgspec.structs import replace

from controlplane.client.files import FileTransfers
from schemas.codec import TO_STREAM_CLIENT, encode
from schemas.errors import OnesError, UnavailableError, UnreachableError, error_from_code
from schemas.ids import JobId, Rank
from schemas.transport.sockets import Socket
from schemas.transport.stream_ends import ALIVE_S, LOST_S, StreamEnd, StreamError
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.streams import (
    PIECE,
    PORT,
    SHELL,
    TERMINAL,
    OpenStream,
    StreamClosed,
    StreamOpened,
    StreamResized,
    StreamSignal,
)

TICK_S: Final = 0.5
QUIET_S: Final = ALIVE_S + 2.0  # without a sign of the other end, the stream is opened again
AGAIN_S: Final = 1.0  # between attempts to open it again
CLOSE_S: Final = 1.0  # for the relay's reply when a stream is closed
OPEN_S: Final = 15.0  # until the first reply; an agent may have to start a fork server
SignalName = Literal["HUP", "INT", "QUIT", "TERM", "KILL"]


class StreamLostError(UnreachableError):
    """The other end of a stream did not reply for 20 s."""


class Attachment:
    """One open stream: bytes in both directions, until it is closed or lost.

    Attributes:
        reason: why the stream was closed, or an empty string.
        code: exit code of its program, if that has ended and is known.
    """

    def __init__(self, channel: StreamChannel, asked: OpenStream) -> None:
        self._channel = channel
        self._asked = asked
        now = asyncio.get_running_loop().time()
        self._end = StreamEnd(asked.stream, now)
        self._output: list[bytes] = []
        self._unread = 0  # bytes that the last `read` returned, and grants credit for
        self._changed = asyncio.Event()
        self._opened = False  # the node has replied to the latest opening
        self._was_opened = False
        self._asked_at = now
        self._error: OnesError | None = None
        self._closed = False
        self.missed = 0  # bytes of output that the terminal does not have any more
        self.reason = ""
        self.code: int | None = None

    async def read(self) -> bytes:
        """Return the next bytes of output; empty: there are no more.

        Raises:
            StreamLostError: if the other end does not reply.
            OnesError: if the stream was refused.
        """
        now = asyncio.get_running_loop().time()
        self._send(*self._end.consume(self._unread, now))
        self._unread = 0
        while not self._output:
            if self._error is not None:
                raise self._error
            if self._closed or self._end.incoming.ended:
                return b""
            await self._wait()
        data = b"".join(self._output)
        self._output.clear()
        self._unread = len(data)
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes, as soon as the other end has room for them. Do nothing after the end."""
        outgoing = self._end.outgoing
        at = 0
        while at < len(data) and not self.over:
            if not self._opened or outgoing.room <= 0:
                await self._wait()
                continue
            piece = data[at : at + min(PIECE, outgoing.room)]
            self._send(*outgoing.send(self._asked.stream, piece))
            at += len(piece)

    def write_eof(self) -> None:
        """State that no more bytes will be written."""
        self._send(*self._end.outgoing.end(self._asked.stream))

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal's window."""
        asked = self._asked
        self._asked = replace(asked, rows=rows, cols=cols)
        self._send(StreamResized(stream=asked.stream, rows=rows, cols=cols))

    def signal(self, name: SignalName) -> None:
        """Send a signal to the program in the foreground of the terminal."""
        self._send(StreamSignal(stream=self._asked.stream, name=name))

    @property
    def over(self) -> bool:
        """True if the stream is closed or lost."""
        return self._closed or self._error is not None

    async def close(self) -> None:
        """Detach, and wait for a moment until the relay knows. A program goes on."""
        if self._opened and not self.over:
            self._send(StreamClosed(stream=self._asked.stream))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while self._opened and not self.over:
                        await self._wait()
        self._closed = True
        self._changed.set()

    async def wait_opened(self) -> None:
        """Wait until the other end has replied.

        Raises:
            OnesError: if the stream was refused, or no reply arrives.
        """
        while not self._was_opened and not self.over:
            await self._wait()
        if self._error is not None:
            raise self._error
        if not self._was_opened:
            raise UnavailableError(self.reason or "the stream was closed")

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # --- called by the channel

    def receive(self, message: Message) -> None:
        """Process a message of the relay."""
        now = asyncio.get_running_loop().time()
        match message:
            case Failed():
                self._fail(message)
            case StreamClosed(again=True):
                if self._opened:
                    self._open_again(now)
            case StreamClosed():
                self.reason, self.code, self._closed = message.reason, message.code, True
            case StreamOpened():
                self._on_opened(message, now)
            case _ if self._opened:
                try:
                    data = self._end.take(message, now)
                except StreamError:  # a gap: the end sends it again
                    self._open_again(now)
                else:
                    self._output += [data] if data else []
        self._changed.set()

    def _fail(self, failed: Failed) -> None:
        passing = failed.code in {"unavailable", "unreachable"} and self._was_opened
        if not passing:
            self._error = error_from_code(failed.code, failed.message, failed.hint, failed.field)

    def _on_opened(self, message: StreamOpened, now: float) -> None:
        incoming, outgoing = self._end.incoming, self._end.outgoing
        self._end.heard(now)
        self._asked = replace(self._asked, worker=message.worker)
        if message.offset > incoming.arrived:
            self.missed += message.offset - incoming.arrived if self._was_opened else 0
            incoming.skip_to(message.offset)
        with contextlib.suppress(StreamError):
            outgoing.mark_received(message.received)
        again = self._was_opened
        self._opened = self._was_opened = True
        if again:
            self._send(*outgoing.again(self._asked.stream))
        self._send(self._end.alive(now))

    def tick(self, now: float) -> None:
        """Keep the stream alive, open it again after a loss, and give up after `LOST_S`."""
        if self.over:
            return
        silent = self._end.silent_s(now)
        if silent > (LOST_S if self._was_opened else OPEN_S):
            what = f"the node did not reply for {silent:.0f} s"
            self._error = StreamLostError(what, f"`ones attach {self._asked.job}` tries again")
            self._changed.set()
        elif self._opened and silent <= QUIET_S:
            self._send(*self._end.due(now))
        elif now - self._asked_at >= AGAIN_S:
            self.ask(now)

    def _open_again(self, now: float) -> None:
        self._opened = False
        if now - self._asked_at >= AGAIN_S:
            self.ask(now)

    def ask(self, now: float) -> None:
        """Send the request to open the stream, with what this end has received."""
        self._opened, self._asked_at = False, now
        asked = self._asked
        if self._was_opened:
            received, kept = self._end.incoming.arrived, self._end.outgoing.received
            asked = replace(asked, received=received, kept_from=kept)
        self._channel.send(asked.stream, asked)

    def _send(self, *messages: Message) -> None:
        """Send what the other end gets now; what gets lost is sent after the next opening."""
        for message in messages:
            if self._opened and not self._channel.send(self._asked.stream, message):
                self._opened = False


class StreamChannel:
    """The streams over one DEALER socket, told apart by their ids."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._streams: dict[str, Attachment] = {}
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._tick())]

    def open(self, asked: OpenStream) -> Attachment:
        """Open a stream and return this end of it, before the other end has replied."""
        made = self._streams[asked.stream] = Attachment(self, asked)
        made.ask(asyncio.get_running_loop().time())
        return made

    async def forget(self, made: Attachment) -> None:
        """Close a stream."""
        await made.close()
        for name in [name for name, one in self._streams.items() if one is made]:
            del self._streams[name]

    def send(self, stream: str, message: Message) -> bool:
        """Send a message of a stream. Return False if it is lost."""
        return self._socket.send(stream.encode(), encode(message))

    async def _receive(self) -> None:
        async for incoming in self._socket:
            stream = self._streams.get(incoming.frames[0].decode("ascii", "replace"))
            if stream is not None:
                with contextlib.suppress(OnesError):
                    stream.receive(TO_STREAM_CLIENT.decode(incoming.frames[-1]))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = asyncio.get_running_loop().time()
            for stream in list(self._streams.values()):
                stream.tick(now)

    def close(self) -> None:
        """Stop receiving. The owner of the context closes the socket."""
        for task in self._tasks:
            task.cancel()


class Attachments(FileTransfers):
    """Connection that opens streams to one's own running jobs."""

    _stream_channel: StreamChannel | None = None

    async def __aexit__(self, *details: object) -> None:
        """Close all streams and sockets."""
        if self._stream_channel is not None:
            self._stream_channel.close()
        await super().__aexit__(*details)

    @contextlib.asynccontextmanager
    async def attach(
        self, job: str, *, rows: int = 24, cols: int = 80
    ) -> AsyncIterator[Attachment]:
        """Attach to the terminal of an interactive job, and yield the open stream.

        The stream begins with at most 64 KiB of the latest output. Its end detaches it.

        Raises:
            UnavailableError: if the job does not run or has no terminal.
        """
        asked = OpenStream(stream=_fresh(), job=JobId(job), what=TERMINAL, rows=rows, cols=cols)
        async with self._opened(asked) as made:
            yield made

    @contextlib.asynccontextmanager
    async def shell(
        self,
        job: str,
        argv: Sequence[str] = (),
        *,
        rank: int = 0,
        rows: int = 24,
        cols: int = 80,
    ) -> AsyncIterator[Attachment]:
        """Start a program on a terminal of its own beside a worker, and yield the open stream.

        The program has the worker's account, folder, variables and limits. It gets HUP when it was
        without a client for 30 s, after 8 h, and at the worker's end.

        Args:
            argv: program and arguments; empty: bash, or sh.
            rank: rank of the worker in the job's current group.

        Raises:
            UnavailableError: if no such worker runs.
        """
        asked = OpenStream(
            stream=_fresh(), job=JobId(job), rank=Rank(rank), what=SHELL, argv=tuple(argv),
            rows=rows, cols=cols, term=os.environ.get("TERM", ""), lang=os.environ.get("LANG", ""),
        )  # fmt: skip
        async with self._opened(asked) as made:
            yield made

    @contextlib.asynccontextmanager
    async def port(self, job: str, port: int, *, rank: int = 0) -> AsyncIterator[Attachment]:
        """Connect to a TCP port at which a worker listens on its node, and yield the open stream.

        Raises:
            UnavailableError: if no process of the worker listens there.
        """
        asked = OpenStream(stream=_fresh(), job=JobId(job), rank=Rank(rank), what=PORT, port=port)
        async with self._opened(asked) as made:
            yield made

    @contextlib.asynccontextmanager
    async def _opened(self, asked: OpenStream) -> AsyncIterator[Attachment]:
        if self._stream_channel is None:
            self._stream_channel = StreamChannel(await self._log_socket())
        made = self._stream_channel.open(asked)
        try:
            await made.wait_opened()
            yield made
        finally:
            await self._stream_channel.forget(made)


def _fresh() -> str:
    return uuid.uuid4().hex
