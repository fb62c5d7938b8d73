"""Forks workers from a process with torch imported, and reaps them.

One zygote for each interpreter on a node. It starts no thread, touches no device and never runs
backward, because a fork would inherit the wreck of either. It outlives the agent that started it:
an agent that comes back connects again. When a worker ends it writes how into the worker's folder.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Final, NoReturn

import torch
import torch._dynamo  # the first optimizer imports it: 1.5 s that every worker would pay
import torch.utils.data

from elastic.worker import run_script
from elastic.worker.script_output import LossyOutput
from schemas.codec import TO_ZYGOTE, encode
from schemas.errors import OnesError
from schemas.messages import Message
from schemas.messages.worker import ExitStatus, Forked, ForkFailed, ProcessMark, ZygoteReady

FRAME: Final = struct.Struct(">I")
RECEIVE: Final = 65536


class Zygote:
    """The zygote's loop: fork requests in, children's ends out.

    Args:
        path: of its Unix socket; one that is there is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        self._listener.bind(str(fresh))
        self._listener.listen(8)
        self._listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        fresh.rename(path)  # who sees the name can connect
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._children: dict[int, tuple[int, Path]] = {}  # pidfd -> (pid, folder)

    def serve(self) -> Path | None:
        """Fork and reap until told to stop; in a child, return the folder of its worker."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    folder = self._read(key.fileobj)
                    if folder is not None:
                        return folder
                else:
                    self._reap(key.fd)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._buffers[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        ready = ZygoteReady(pid=os.getpid(), python=sys.executable, torch=str(torch.__version__))
        self._send(connection, ready)

    def _read(self, connection: socket.socket) -> Path | None:
        try:
            data = connection.recv(RECEIVE)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            del self._buffers[connection]
            connection.close()
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
                folder = Path(TO_ZYGOTE.decode(body).folder)
            except OnesError as error:
                sys.stderr.write(f"dropped: {error}\n")
                continue
            if self._fork(connection, folder):
                return folder
        return None

    def _fork(self, connection: socket.socket, folder: Path) -> bool:
        """Fork the worker of `folder`; True in the child."""
        try:
            pid = os.fork()
        except OSError as error:
            failed = ForkFailed(folder=str(folder), error=f"cannot fork: {error.strerror}")
            self._send(connection, failed)
            return False
        if pid == 0:
            self._become_worker(folder)
            return True
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, folder)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._send(connection, Forked(folder=str(folder), pid=pid, started_ticks=_ticks(pid)))
        return False

    def _become_worker(self, folder: Path) -> None:
        os.setsid()
        self._listener.close()
        for connection in self._buffers:
            connection.close()
        for pidfd in self._children:
            os.close(pidfd)
        self._selector.close()
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
        _write(folder / "process", mark)

    def _reap(self, pidfd: int) -> None:
        pid, folder = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        ended = ExitStatus(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            at=time.time(),
            max_rss_bytes=usage.ru_maxrss * 1024,
            cpu_s=usage.ru_utime + usage.ru_stime,
        )
        with contextlib.suppress(OSError):  # the folder is gone or the disk is full
            _write(folder / "exit", ended)

    @staticmethod
    def _send(connection: socket.socket, message: Message) -> None:
        data = encode(message)
        with contextlib.suppress(OSError):  # the agent died; its successor looks at the folders
            connection.sendall(FRAME.pack(len(data)) + data)


def _write(path: Path, message: Message) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(encode(message))
    fresh.rename(path)


def _ticks(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[19])


def main() -> None:
    """Serve; a forked child leaves the loop and becomes its worker."""
    parser = argparse.ArgumentParser(prog="elastic.worker.zygote", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    path = parser.parse_args().socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.save({}, io.BytesIO())  # imports what the first checkpoint would import
    gc.collect()
    gc.freeze()  # what is shared with children should not be written to by their collectors
    folder = Zygote(path).serve()
    if folder is None:
        return
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(LossyOutput(descriptor)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in (1, 2)
    )
    _leave(run_script.run_worker(folder), folder)


def _leave(code: int, folder: Path) -> NoReturn:
    """Exit as the interpreter would, but for taking every imported module apart (2.8 s).

    The worker writes its own exit status first, in case its zygote is dead; if it lives, it
    writes it again with what the kernel says.
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - waits for a script's threads
    atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's own order of leaving
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    own = ExitStatus(code=code, signal=None, at=time.time(), max_rss_bytes=0, cpu_s=0.0)
    with contextlib.suppress(OSError):
        _write(folder / "exit", own)
    os._exit(code)


if __name__ == "__main__":
    main()
