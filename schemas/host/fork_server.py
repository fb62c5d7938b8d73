"""Fork server: a process that forks workers, reaps them, and records their exits.

A server starts no thread, because forked processes would inherit a broken copy. It outlives the
agent that started it, and a new agent connects to it. A child waits until its agent has checked it
and placed it in its control group. When a worker exits, the server writes the exit status into the
worker's folder. If a worker fails before its program starts, the server reports a failed start and
writes no exit status.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
from setproctitle import setproctitle

from schemas.codec import TO_ZYGOTE, encode
from schemas.errors import MalformedMessageError, OnesError
from schemas.wire import Message
from schemas.wire.worker import (
    ZYGOTE_TITLE,
    ExitStatus,
    Fork,
    Forked,
    ForkFailed,
    Held,
    LetGo,
    ProcessMark,
    ZygoteReady,
)

if TYPE_CHECKING:
    from asyncio import StreamReader

FRAME: Final = struct.Struct(">I")
RECEIVE: Final = 65536
CHECK_INTERVAL_S: Final = 1.0  # interval between checks of the socket's file
GO: Final = b"\0"  # over a gate, precedes the secrets of a child that starts, else an error text
NO_SECRETS: Final[Mapping[str, str]] = {}
MAX_ERROR_CHARACTERS: Final = 1000  # below the limit of an atomic write to a pipe


@dataclass(frozen=True, slots=True)
class _WorkerStart:
    """Folder and pipes of a forked child."""

    folder: Path  # folder of the worker
    line: int  # pipe to the zygote: carries an error, or is closed when the script starts
    gate: int  # pipe that carries the signal to start


@dataclass(eq=False, slots=True)
class _Child:
    forked: Forked
    folder: Path
    pidfd: int
    requester: socket.socket  # connection of the agent that requested the fork
    line: int | None  # None after the script has started
    gate: int | None  # pipe to a child that waits; None after it was released
    error_text: bytearray = field(default_factory=bytearray)  # error received over `line`


class ForkServer:
    """Main loop of a fork server: receives fork requests and reports the exits of children.

    An existing socket file at `path` is replaced.
    """

    def __init__(self, path: Path, torch: str = "") -> None:
        self._path = path
        self._torch = torch  # version of torch; empty: the server has not imported it
        self._selector = selectors.DefaultSelector()
        self._listener = _listen_at(path)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._children: set[_Child] = set()

    def serve(self) -> _WorkerStart:
        """Fork and reap forever; return only in a forked child."""
        setproctitle(f"{ZYGOTE_TITLE} {self._path}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            self._restore_socket_file()
            for key, _ in self._selector.select(CHECK_INTERVAL_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    worker_start = self._read(key.fileobj)
                    if worker_start is not None:
                        return worker_start
                elif key.data in self._children:
                    self._handle_child(key.data)

    def _restore_socket_file(self) -> None:
        """Recreate the socket's file if it was deleted, because agents find the zygote by it.

        Exit if the folder is gone too, and there are neither children nor an agent.
        """
        if os.path.lexists(self._path):
            return
        try:
            fresh = _listen_at(self._path)
        except OSError:  # there is no room or no folder; the next check retries
            if not (self._children or self._buffers or self._path.parent.exists()):
                sys.exit(0)
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = fresh
        self._selector.register(fresh, selectors.EVENT_READ)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._buffers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        ready = ZygoteReady(pid=os.getpid(), python=sys.executable, torch=self._torch)
        self._send(connection, ready)

    def _read(self, connection: socket.socket) -> _WorkerStart | None:
        try:
            data = connection.recv(RECEIVE)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            del self._buffers[connection]
            connection.close()
            for child in self._children:
                if child.requester is connection:
                    self._release(child, "its agent is gone")
            return None
        buffer = self._buffers[connection]
        buffer.extend(data)
        while len(buffer) >= FRAME.size:
            (length,) = FRAME.unpack_from(buffer)
            if len(buffer) < FRAME.size + length:
                break
            body = bytes(buffer[FRAME.size : FRAME.size + length])
            del buffer[: FRAME.size + length]
            try:
                message = TO_ZYGOTE.decode(body)
            except OnesError as error:
                sys.stderr.write(f"dropped: {error}\n")
                continue
            if isinstance(message, Fork):
                if (worker_start := self._fork(connection, message)) is not None:
                    return worker_start
            elif isinstance(message, LetGo):
                for child in self._children:
                    if str(child.folder) == message.folder:
                        self._release(child, message.error, message.secrets)
        return None

    @staticmethod
    def _release(child: _Child, error: str, secrets: Mapping[str, str] = NO_SECRETS) -> None:
        if child.gate is None:
            return
        data = error[:MAX_ERROR_CHARACTERS].encode() or GO + msgspec.msgpack.encode(secrets)
        with contextlib.suppress(OSError):  # the child was killed
            os.write(child.gate, data)
        os.close(child.gate)
        child.gate = None

    def _fork(self, connection: socket.socket, request: Fork) -> _WorkerStart | None:
        folder = Path(request.folder)
        try:
            line, childs_end = os.pipe()
            childs_gate, gate = os.pipe()
            try:
                pid = os.fork()
            except OSError:
                for descriptor in (line, childs_end, childs_gate, gate):
                    _close(descriptor)
                raise
        except OSError as error:
            failed = ForkFailed(folder=str(folder), error=f"cannot fork: {error.strerror}")
            self._send(connection, failed)
            return None
        if pid == 0:
            os.setsid()
            os.close(line)
            os.close(gate)
            self._close_inherited()
            return _WorkerStart(folder, childs_end, childs_gate)
        os.close(childs_end)
        os.close(childs_gate)
        os.set_blocking(line, False)
        forked = Forked(folder=str(folder), pid=pid, started_ticks=_ticks(pid))
        child = _Child(forked, folder, os.pidfd_open(pid), connection, line, gate)
        self._children.add(child)
        for descriptor in (child.pidfd, line):
            self._selector.register(descriptor, selectors.EVENT_READ, child)
        self._send(connection, Held(folder=request.folder, pid=pid))
        return None

    def _close_inherited(self) -> None:
        self._listener.close()
        for connection in self._buffers:
            connection.close()
        for child in self._children:
            os.close(child.pidfd)
            _close(child.line)
            _close(child.gate)
        self._selector.close()

    def _handle_child(self, child: _Child) -> None:
        """Handle an event of a child: its script started or cannot start, or the child exited."""
        pid, status, usage = os.wait4(child.forked.pid, os.WNOHANG)
        ended = pid != 0
        if child.line is not None:
            self._read_error(child, child.line, ended=ended)
        if ended:
            self._children.remove(child)
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
            _close(child.gate)
            if not child.error_text:
                self._write_exit(child.folder, status, usage)

    def _read_error(self, child: _Child, line: int, *, ended: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(line, RECEIVE):
                child.error_text += data
            ended = True
        if not ended:
            return
        self._selector.unregister(line)
        os.close(line)
        child.line = None
        if child.error_text:
            failed = ForkFailed(folder=str(child.folder), error=child.error_text.decode())
            self._send(child.requester, failed)
        else:
            self._send(child.requester, child.forked)

    @staticmethod
    def _write_exit(folder: Path, status: int, usage: resource.struct_rusage) -> None:
        code = os.waitstatus_to_exitcode(status)
        ended = ExitStatus(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            at=time.time(),
            max_rss_bytes=usage.ru_maxrss * 1024,
            cpu_s=usage.ru_utime + usage.ru_stime,
        )
        with contextlib.suppress(OSError):  # if the folder is gone or the disk is full
            write_message(folder / "exit", ended)

    @staticmethod
    def _send(connection: socket.socket, message: Message) -> None:
        with contextlib.suppress(OSError):  # agent gone: the next agent reads the folders
            connection.sendall(framed(message))


def framed(message: Message) -> bytes:
    """Return the bytes of a message, after their number."""
    data = encode(message)
    return FRAME.pack(len(data)) + data


async def read_frame(reader: StreamReader, most: int) -> bytes:
    """Return the bytes of the next message.

    Raises:
        MalformedMessageError: if it has more than `most` bytes.
        IncompleteReadError: at the end of the connection.
    """
    (length,) = FRAME.unpack(await reader.readexactly(FRAME.size))
    if length > most:
        raise MalformedMessageError(f"a message of {length} bytes")
    return await reader.readexactly(length)


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def write_message(path: Path, message: Message) -> None:
    """Write a message to a file atomically."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(encode(message))
    fresh.rename(path)


