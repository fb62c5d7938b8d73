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
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from setproctitle import setproctitle

from nodeagent.process_identity import in_session
from schemas.codec import EXIT_STATUS, TO_TERMINAL
from schemas.errors import OnesError
from schemas.host.fork_server import framed, read_frame
from schemas.transport.stream_ends import TICK_S, StreamEnd
from schemas.wire import Message
from schemas.wire.streams import PIECE, OpenStream, StreamClosed, StreamData, StreamSignal

SOCKET: Final = "terminal"
LATEST: Final = 64 << 10  # bytes of output that a new client gets
MAX_FRAME: Final = 64 << 10
KEEP_S: Final = 600.0  # without a client, the terminal of a job; then its program gets HUP
KEEP_SHELL_S: Final = 30.0
SHELL_S: Final = 8 * 3600.0  # time limit of a shell
HANGUP_S: Final = 10.0  # from HUP to KILL
FIRST_S: Final = 10.0  # from the start, for the first client to come before output is dropped
DRAIN_S: Final = 4.0  # after the program's end, for clients to get its last output
GATHER_S: Final = 0.004  # after a small piece of output, so that the next one is larger
SMALL: Final = 2048
EXIT_FILE_S: Final = 2.0
MAX_CLIENTS: Final = 64
SIZE: Final = struct.Struct("HHHH")  # rows, columns, and two unused


class Bounds(NamedTuple):
    """Conditions under which a terminal hangs up."""

    keep_s: float = KEEP_S
    limit_s: float = float("inf")
    leader: int | None = None  # pidfd of a process with which the program has to end


