"""Cuts off local processes that send more than is taken of them, over a bound Unix socket.

libzmq keeps every frame of a message until its last one, however many there are, and a Unix socket
does not count what came over it. So what this process has in memory is watched. Where it grows,
those go of whom the kernel holds much again and again; where it grows further and nobody stands
out, all connections are cut: what was kept of them is free then, and honest peers connect again and
lose nothing but moments.
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

from schemas.transport.flood_guard import copied, latest_events, memory_bytes

GROWTH: Final = 16 << 20  # bytes of memory, with which connections are looked at
MOST_GROWTH: Final = 64 << 20  # the same, with which all are cut
EVERY_S: Final = 0.05
LOOKS: Final = 16  # one after the other; who sends without end is behind in most of them
LOOK_S: Final = 0.003
BEHIND: Final = 4  # looks, at least
UNREAD: Final = 16 << 10  # bytes that the kernel holds of one who is behind: more than a message
MAX_OF_USER: Final = 1000  # connections of one uid; a quarter of the files of this process, at most
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class _Connection:
    inode: int  # of its socket: descriptors are used again
    pid: int  # of whoever connected
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


class LocalWatch:
    """The connections of one Unix socket, and the memory of this process.

    Args:
        memory: what this process has in memory, bytes.
    """

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
        self._monitor.rcvhwm = 0  # libzmq's own thread would wait for room
        self._monitor.connect(place)
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._of_user: Counter[int] = Counter()
        self._path = path
        self._memory = memory
        self._least = self._next_look = 0
        self._calm()

    @property
    def count(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    async def run(self, refused: Callable[[str], None]) -> None:
        """Watch, for ever.

        Args:
            refused: called with a line for each connection that was cut, or one for all of them.
        """
        while True:
            await asyncio.sleep(EVERY_S)
            more = True
            while more:
                lines, more = self.notice()
                for line in lines:
                    refused(line)
                await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # no file can be opened at the moment
                for line in await self._look():
                    refused(line)

    def notice(self) -> tuple[list[str], bool]:
        """Take in who has connected and who has gone; those that are too many are cut.

        Returns:
            A line for each that was cut, and whether there may be more.
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
        if connection is None:  # it is gone already
            return []
        self._connections[descriptor] = connection
        self._of_user[connection.uid] += 1
        most = most_of_user()
        if self._of_user[connection.uid] <= most:
            return []
        self._cut(descriptor)
        return [f"{connection} is cut off: {most} of that user are connected"]

    async def _look(self) -> list[str]:
        now = self._memory()
        if now < self._least:
            self._calm()
        if now < self._next_look:
            return []
        if lines := await self._cut_those_behind():
            self._calm()
            return lines
        if self._memory() - self._least < MOST_GROWTH:
            self._next_look += GROWTH
            return []
        grown = (self._memory() - self._least) >> 20
        for descriptor in list(self._connections):
            self._cut(descriptor)
        self._calm()
        return [f"all have to connect again: {grown} MiB more are in use, and nobody stands out"]

    async def _cut_those_behind(self) -> list[str]:
        """Cut connections of whom the kernel holds much in many looks."""
        behind: Counter[int] = Counter()
        for _ in range(LOOKS):
            for descriptor, connection in self._connections.items():
                behind[descriptor] += _unread(descriptor, connection) > UNREAD
            await asyncio.sleep(LOOK_S)
        lines, most = [], max(behind.values(), default=0)
        for descriptor in [
            each for each, times in behind.items() if times >= max(BEHIND, most / 2)
        ]:
            if (found := self._connections.get(descriptor)) is None:
                continue
            self._cut(descriptor)
            lines.append(f"{found} is cut off: it sends more than is taken")
        return lines

    def _calm(self) -> None:
        self._least = self._memory()
        self._next_look = self._least + GROWTH

    def _cut(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        self._forget(descriptor)
        with contextlib.suppress(OSError), copied(descriptor) as wire:
            if os.fstat(wire.fileno()).st_ino == connection.inode:
                wire.shutdown(socket.SHUT_RDWR)

    def _connection(self, descriptor: int) -> _Connection | None:
        with contextlib.suppress(OSError), copied(descriptor) as wire:
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
        """Watch no more."""
        self._monitor.close(linger=0)


def most_of_user() -> int:
    """How many connections one uid may have: without a file left, libzmq ends its process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OF_USER if soft == resource.RLIM_INFINITY else min(MAX_OF_USER, soft // 4)


def _unread(descriptor: int, connection: _Connection) -> int:
    """Bytes in the kernel that libzmq has not taken yet."""
    with contextlib.suppress(OSError), copied(descriptor) as wire:
        if os.fstat(wire.fileno()).st_ino == connection.inode:
            size = fcntl.ioctl(wire.fileno(), termios.FIONREAD, bytes(4))
            return int.from_bytes(size, "little")
    return 0
