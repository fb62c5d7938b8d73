"""Flood guard of a Unix socket: disconnects local processes that send more than is read.

libzmq keeps all frames of a message until the last one arrives, and a Unix socket does not count
its bytes. Therefore the memory of this process is watched. When it grows, connections for which the
kernel repeatedly holds many bytes are cut. When it grows further and no connection stands out, all
connections are cut: this frees their memory, and honest peers reconnect within moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import socket
import struct
import termios
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from schemas.transport.flood_guard import duplicate, latest_events, memory_bytes

CHECK_GROWTH_BYTES: Final = 16 << 20  # growth of memory that leads to a check
MAX_GROWTH_BYTES: Final = 64 << 20  # bytes of memory that lead to a cut of all connections
CHECK_INTERVAL_S: Final = 0.05
SAMPLES: Final = 16  # samples of a check; an endless sender exceeds MAX_KERNEL_BYTES
SAMPLE_INTERVAL_S: Final = 0.003  # between two samples
MIN_SAMPLES: Final = 4  # samples above MAX_KERNEL_BYTES that lead to a cut, at least
MAX_KERNEL_BYTES: Final = 16 << 10  # bytes in the kernel of one connection: more than a message
MAX_CONNECTIONS_PER_USER: Final = 1000  # and at most a quarter of RLIMIT_NOFILE
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class _Connection:
    inode: int  # of the socket: descriptors are reused
    pid: int  # of the peer
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


class UnixFloodGuard:
    """Guard of the connections of one Unix socket; `memory` returns this process's bytes."""

    _numbers = itertools.count()

    def __init__(
        self,
        bound: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
        path: str,
        memory: Callable[[], int] = memory_bytes,
    ) -> None:
        place = f"inproc://local-connections-{next(self._numbers)}"
        bound.monitor(place, _EVENTS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # else libzmq's own thread would block
        self._monitor.connect(place)
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._of_user: Counter[int] = Counter()
        self._path = path
        self._memory = memory
        self._minimum = self._next_check_bytes = 0
        self._reset()

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._connections)

    async def run(self, refused: Callable[[str], None]) -> None:
        """Watch until cancelled; `refused` receives a line for each cut, or one for all."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            more = True
            while more:
                lines, more = self.process_events()
                for line in lines:
                    refused(line)
                await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # no descriptor is free at the moment
                for line in await self._check():
                    refused(line)

    def process_events(self) -> tuple[list[str], bool]:
        """Process connection events, and cut connections beyond the limit of their user.

        Returns a line for each cut, and whether more events may be waiting.
        """
        events = latest_events(self._monitor)
        cut = []
        for descriptor, event in events.of.items():
            self._forget(descriptor)
            if event == zmq.EVENT_ACCEPTED:
                cut += self._accepted(descriptor)
        return cut, events.more

    def _accepted(self, descriptor: int) -> list[str]:
        connection = self._connection(descriptor)
        if connection is None:  # closed already
            return []
        self._connections[descriptor] = connection
        self._of_user[connection.uid] += 1
        most = max_connections_per_user()
        if self._of_user[connection.uid] <= most:
            return []
        self._cut(descriptor)
        return [f"{connection} is cut off: {most} of that user are connected"]

    async def _check(self) -> list[str]:
        now = self._memory()
        if now < self._minimum:
            self._reset()
        if now < self._next_check_bytes:
            return []
        if lines := await self._cut_flooding():
            self._reset()
            return lines
        if self._memory() - self._minimum < MAX_GROWTH_BYTES:
            self._next_check_bytes += CHECK_GROWTH_BYTES
            return []
        grown = (self._memory() - self._minimum) >> 20
        for descriptor in list(self._connections):
            self._cut(descriptor)
        self._reset()
        return [
            f"all connections are cut: {grown} MiB more are in use, and no connection stands out"
        ]

    async def _cut_flooding(self) -> list[str]:
        """Cut connections for which the kernel holds many bytes in many samples."""
        behind: Counter[int] = Counter()
        for _ in range(SAMPLES):
            for descriptor, connection in self._connections.items():
                behind[descriptor] += _unread(descriptor, connection) > MAX_KERNEL_BYTES
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        lines, most = [], max(behind.values(), default=0)
        for descriptor in [
            each for each, times in behind.items() if times >= max(MIN_SAMPLES, most / 2)
        ]:
            if (found := self._connections.get(descriptor)) is None:
                continue
            self._cut(descriptor)
            lines.append(f"{found} is cut off: it sends more than is read")
        return lines

    def _reset(self) -> None:
        self._minimum = self._memory()
        self._next_check_bytes = self._minimum + CHECK_GROWTH_BYTES

    def _cut(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        self._forget(descriptor)
        with contextlib.suppress(OSError), duplicate(descriptor) as wire:
            if os.fstat(wire.fileno()).st_ino == connection.inode:
                wire.shutdown(socket.SHUT_RDWR)

    def _connection(self, descriptor: int) -> _Connection | None:
        with contextlib.suppress(OSError), duplicate(descriptor) as wire:
            if wire.family == socket.AF_UNIX and wire.getsockname() == self._path:
                told = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(told)
                return _Connection(os.fstat(wire.fileno()).st_ino, pid, uid)
        return None

    def _forget(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            self._of_user[connection.uid] -= 1
            if not self._of_user[connection.uid]:
                del self._of_user[connection.uid]

    def close(self) -> None:
        """Stop watching."""
        self._monitor.close(linger=0)


def max_connections_per_user() -> int:
    """Return how many connections one uid may have; libzmq aborts when no descriptor is left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_CONNECTIONS_PER_USER
        if soft == resource.RLIM_INFINITY
        else min(MAX_CONNECTIONS_PER_USER, soft // 4)
    )


def _unread(descriptor: int, connection: _Connection) -> int:
    """Return the bytes in the kernel that libzmq has not read yet."""
    with contextlib.suppress(OSError), duplicate(descriptor) as wire:
        if os.fstat(wire.fileno()).st_ino == connection.inode:
            size = fcntl.ioctl(wire.fileno(), termios.FIONREAD, bytes(4))
            return int.from_bytes(size, "little")
    return 0