class _Client(StreamEnd):
    """Client of a terminal. Its connection may be lost and come back."""

    def __init__(
        self, stream: str, first: int, changed: asyncio.Event, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(stream, self._put, first=first, changed=changed)
        self.writer: asyncio.StreamWriter | None = writer
        self.rows = self.cols = 0
        self.tasks: list[asyncio.Task[None]] = []

    def _put(self, message: Message) -> None:
        if self.writer is not None:
            self.writer.write(framed(message))


def start(folder: Path, bounds: Bounds = Bounds()) -> None:  # noqa: B008 - a constant
    """Make this process the owner of a new terminal, held by another process.

    Descriptors 0 to 2 become the terminal. The process has to lead a session without a terminal.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, SIZE.pack(24, 80, 0, 0))
    listener = listen(folder)
    program = os.getpid()
    pidfd = os.pidfd_open(program)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            if os.fork() == 0:  # it keeps the slave open, so that its reads never fail
                _hold(Terminal(folder, master, program, pidfd, bounds), listener)
        os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (master, pidfd):
        os.close(descriptor)
    listener.close()
    os.login_tty(slave)


def _hold(terminal: Terminal, listener: socket.socket) -> None:
    setproctitle(f"ones: terminal of {terminal.folder.name}")
    for name in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)

    async def run() -> None:
        try:
            await terminal.run(listener)
        finally:
            with contextlib.suppress(OSError):
                (terminal.folder / SOCKET).unlink()
            os._exit(0)  # at once: the end of a loop reports the tasks of connections

    asyncio.run(run())


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
        self._changed = asyncio.Event()
        self._typing = asyncio.Lock()
        self._left_at = self._began_at = time.monotonic()
        self._hung_up_at: float | None = None
        self._awaits_client = True  # the first one, which should miss nothing

    async def run(self, listener: socket.socket) -> None:
        """Serve until the program has ended and its last output was received."""
        os.set_blocking(self._master, False)
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, gone.set)
        server = await asyncio.start_unix_server(self._serve, sock=listener)
        showing = asyncio.create_task(self._show(gone))
        try:
            while not gone.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), TICK_S)
                self._tick(time.monotonic())
            loop.remove_reader(self._pidfd)
            self._changed.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await showing
                    await self._received_by_all()
            await self._say_goodbye()
        finally:
            showing.cancel()
            server.close()  # without a wait for its connections, whose clients may stay

    # --- the program's side

    async def _show(self, gone: asyncio.Event) -> None:
        """Send output exactly while every client has room for it, to the end of the program."""
        loop = asyncio.get_running_loop()
        while True:
            if (room := self._room()) <= 0:
                await self._wait()
                continue
            last = gone.is_set()
            try:
                data = os.read(self._master, min(PIECE, room))
            except BlockingIOError:
                if last:
                    return
                loop.add_reader(self._master, self._changed.set)
                await self._wait()
                loop.remove_reader(self._master)
                continue
            self._latest += data
            del self._latest[:-LATEST]
            self._end += len(data)
            for client in self._clients.values():
                client.write_now(data)
            if len(data) < SMALL:
                await asyncio.sleep(GATHER_S)

    async def _received_by_all(self) -> None:
        for client in self._clients.values():
            client.tell()  # a client replies at once with what it has received
        while self._awaits_client or any(
            one.unreceived or one.writer is None for one in self._clients.values()
        ):
            await self._wait()

    def _room(self) -> int:
        if self._awaits_client:
            return LATEST - len(self._latest)
        return min([one.room for one in self._clients.values()], default=PIECE)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _type(self, client: _Client) -> None:
        """Write what a client sends, as soon as the terminal takes it."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        while data := await client.read():
            async with self._typing:
                while data:
                    try:
                        data = data[os.write(self._master, data) :]
                    except BlockingIOError:
                        ready.clear()
                        loop.add_writer(self._master, ready.set)
                        await ready.wait()
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
        try:
            while True:
                message = TO_TERMINAL.decode(await read_frame(reader, MAX_FRAME))
                if isinstance(message, OpenStream):
                    client = self._open(message, writer)
                elif client is not None and message.stream == client.stream:
                    self._receive(client, message)
        except (OSError, EOFError, OnesError):
            pass
        finally:
            if client is not None and client.writer is writer:
                client.writer = None  # it may come back until it counts as lost
            writer.close()

    def _open(self, asked: OpenStream, writer: asyncio.StreamWriter) -> _Client | None:
        client = self._clients.get(asked.stream)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                closed = StreamClosed(stream=asked.stream, reason="too many clients are attached")
                writer.write(framed(closed))
                return None
            first = self._end - len(self._latest)
            client = _Client(asked.stream, first, self._changed, writer)
            client.write_now(bytes(self._latest))
            client.tasks = [asyncio.create_task(one(client)) for one in (self._attend, self._type)]
            self._clients[asked.stream] = client
            self._awaits_client = False
            self._signal(signal.SIGWINCH)  # a program that fills the window draws it again
        client.writer, client.rows, client.cols = writer, asked.rows, asked.cols
        client.tell()
        self._clients_changed()
        return client

    def _receive(self, client: _Client, message: Message) -> None:
        match message:
            case StreamData():
                client.receive(message)
            case StreamSignal(name=name):
                self._signal(signal.Signals[f"SIG{name}"])
            case StreamClosed():
                client.close()

    async def _attend(self, client: _Client) -> None:
        """Forget a client when its stream is over."""
        await client.keep_alive()
        del self._clients[client.stream]
        self._left_at = time.monotonic()
        if client.writer is not None:
            client.writer.close()
        self._clients_changed()

    def _clients_changed(self) -> None:
        self._changed.set()
        if self._clients:
            rows = min(one.rows for one in self._clients.values())
            cols = min(one.cols for one in self._clients.values())
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, SIZE.pack(rows, cols, 0, 0))

    def _tick(self, now: float) -> None:
        if self._awaits_client and now - self._began_at > FIRST_S:
            self._awaits_client = False
            self._changed.set()
        bounds, leader = self._bounds, self._bounds.leader
        unused = not self._clients and now - self._left_at > bounds.keep_s
        if unused or now - self._began_at > bounds.limit_s or (leader and _ended(leader)):
            self._hang_up(now)

    async def _say_goodbye(self) -> None:
        code = await _exit_code(self.folder)
        for client in list(self._clients.values()):
            client.close("ended", code)
            if (writer := client.writer) is not None:
                with contextlib.suppress(OSError, TimeoutError):
                    writer.close()
                    await asyncio.wait_for(writer.wait_closed(), 1.0)


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
