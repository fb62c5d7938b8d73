"""Terminal of a program, held by a small process beside the program.

The holder has the terminal's other side, the latest output and a Unix socket in the folder of the
worker or shell. It outlives the agent that passes its streams on, and ends with the program. The
program itself is the process that the fork server made, so its signals and its exit code need no
holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from setproctitle import setproctitle

from nodeagent.process_identity import in_session
from schemas.codec import EXIT_STATUS, TO_TERMINAL, encode
from schemas.errors import OnesError
from schemas.host.fork_server import FRAME
from schemas.transport.stream_ends import LOST_S, StreamEnd, StreamError, StreamGapError
from schemas.wire import Message
from schemas.wire.streams import (
    MAX_REASON,
    PIECE,
    OpenStream,
    StreamClosed,
    StreamOpened,
    StreamResized,
    StreamSignal,
)

SOCKET: Final = "terminal"
LATEST: Final = 64 << 10  # bytes of output that a new client gets
MAX_FRAME: Final = 64 << 10
KEEP_S: Final = 600.0  # without a client, the terminal of a job; then its program gets HUP
KEEP_SHELL_S: Final = 30.0
SHELL_S: Final = 8 * 3600.0  # time limit of a shell
HANGUP_S: Final = 10.0  # from HUP to KILL
FIRST_S: Final = 10.0  # from the start, for the first client to come before output is dropped
DRAIN_S: Final = 4.0  # after the program's end, for clients to get its last output
TICK_S: Final = 0.5
LOOK_S: Final = 0.01
GATHER_S: Final = 0.004  # after a small piece of output, so that the next one is larger
SMALL: Final = 2048
EXIT_FILE_S: Final = 2.0
MAX_CLIENTS: Final = 64
SIZE: Final = struct.Struct("HHHH")  # rows, columns, and two unused


class Bounds(NamedTuple):
    """When a terminal hangs up."""

    keep_s: float = KEEP_S
    limit_s: float = float("inf")
    leader: int | None = None  # pidfd of a process with which the program has to end


@dataclass(eq=False, slots=True)
class _Client:
    end: StreamEnd
    rows: int
    cols: int
    writer: asyncio.StreamWriter | None


def start(folder: Path, bounds: Bounds = Bounds()) -> None:  # noqa: B008 - a constant
    """Make this process the owner of a new terminal, held by another process.

    Descriptors 0 to 2 become the terminal. The process has to lead a session without a terminal.

    Raises:
        OSError: if there is no terminal, or no place for its socket.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, SIZE.pack(24, 80, 0, 0))
    listener = listen(folder)
    program = os.getpid()
    pidfd = os.pidfd_open(program)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            if os.fork() == 0:
                os.close(slave)
                _hold(Terminal(folder, master, program, pidfd, bounds), listener)
        os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (master, pidfd):
        os.close(descriptor)
    listener.close()
    os.login_tty(slave)


def _hold(terminal: Terminal, listener: socket.socket) -> NoReturn:
    setproctitle(f"ones: terminal of {terminal.folder.name}")
    for name in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)

    async def run() -> NoReturn:
        try:
            await terminal.run(listener)
        finally:
            with contextlib.suppress(OSError):
                (terminal.folder / SOCKET).unlink()
            os._exit(0)  # at once: the end of a loop reports the tasks of connections

    asyncio.run(run())
    os._exit(0)


