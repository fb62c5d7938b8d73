"""Flood guards of TCP and Unix sockets, which cut peers that send more than this process reads.

libzmq limits the bytes of a frame and the number of messages in a queue. It does not limit the
bytes of a message or of a queue. A message of a thousand frames, or a queue of large messages, can
use any amount of memory.

TCP counts the bytes of each connection, but a Unix socket does not. For Unix sockets, the guard
watches the memory of this process. When the memory grows, the guard cuts connections for which the
kernel repeatedly has many unread bytes. When the memory grows further and no connection stands out,
the guard cuts all connections. The cut frees their memory, and honest peers soon reconnect.

A stranger can open connections without a handshake until no descriptor is free. Therefore such
connections may have half of the descriptors that are not in use otherwise. Beyond that, the oldest
connection without a message is cut, of the network with the most connections without a handshake
to one port. libzmq does not name the connection of a handshake, so this may also be a silent
connection of a client on that host, which reconnects. A lower limit would cut the nodes of a large
cluster, which all connect at the same time after a restart, and reconnect when they are cut. The
guards need no free descriptor for their own work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import heapq
import itertools
import os
import resource
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from schemas.transport.connection_limits import KeyConnections, ReconnectBackoff

MAX_UNREAD_BYTES: Final = 64 << 20  # limit of arrived, unread bytes of one connection
MAX_TOTAL_UNREAD_BYTES: Final = 256 << 20  # the same limit for all connections together
CHECK_GROWTH_BYTES: Final = 16 << 20  # growth of memory that causes a check
CONNECTION_BYTES: Final = 48 << 10  # memory of an idle connection, which is no growth
CHECK_INTERVAL_S: Final = 0.1
MAX_EVENTS: Final = 1000  # per port at once, so that a port with many events does not block others
CHECKS_PER_TURN: Final = 200  # connections that are checked without returning to the loop
HEARTBEAT_BYTES_PER_S: Final = 100  # bytes of heartbeats, which libzmq reads itself
CURVE_OVERHEAD_BYTES: Final = 33  # added to a frame by encryption
SHORT_FRAME_BYTES: Final = 256  # bytes; shorter frames have a header of 2 bytes, others of 9
_EVENT: Final = struct.Struct("=Hi")  # event, file descriptor
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in struct tcp_info of Linux
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_NUMBERS: Final = itertools.count()
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
MAX_GROWTH_BYTES: Final = 64 << 20  # growth of memory that causes a cut of all connections
UNIX_CHECK_INTERVAL_S: Final = 0.05
SAMPLES: Final = 16  # samples in a check; a flood exceeds MAX_KERNEL_BYTES in many samples
SAMPLE_INTERVAL_S: Final = 0.003  # between samples
MIN_SAMPLES: Final = 4  # minimum number of samples above MAX_KERNEL_BYTES for a cut
MAX_KERNEL_BYTES: Final = 16 << 10  # limit of unread bytes of a connection; a message is smaller
MAX_CONNECTIONS_PER_USER: Final = 1000  # the limit is also at most RLIMIT_NOFILE / 4
MAX_DESCRIPTORS: Final = 1 << 20  # counted, if the limit of descriptors is larger or absent
MAX_SILENT: Final = 24_576  # connections without a handshake
MAX_CUTS: Final = 3000  # such connections that are cut without returning to the loop
SILENT_SHARE: Final = 2  # such connections may have one in so many unused descriptors
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(slots=True)
class _Connection:
    peer: tuple[str, int]
    forgiven: int  # arrived bytes that do not count as unread
    at: float
    port: str  # name of the port


class _Ended(NamedTuple):
    peer: str  # address of the peer
    port: str
    key: bytes  # empty: not known


class Events(NamedTuple):
    """Events of a socket monitor since the last call."""

    of: dict[int, int]  # latest event (accepted or disconnected) by file descriptor
    stopped: bool  # the socket was closed
    more: bool  # more events may be waiting


def _monitor(
    bound: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]
) -> zmq.Socket[bytes]:
    """Return a socket that receives the connection events of a bound socket."""
    place = f"inproc://connections-{next(_NUMBERS)}"
    bound.monitor(place, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 0  # no limit, because libzmq's own thread would block
    monitor.connect(place)
    return monitor


def latest_events(monitor: zmq.Socket[bytes]) -> Events:
    """Return the latest connection event of each descriptor. Earlier events are obsolete."""
    found: dict[int, int] = {}
    for _ in range(MAX_EVENTS):
        try:
            frames = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return Events(found, stopped=False, more=False)
        event, value = _EVENT.unpack(frames[0])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return Events(found, stopped=True, more=False)
        found.pop(value, None)  # so that the order is that of the latest events
        found[value] = event
    return Events(found, stopped=False, more=True)


class FloodGuard:
    """Guard that compares the bytes that arrived over each TCP connection with the bytes read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.keys = KeyConnections(clock)
        self.backoff = ReconnectBackoff(clock)
        self._monitors: dict[str, zmq.Socket[bytes]] = {}  # by port name
        self._ports: dict[str, int] = {}
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._taken: Counter[int] = Counter()
        self._silent = SilentConnections()
        self._spare = SpareDescriptor()
        self._ended: set[int] = set()  # cut connections that libzmq has not closed yet
        self._used = 0  # above the numbers of the connections accepted since the last check
        self._most_peers = 0  # connections with a handshake, at most so far
        self._growth = GrowthDetector(self._data_bytes, CHECK_GROWTH_BYTES)

    def _strangers(self) -> int:
        """Return the number of connections without a handshake."""
        return len(self._silent) - self.keys.admissions

    def _data_bytes(self) -> int:
        """Return the memory of this process, without that of its connections."""
        self._most_peers = max(self._most_peers, len(self._connections) - self._strangers())
        return memory_bytes() - self._most_peers * CONNECTION_BYTES

    def add(
        self, bound: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], name: str = ""
    ) -> None:
        """Watch the connections of a bound TCP socket. `name` is a unique name of its port."""
        self._monitors[name] = _monitor(bound, context)
        self._ports[name] = int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def count_read(self, source: int, sizes: list[int], *, secured: bool) -> None:
        """Count a message that was read from the connection with descriptor `source`."""
        extra = CURVE_OVERHEAD_BYTES if secured else 0
        self._silent.remove(source)
        self._taken[source] += sum(
            size + extra + (2 if size + extra < SHORT_FRAME_BYTES else 9) for size in sizes
        )

    def process_events(self) -> bool:
        """Process connection events of all ports. Return True if more may be waiting."""
        more = [self.process_port_events(port) for port in list(self._monitors)]
        self._limit_silent()
        return any(more)

    def process_port_events(self, port: str) -> bool:
        """Process connection events of one port. Return True if more may be waiting."""
        monitor = self._monitors.get(port)
        if monitor is None:
            return False
        events = latest_events(monitor)
        for descriptor, event in events.of.items():
            self._process_event(event, descriptor, port)
        if events.stopped:
            del self._monitors[port]
            monitor.close()
            self.keys.port_closed(port)
            self.backoff.port_closed(port)
        return events.more

    def _process_event(self, event: int, descriptor: int, port: str) -> None:
        known = self._connections.get(descriptor)
        self._ended.discard(descriptor)
        if event == zmq.EVENT_DISCONNECTED:
            if known is None or known.port == port:  # else another port reuses the descriptor
                self._connections.pop(descriptor, None)
                self._taken.pop(descriptor, None)
                self.keys.closed(descriptor)
                self._silent.remove(descriptor)
        elif (peer := self._peer(descriptor, port)) is not None:
            self._used = max(self._used, descriptor + 1)  # the kernel gives the lowest free number
            self._connections[descriptor] = _Connection(peer, 0, self._clock(), port)
            self.keys.record_opened(descriptor, port, peer[0])
            self._silent.add(descriptor, port, peer[0])

    def _limit_silent(self) -> None:
        strangers = self._strangers()
        taken = max(self._used - len(self._ended), len(self._connections)) - strangers
        self._used = 0
        most = min(MAX_SILENT, max(0, max_descriptors() - taken) // SILENT_SHARE)
        if strangers > most:
            for descriptor in self._silent.surplus(strangers - most, self.keys.admitted):
                self._end(descriptor)

    def descriptors(self) -> list[int]:
        """Return the descriptors of all connections."""
        return list(self._connections)

    def unread_bytes(self, descriptor: int) -> int:
        """Return the number of arrived, unread bytes of a connection; 0 for a closed connection."""
        connection = self._connections.get(descriptor)
        if connection is None:
            return 0
        with contextlib.suppress(OSError), self._spare.duplicate(descriptor) as wire:
            if wire.getpeername()[:2] == connection.peer:
                info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                return self._unread_bytes(descriptor, connection, info)
        del self._connections[descriptor]
        self.keys.closed(descriptor)
        return 0

    def _unread_bytes(self, descriptor: int, connection: _Connection, info: bytes) -> int:
        (received,) = _RECEIVED.unpack_from(info, _RECEIVED_AT)
        unread_bytes = int(received) - self._taken[descriptor] - connection.forgiven
        now = self._clock()
        forgiven = int((now - connection.at) * HEARTBEAT_BYTES_PER_S)
        if forgiven:
            connection.at = now
        # Negative if bytes were read from an earlier connection with this descriptor.
        connection.forgiven += unread_bytes if unread_bytes < 0 else min(unread_bytes, forgiven)
        return max(0, unread_bytes - forgiven)

    def cut(self, descriptor: int) -> str:
        """Cut a connection, record the cut for its key, and return the peer's address.

        Return "" if the connection does not exist.
        """
        ended = self._end(descriptor)
        if ended is None:
            return ""
        self.backoff.cut(ended.port, ended.key)
        return ended.peer

    def _end(self, descriptor: int) -> _Ended | None:
        connection = self._connections.pop(descriptor, None)
        self._silent.remove(descriptor)
        key = self.keys.cut(descriptor)
        if connection is None or self._peer(descriptor, connection.port) != connection.peer:
            return None
        with contextlib.suppress(OSError), self._spare.duplicate(descriptor) as wire:
            # Close with a reset: a peer with a closed window would not receive a FIN.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            wire.shutdown(socket.SHUT_RDWR)
            self._ended.add(descriptor)
        return _Ended("{}:{}".format(*connection.peer), connection.port, key)

    def cut_flooding(self, unread: dict[int, int]) -> list[str]:
        """Cut each connection above its limit. Then cut the largest until the total is allowed.

        `unread` has the unread bytes by descriptor. Return a log line for each cut.
        """
        total = sum(unread.values())
        cut = []
        blamed = set()  # count one cut per key, however many of its connections are cut
        for descriptor, unread_bytes in sorted(unread.items(), key=lambda item: -item[1]):
            if unread_bytes <= MAX_UNREAD_BYTES and total <= MAX_TOTAL_UNREAD_BYTES:
                break
            total -= unread_bytes
            if (ended := self._end(descriptor)) is not None:
                blamed.add((ended.port, ended.key))
                what = f"{unread_bytes} bytes that it sent were not read"
                cut.append(f"{ended.peer} is cut off: {what}")
        for port, key in sorted(blamed):
            self.backoff.cut(port, key)
        return cut

    def check_if_grown(self) -> list[str]:
        """Check all connections if the memory has grown. Return a log line for each cut."""
        self.process_events()
        if not self._growth.detected():
            return []
        return self.cut_flooding({each: self.unread_bytes(each) for each in self.descriptors()})

    async def run(self, refused: Callable[[str], None]) -> None:
        """Check repeatedly until cancelled. `refused` is called with a log line for each cut."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            while self.process_events():
                await asyncio.sleep(0)
            if not self._growth.detected():
                continue
            unread = {}
            for place, descriptor in enumerate(self.descriptors(), start=1):
                unread[descriptor] = self.unread_bytes(descriptor)
                if place % CHECKS_PER_TURN == 0:
                    await asyncio.sleep(0)
            for line in self.cut_flooding(unread):
                refused(line)

    def _peer(self, descriptor: int, port: str) -> tuple[str, int] | None:
        """Return the peer of a connection to this port, or None if the connection is gone."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as wire:
            if wire.family in {socket.AF_INET, socket.AF_INET6} and (
                wire.getsockname()[1] == self._ports[port]
            ):
                host, number = wire.getpeername()[:2]
                return str(host), int(number)
        return None

    def close(self) -> None:
        """Stop watching."""
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        self._monitors.clear()
        self._spare.close()


class SilentConnections:
    """Connections over which no message has arrived, oldest first."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[str, str]] = {}  # (port, network) by file descriptor
        self._of: dict[tuple[str, str], dict[int, str]] = {}  # hosts by descriptor, by group

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._groups)

    def add(self, descriptor: int, port: str, host: str) -> None:
        """Add a new connection. An earlier connection with this descriptor is closed."""
        self.remove(descriptor)
        group = self._groups[descriptor] = port, network_of(host)
        self._of.setdefault(group, {})[descriptor] = host

    def remove(self, descriptor: int) -> None:
        """Remove a connection over which a message arrived, or that was closed, if it is known."""
        group = self._groups.pop(descriptor, None)
        if group is not None:
            del self._of[group][descriptor]
            if not self._of[group]:
                del self._of[group]

    def surplus(self, excess: int, admitted: Callable[[str, str], int]) -> list[int]:
        """Return the connections to cut, to have `excess` fewer without a handshake.

        They are the oldest of the networks with the most connections without a handshake to one
        port. A call returns at most `MAX_CUTS`, and costs as much for one as for many.

        Args:
            excess: at most the number of connections without a handshake.
            admitted: returns how many silent connections to a port, of a host, have completed a
                handshake.
        """
        largest = [
            (sum(admitted(group[0], host) for host in set(peers.values())) - len(peers), group)
            for group, peers in self._of.items()
        ]
        heapq.heapify(largest)
        ahead = {group: iter(peers) for group, peers in self._of.items()}
        found = list[int]()
        while len(found) < min(excess, MAX_CUTS):
            count, group = heapq.heappop(largest)
            found.append(next(ahead[group]))
            heapq.heappush(largest, (count + 1, group))
        return found


def network_of(host: str) -> str:
    """Return a host, or the /64 network of an IPv6 host, which may have any address in it."""
    if ":" in host:
        with contextlib.suppress(ValueError):
            address = IPv6Address(host.partition("%")[0])
            if address.ipv4_mapped is None:
                return str(IPv6Network((address, 64), strict=False))
    return host


_STATM: Final = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # may not open it later
_PROCESS: Final = os.getpid()


def memory_bytes() -> int:
    """Return the resident memory of this process, in bytes."""
    if os.getpid() == _PROCESS:
        text = os.pread(_STATM, 256, 0)
    else:  # this process was forked: the descriptor shows its parent
        text = Path("/proc/self/statm").read_bytes()
    return int(text.split()[1]) * _PAGE


class GrowthDetector:
    """Detector that notices when a value is at least `step` above its minimum."""

    def __init__(self, now: Callable[[], int], step: int) -> None:
        self._now = now
        self._step = step
        self._minimum = now()

    def detected(self) -> bool:
        """Return whether the value is at least `step` above its minimum.

        If it is, the current value becomes the new minimum.
        """
        now = self._now()
        grew = now - self._minimum >= self._step
        self._minimum = now if grew else min(self._minimum, now)
        return grew


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use libzmq's own descriptor of a connection, only for queries.

    libzmq may close it at any time, and accept another connection with it, which has an event of
    its own. This is much faster than a duplicate: a thousand nodes connect at once.
    """
    wire = socket.socket(fileno=descriptor)
    try:
        yield wire
    finally:
        wire.detach()


class SpareDescriptor:
    """Descriptor for a look at a connection when no descriptor is free. For one thread."""

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._null)
        self._closed = False

    @contextlib.contextmanager
    def duplicate(self, descriptor: int) -> Iterator[socket.socket]:
        """Duplicate a connection, because libzmq may close its own descriptor at any time.

        The copy is closed after the block, which must not call this method.

        Raises:
            OSError: if the descriptor is not a socket, or after `close`.
        """
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.dup2(descriptor, self._copy, inheritable=False)
        try:
            with socket.socket(fileno=self._copy) as copy:
                try:
                    yield copy
                finally:
                    copy.detach()
        finally:
            os.dup2(self._null, self._copy, inheritable=False)

    def close(self) -> None:
        """Close the descriptor. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            os.close(self._copy)
            os.close(self._null)


@dataclass(frozen=True, slots=True)
class _UnixConnection:
    inode: int  # inode of the socket, because descriptors are reused
    pid: int  # process of the peer
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


class UnixFloodGuard:
    """Guard of the connections to one Unix socket. `memory` returns this process's memory."""

    def __init__(
        self,
        bound: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]],
        path: str,
        memory: Callable[[], int] = memory_bytes,
    ) -> None:
        self._monitor = _monitor(bound, context)
        self._connections: dict[int, _UnixConnection] = {}  # by file descriptor
        self._of_user: Counter[int] = Counter()
        self._spare = SpareDescriptor()
        self._path = path
        self._memory = memory
        self._minimum = self._next_check_bytes = 0
        self._reset()

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._connections)

    async def run(self, refused: Callable[[str], None]) -> None:
        """Watch until cancelled, and call `refused` with a log line for each cut.

        If all connections are cut together, `refused` is called with a single line.
        """
        while True:
            await asyncio.sleep(UNIX_CHECK_INTERVAL_S)
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
        """Process connection events, and cut connections above the limit of their user.

        Return a log line for each cut, and whether more events may be waiting.
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
        if connection is None:  # the connection is closed already
            return []
        self._connections[descriptor] = connection
        self._of_user[connection.uid] += 1
        most = max_connections_per_user()
        largest = max(self._of_user.values())
        if self._of_user.total() > max_descriptors() // 2:  # users with the most get no more
            most = min(most, largest - 1)
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
        """Cut connections for which the kernel has many unread bytes in many samples."""
        behind: Counter[int] = Counter()
        for _ in range(SAMPLES):
            for descriptor, connection in self._connections.items():
                behind[descriptor] += self._unread(descriptor, connection) > MAX_KERNEL_BYTES
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        lines, most = [], max(behind.values(), default=0)
        for descriptor, times in behind.items():
            found = self._connections.get(descriptor)
            if found is not None and times >= max(MIN_SAMPLES, most / 2):
                self._cut(descriptor)
                lines.append(f"{found} is cut off: it sends more than is read")
        return lines

    def _reset(self) -> None:
        self._minimum = self._memory()
        self._next_check_bytes = self._minimum + CHECK_GROWTH_BYTES

    def _unread(self, descriptor: int, connection: _UnixConnection) -> int:
        """Return the number of bytes in the kernel that libzmq has not read yet."""
        with contextlib.suppress(OSError), self._spare.duplicate(descriptor) as wire:
            if os.fstat(wire.fileno()).st_ino == connection.inode:
                size = fcntl.ioctl(wire.fileno(), termios.FIONREAD, bytes(4))
                return int.from_bytes(size, "little")
        return 0

    def _cut(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        self._forget(descriptor)
        with contextlib.suppress(OSError), self._spare.duplicate(descriptor) as wire:
            if os.fstat(wire.fileno()).st_ino == connection.inode:
                wire.shutdown(socket.SHUT_RDWR)

    def _connection(self, descriptor: int) -> _UnixConnection | None:
        with contextlib.suppress(OSError), self._spare.duplicate(descriptor) as wire:
            if wire.family == socket.AF_UNIX and wire.getsockname() == self._path:
                credentials = wire.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
                pid, uid, _ = _CREDENTIALS.unpack(credentials)
                return _UnixConnection(os.fstat(wire.fileno()).st_ino, pid, uid)
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
        self._spare.close()


def max_connections_per_user() -> int:
    """Return how many connections a uid may have."""
    return min(MAX_CONNECTIONS_PER_USER, max_descriptors() // 4)


def max_descriptors() -> int:
    """Return the limit of open descriptors of this process. libzmq fails when none is left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, soft)
