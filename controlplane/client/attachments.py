"""Streams to running jobs: terminals, shells and TCP ports, through lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

from msgspec.structs import replace

from controlplane.client.command_line import DEFAULT_SHELL, shell_command
from controlplane.client.files import FileTransfers
from schemas.codec import TO_STREAM_CLIENT, encode
from schemas.errors import OnesError, UnavailableError, UnreachableError, error_from_code
from schemas.ids import JobId, Rank
from schemas.transport.sockets import Socket
from schemas.transport.stream_ends import ALIVE_S, LOST_S, RETRY_S, StreamEnd
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.streams import (
    PORT,
    SHELL,
    TERMINAL,
    OpenStream,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamSignal,
)

CLOSE_S: Final = 1.0  # for the relay's reply when a stream is closed
OPEN_S: Final = 15.0  # until the first reply; an agent may have to start a fork server
SignalName = Literal["HUP", "INT", "QUIT", "TERM", "KILL"]


class StreamLostError(UnreachableError):
    """The other end of a stream did not reply for 20 s."""


class Attachment(StreamEnd):
    """One open stream: bytes in both directions, until it is closed or lost.

    Attributes:
        reason: why the stream was closed, or an empty string.
        code: exit code of its program, if that has ended and is known.
        missed: bytes of output that the terminal does not have any more.
    """

    def __init__(self, asked: OpenStream, send: Callable[[Message], object]) -> None:
        super().__init__(asked.stream, send, credit=0)
        self._asked = asked
        self._error: OnesError | None = None
        self.reason = ""
        self.code: int | None = None
        self._ask()

    async def read(self) -> bytes:
        """Return the next bytes of output; empty: there are no more.

        Raises:
            StreamLostError: if the other end does not reply.
            OnesError: if the stream was refused.
        """
        data = await super().read()
        if not data and self._error is not None:
            raise self._error
        return data

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal's window."""
        self._asked = replace(self._asked, rows=rows, cols=cols)
        self._ask()

    def signal(self, name: SignalName) -> None:
        """Send a signal to the program in the foreground of the terminal."""
        self.send(StreamSignal(stream=self.stream, name=name))

    async def wait_opened(self) -> None:
        """Wait until the other end has replied.

        Raises:
            OnesError: if the stream was refused, or no reply arrives.
        """
        while not self.opened and not self.over:
            await self.wait()
        if self._error is not None:
            raise self._error
        if not self.opened:
            raise UnavailableError(self.reason or "the stream was closed")

    async def detach(self) -> None:
        """Close the stream, and wait for a moment until the relay knows. A program goes on."""
        if not self.over:
            self.send(StreamClosed(stream=self.stream))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    while not self.over:
                        await self.wait()
        self.close()

    def take(self, message: Message) -> None:
        """Process a message of the relay."""
        match message:
            case StreamData():
                self.receive(message)
                self._asked = replace(self._asked, again=True, argv=())
            case StreamOpened(worker=worker):
                self._asked = replace(self._asked, worker=worker)
            case StreamClosed():
                self.reason, self.code = message.reason, message.code
                self.close()
            case Failed(code=code) if not (self.opened and code in {"unavailable", "unreachable"}):
                self._fail(error_from_code(code, message.message, message.hint, message.field))

    def tick(self, now: float) -> None:
        """Keep the stream alive, open it again after a loss, and give up after `LOST_S`."""
        if (silent := self.silent_s(now)) > (LOST_S if self.opened else OPEN_S):
            what = f"the node did not reply for {silent:.0f} s"
            self._fail(StreamLostError(what, f"`ones attach {self._asked.job}` tries again"))
            return
        waits = self.unreceived or not self.opened
        if now - self._asked_at >= (RETRY_S if waits else ALIVE_S):
            self._ask()
        super().tick(now)

    def _fail(self, error: OnesError) -> None:
        self._error = error
        self.close()

    def _ask(self) -> None:
        """Send the request to open the stream, which a node that knows it confirms."""
        self._asked_at = time.monotonic()
        self.send(self._asked)


class Attachments(FileTransfers):
    """Connection that opens streams to one's own running jobs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stream_socket: Socket | None = None
        self._connecting = asyncio.Lock()
        self._streams: dict[bytes, Attachment] = {}
        self._receiving: asyncio.Task[None] | None = None

    async def __aexit__(self, *details: object) -> None:
        """Close all streams and sockets."""
        if self._receiving is not None:
            self._receiving.cancel()
        await super().__aexit__(*details)

    def attach(
        self, job: str, *, rows: int = 24, cols: int = 80
    ) -> AbstractAsyncContextManager[Attachment]:
        """Attach to the terminal of an interactive job, and yield the open stream.

        The stream begins with at most 64 KiB of the latest output. Its end detaches it.

        Raises:
            UnavailableError: if the job does not run or has no terminal.
        """
        return self._opened(job, what=TERMINAL, rows=rows, cols=cols)

    def shell(
        self,
        job: str,
        argv: Sequence[str] = (),
        *,
        rank: int = 0,
        rows: int = 24,
        cols: int = 80,
    ) -> AbstractAsyncContextManager[Attachment]:
        """Start a program on a terminal of its own beside a worker, and yield the open stream.

        The program has the worker's account, folder, variables and limits. It gets HUP when it was
        without a client for 30 s, after 8 h, and at the worker's end.

        Args:
            argv: program and arguments; empty: bash, or sh.
            rank: rank of the worker in the job's current group.

        Raises:
            UnavailableError: if no such worker runs.
        """
        program = tuple(argv or shell_command(DEFAULT_SHELL))
        term, lang = os.environ.get("TERM", ""), os.environ.get("LANG", "")
        return self._opened(
            job, what=SHELL, argv=program, rank=Rank(rank), rows=rows, cols=cols,
            term=term, lang=lang,
        )  # fmt: skip

    def port(
        self, job: str, port: int, *, rank: int = 0
    ) -> AbstractAsyncContextManager[Attachment]:
        """Connect to a TCP port at which a worker listens on its node, and yield the open stream.

        Raises:
            UnavailableError: if no process of the worker listens there.
        """
        return self._opened(job, what=PORT, port=port, rank=Rank(rank))

    @contextlib.asynccontextmanager
    async def _opened(self, job: str, **fields: Any) -> AsyncIterator[Attachment]:
        asked = OpenStream(stream=uuid.uuid4().hex, job=JobId(job), **fields)
        key = asked.stream.encode()
        async with self._connecting:
            if self._stream_socket is None:
                self._stream_socket = await self._log_socket()
                self._receiving = asyncio.create_task(self._receive_streams(self._stream_socket))
            socket = self._stream_socket
        stream = Attachment(asked, lambda message: socket.send(key, encode(message)))
        self._streams[key] = stream
        keeping = asyncio.create_task(stream.keep_alive())
        try:
            await stream.wait_opened()
            yield stream
        finally:
            await stream.detach()
            keeping.cancel()
            del self._streams[key]

    async def _receive_streams(self, socket: Socket) -> None:
        async for incoming in socket:
            stream = self._streams.get(incoming.frames[0])
            if stream is not None:
                with contextlib.suppress(OnesError):
                    stream.take(TO_STREAM_CLIENT.decode(incoming.frames[-1]))