def listen(folder: Path) -> socket.socket:
    """Return a listening socket in a folder, whose path may be longer than the kernel allows."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder) as path:
        (folder / SOCKET).unlink(missing_ok=True)
        listener.bind(path)
    (folder / SOCKET).chmod(0o600)
    listener.listen(8)
    listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    return listener


def connect(folder: Path, uid: int) -> socket.socket:
    """Connect to the terminal of a folder. The caller acts as the folder's owner.

    Raises:
        OSError: if there is none, or if its socket belongs to a process of another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # noqa: FBT003
        with _short(folder) as path:
            connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iII", peer)[1] != uid:
            raise PermissionError(errno.EPERM, "the terminal belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that fits into the 107 bytes of a socket's address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class Terminal:
    """Streams of one terminal. The program blocks while a client's window is full."""

    def __init__(self, folder: Path, master: int, program: int, pidfd: int, bounds: Bounds) -> None:
        self.folder = folder
        self._master = master
        self._program = program
        self._pidfd = pidfd
        self._bounds = bounds
        self._latest = bytearray()
        self._end = 0  # offset after the latest output
        self._clients: dict[str, _Client] = {}
        self._input: deque[tuple[_Client, bytes]] = deque()
        self._reading = False
        self._left_at = self._began_at = time.monotonic()
        self._hung_up_at: float | None = None
        self._over = False  # no process has the terminal open
        self._gathers = False
        self._connections = 0
        self._awaits_client = True  # the first one, which should miss nothing

    async def run(self, listener: socket.socket) -> None:
        """Serve until the program has ended and its last output was received."""
        os.set_blocking(self._master, False)
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._pidfd, gone.set)
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        try:
            self._read_more()
            while not gone.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), TICK_S)
                self._tick(time.monotonic())
            loop.remove_reader(self._pidfd)
            await self._finish()
        finally:
            server.close()  # without a wait for its connections, whose clients may stay

    async def _finish(self) -> None:
        """Send the last output, for a limited time, and the exit code."""
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and not self._drained():
            await asyncio.sleep(LOOK_S if self._over else 0)
        await self._say_goodbye()

    @property
    def connected(self) -> int:
        """Number of open connections of clients."""
        return self._connections

    # --- the program's side

    def _read_more(self) -> None:
        """Read output exactly while every client has room for it."""
        wanted = not self._over and not self._gathers and self._room() > 0
        if wanted != self._reading:
            loop = asyncio.get_running_loop()
            if wanted:
                loop.add_reader(self._master, self._on_output)
            else:
                loop.remove_reader(self._master)
            self._reading = wanted

    def _room(self) -> int:
        if self._awaits_client:
            return LATEST - len(self._latest)
        return min([one.end.outgoing.room for one in self._clients.values()], default=PIECE)

    def _on_output(self) -> None:
        try:
            data = os.read(self._master, min(PIECE, self._room()))
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal open; one may open it again
            data = b""
        if not data:
            self._over = True
            self._read_more()
            asyncio.get_running_loop().call_later(TICK_S, self._look_again)
            return
        self._latest += data
        del self._latest[:-LATEST]
        self._end += len(data)
        for client in self._clients.values():
            self._send(client, *client.end.outgoing.send(client.end.stream, data))
        self._gathers = len(data) < SMALL
        if self._gathers:
            asyncio.get_running_loop().call_later(GATHER_S, self._look_again)
        self._read_more()

    def _look_again(self) -> None:
        self._over = self._gathers = False
        self._read_more()

    def _write_more(self) -> None:
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        while self._input:
            client, data = self._input[0]
            try:
                count = os.write(self._master, data)
            except BlockingIOError:
                if not self._over:
                    loop.add_writer(self._master, self._write_more)
                    return
                count = len(data)
            except OSError:  # no process has the terminal open
                count = len(data)
            self._input.popleft()
            if count < len(data):
                self._input.appendleft((client, data[count:]))
            self._send(client, *client.end.consume(count, now))
        loop.remove_writer(self._master)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(os.tcgetpgrp(self._master), number)

    def _hang_up(self, now: float) -> None:
        """Send HUP to the program and the job in the foreground, and KILL to what stays."""
        if self._hung_up_at is None:
            self._hung_up_at = now
            self._signal(signal.SIGHUP)
            with contextlib.suppress(OSError):
                os.killpg(self._program, signal.SIGHUP)
        elif now - self._hung_up_at >= HANGUP_S:
            for pid in in_session(self._program):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    # --- the clients' side

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = None
        self._connections += 1
        try:
            while True:
                (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > MAX_FRAME:
                    break
                message = TO_TERMINAL.decode(await reader.readexactly(length))
                if isinstance(message, OpenStream):
                    client = self._open(message, writer)
                elif client is not None and message.stream == client.end.stream:
                    self._receive(client, message)
                if client is None:
                    break
        except (OSError, EOFError, OnesError):
            pass
        finally:
            if client is not None and client.writer is writer:
                client.writer = None  # it may come back until it counts as lost
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self._connections -= 1

    def _open(self, asked: OpenStream, writer: asyncio.StreamWriter) -> _Client | None:
        now, start = time.monotonic(), self._end - len(self._latest)
        client = self._clients.get(asked.stream)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                closed = StreamClosed(stream=asked.stream, reason="too many clients are attached")
                _write(writer, closed)
                return None
            received = start if asked.received is None else asked.received
            offset = min(max(start, received), self._end)
            end = StreamEnd(asked.stream, now, offset, asked.kept_from)
            client = _Client(end, asked.rows, asked.cols, writer)
            self._clients[asked.stream] = client
            self._send(client, self._opened(client, offset))
            rest = bytes(self._latest[offset - start :])
            self._send(client, *client.end.outgoing.send(asked.stream, rest))
            self._awaits_client = False
            if asked.received is None or asked.received != offset:
                self._signal(signal.SIGWINCH)  # a program that fills the window draws it again
        else:
            client.writer, client.rows, client.cols = writer, asked.rows, asked.cols
            client.end.heard(now)
            if asked.received is not None:
                with contextlib.suppress(StreamError):
                    client.end.outgoing.mark_received(asked.received)
            self._send(client, self._opened(client, client.end.outgoing.received))
            self._send(client, *client.end.outgoing.again(asked.stream))
        self._resize()
        self._read_more()
        return client

    @staticmethod
    def _opened(client: _Client, offset: int) -> StreamOpened:
        received = client.end.incoming.consumed
        return StreamOpened(stream=client.end.stream, received=received, offset=offset)

    def _receive(self, client: _Client, message: Message) -> None:
        match message:
            case StreamResized():
                client.rows, client.cols = message.rows, message.cols
                client.end.heard(time.monotonic())
                self._resize()
                return
            case StreamSignal(name=name):
                self._signal(signal.Signals[f"SIG{name}"])
                return
            case StreamClosed():
                self._forget(client)
                return
        try:
            data = client.end.take(message, time.monotonic())
        except StreamGapError as error:
            self._close(client, error.message, again=True)
            return
        except StreamError as error:
            self._close(client, error.message)
            self._forget(client)
            return
        if data:
            self._input.append((client, data))
            self._write_more()
        self._read_more()

    def _resize(self) -> None:
        if not self._clients:
            return
        rows = min(one.rows for one in self._clients.values())
        cols = min(one.cols for one in self._clients.values())
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, SIZE.pack(rows, cols, 0, 0))

    def _forget(self, client: _Client) -> None:
        if self._clients.pop(client.end.stream, None) is not None:
            self._left_at = time.monotonic()
        if client.writer is not None:
            client.writer.close()
        self._resize()
        self._read_more()

    def _await_client(self, now: float) -> None:
        if self._awaits_client and now - self._began_at > FIRST_S:
            self._awaits_client = False
            self._read_more()

    def _tick(self, now: float) -> None:
        self._await_client(now)
        for client in list(self._clients.values()):
            if client.end.silent_s(now) > LOST_S:
                self._close(client, "the client is silent", again=True)
                self._forget(client)
            else:
                self._send(client, *client.end.due(now))
        bounds, leader = self._bounds, self._bounds.leader
        unused = not self._clients and now - self._left_at > bounds.keep_s
        if unused or now - self._began_at > bounds.limit_s or (leader and _ended(leader)):
            self._hang_up(now)

    def _drained(self) -> bool:
        """Read and send more of the last output. True if there is no more."""
        self._await_client(time.monotonic())
        before = self._end
        if (room := self._room()) > 0:
            self._on_output()
        connected = all(one.writer is not None for one in self._clients.values())
        all_read = room > 0 and self._end == before
        return all_read and connected and not self._awaits_client

    async def _say_goodbye(self) -> None:
        code = await _exit_code(self.folder)
        for client in self._clients.values():
            self._send(client, StreamClosed(stream=client.end.stream, reason="ended", code=code))
        for client in list(self._clients.values()):
            if client.writer is not None:
                client.writer.transport.set_write_buffer_limits(0)
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(client.writer.drain(), 1.0)
                    client.writer.close()

    def _close(self, client: _Client, reason: str, *, again: bool = False) -> None:
        reason = reason[:MAX_REASON]
        self._send(client, StreamClosed(stream=client.end.stream, reason=reason, again=again))

    def _send(self, client: _Client, *messages: Message) -> None:
        for message in messages:
            if client.writer is not None and not client.writer.is_closing():
                _write(client.writer, message)


def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    data = encode(message)
    writer.write(FRAME.pack(len(data)) + data)


def _ended(pidfd: int) -> bool:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, 0)
        return False
    return True


async def _exit_code(folder: Path) -> int | None:
    """Return the exit code that the fork server writes; 128 + N after signal N."""
    until = time.monotonic() + EXIT_FILE_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, OnesError):
            status = EXIT_STATUS.decode((folder / "exit").read_bytes())
            return 128 + status.signal if status.signal else status.code
        await asyncio.sleep(0.01)
    return None


def program_of(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a program and its arguments; without any, a shell."""
    return argv or ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