def process_age_s() -> float:
    """Return the seconds since this process was started, in steps of a clock tick (10 ms)."""
    started_s = _ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _ticks(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def _listen_at(path: Path) -> socket.socket:
    """Return a listening socket; its file appears only when the socket accepts connections."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        listener.listen(8)
        listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        fresh.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


def serve_forks(
    path: Path,
    prepare: Callable[[Path, Mapping[str, str]], Callable[[], NoReturn]],
    torch: str = "",
) -> NoReturn:
    """Run a fork server. Each child calls `prepare`, and then what that returns.

    `prepare` gets the folder and the secret variables of the worker. A failure before that is
    reported as a failed start.
    """
    gc.collect()
    gc.freeze()  # so that the children's collectors do not write to shared pages
    start = ForkServer(path, torch).serve()
    try:
        secrets = _await_start(start.gate)
        _become_worker(start.folder)
        run = prepare(start.folder, secrets)
    except BaseException as error:  # noqa: BLE001 - no line of the program has run
        _report_failure(start.line, error)
    os.close(start.line)
    run()


def _await_start(gate: int) -> dict[str, str]:
    """Wait until the agent has checked this process and placed it in its control group.

    Return the secret variables of the worker. They come over a pipe, so that no file has them.

    Raises:
        OSError: if the agent or the server is gone, or if the agent refuses the process.
    """
    with os.fdopen(gate, "rb") as pipe:
        data = pipe.read()
    if not data.startswith(GO):
        raise OSError(data.decode(errors="replace") or "its zygote is gone")
    return msgspec.msgpack.decode(data[len(GO) :], type=dict[str, str])


def _become_worker(folder: Path) -> None:
    """Send the output of this process to the worker's log, and record the process in `folder`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(folder / "log", flags, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    mark = ProcessMark(pid=os.getpid(), started_ticks=_ticks(os.getpid()))
    write_message(folder / "process", mark)


def _report_failure(line: int, error: BaseException) -> NoReturn:
    """Report the error over the pipe `line`, which works even on a full disk, and exit."""
    if isinstance(error, OSError):
        problem = f" {error.filename}:" if error.filename else ""
        text = f"cannot start a worker:{problem} {error.strerror or error}"
    else:
        text = f"cannot start a worker: {error!r}"
    with contextlib.suppress(OSError):  # the server is gone
        os.write(line, text[:MAX_ERROR_CHARACTERS].encode(errors="replace"))
    os._exit(1)
