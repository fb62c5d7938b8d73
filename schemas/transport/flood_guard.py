"""Cuts off peers that send more than is taken of them.

libzmq bounds a frame's bytes and a queue's messages, and not the bytes of either: a message of a
thousand frames, or a queue of large ones, is kept in memory whatever it comes to.

How long a key waits for its next connection after some of its were cut off.

Whoever is cut and connects again at once makes the server decrypt as much as before: so each
further cut doubles the time for which the key gets no handshake at that port. A peer that is
refused hears nothing, and with libzmq it tries again when its handshake's time is over: 30 s by
default.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from schemas.transport.connection_limits import KeyConnections

FREE: Final = 2  # cuts after which a key may connect again at once: nobody is hostile by chance
FIRST_S: Final = 1.0  # after the next one
MOST_S: Final = 60.0
FORGOTTEN_S: Final = 300.0  # after so long without a cut all begins anew


@dataclass(slots=True)
class _Cuts:
    count: int
    at: float  # the last one
    told: bool = False  # that it waits


class CutBackoff:
    """Counts cuts of each key at each port.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cuts: dict[tuple[str, bytes], _Cuts] = {}  # by port and key, of keys that were known

    def cut(self, port: str, key: bytes) -> None:
        """A connection was cut off.

        Args:
            key: of whoever had it; empty: nobody knows.
        """
        if key:
            known = self._known(port, key)
            count = known.count + 1 if known else 1
            self._cuts[port, key] = _Cuts(count, self._clock())

    def left_s(self, port: str, key: bytes) -> float:
        """For how long a key gets no connection to a port, seconds; 0: it gets one now."""
        known = self._known(port, key)
        if known is None or known.count <= FREE:
            return 0.0
        doubled = min(known.count - FREE - 1, 32)  # a float has an end
        wait_s = min(MOST_S, FIRST_S * 2.0**doubled)
        return max(0.0, known.at + wait_s - self._clock())

    def first_refusal(self, port: str, key: bytes) -> bool:
        """Whether a key that has to wait is refused for the first time since it was cut off."""
        known = self._cuts[port, key]
        first, known.told = not known.told, True
        return first

    def port_closed(self, port: str) -> None:
        """A port is gone."""
        self._cuts = {place: cuts for place, cuts in self._cuts.items() if place[0] != port}

    def _known(self, port: str, key: bytes) -> _Cuts | None:
        known = self._cuts.get((port, key))
        if known is not None and self._clock() - known.at >= FORGOTTEN_S:
            del self._cuts[port, key]
            return None
        return known


MAX_AHEAD: Final = 64 << 20  # bytes of one connection that arrived and were not taken
MAX_AHEAD_OF_ALL: Final = 256 << 20  # the same, of all connections of a process
GROWTH: Final = 16 << 20  # bytes of memory; connections are looked at when so much more is in use
EVERY_S: Final = 0.1
MOST_EVENTS: Final = 1000  # of one port, taken at once: who connects and goes holds up nobody
SLICE: Final = 200  # connections looked at without returning to the loop
FORGIVEN_PER_S: Final = 100  # bytes that nobody takes: heartbeats
CURVE_BYTES: Final = 33  # that encryption adds to a frame
SHORT: Final = 256  # bytes; a frame that is shorter has a header of 2 bytes, any other one of 9
_EVENT: Final = struct.Struct("=Hi")  # what it is, and a file descriptor
_RECEIVED: Final = struct.Struct("=Q")
_RECEIVED_AT: Final = 128  # tcpi_bytes_received in struct tcp_info of Linux
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Connection:
    peer: tuple[str, int]
    forgiven: int  # bytes that arrived and need not be taken any more
    at: float
    port: str  # its name


class _Ended(NamedTuple):
    """A connection that was cut off."""

    peer: str  # where it is
    port: str
    key: bytes  # empty: nobody knows


class Events(NamedTuple):
    """What a monitor told since it was asked before."""

    of: dict[int, int]  # by file descriptor: whether it was accepted or disconnected last
    stopped: bool  # its socket was closed
    more: bool  # there may be more


def latest_events(monitor: zmq.Socket[bytes]) -> Events:
    """Who has connected and who has gone: of each descriptor the latest, as others are past."""
    found: dict[int, int] = {}
    for _ in range(MOST_EVENTS):
        try:
            told = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return Events(found, stopped=False, more=False)
        event, value = _EVENT.unpack(told[0])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return Events(found, stopped=True, more=False)
        found.pop(value, None)  # in the order of the latest
        found[value] = event
    return Events(found, stopped=False, more=True)


class ConnectionWatch:
    """What arrived over each connection of bound TCP sockets, held against what was taken of it.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.keys = KeyConnections(clock)
        self.backoff = CutBackoff(clock)
        self._monitors: dict[str, zmq.Socket[bytes]] = {}  # by the names of their ports
        self._ports: dict[str, int] = {}
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._taken: Counter[int] = Counter()
        self._growth = Growth(memory_bytes, GROWTH)

    def add(
        self, bound: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], name: str = ""
    ) -> None:
        """Watch the connections of one more socket.

        Args:
            bound: to a TCP address, once or more.
            name: of its port, that no other one has.
        """
        place = f"inproc://connections-{id(bound)}-{len(self._monitors)}"
        bound.monitor(place, _EVENTS)
        monitor = context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # libzmq's own thread would wait for room
        monitor.connect(place)
        self._monitors[name] = monitor
        self._ports[name] = int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def took(self, source: int, sizes: list[int], *, secured: bool) -> None:
        """A message was taken.

        Args:
            source: file descriptor of its connection.
        """
        extra = CURVE_BYTES if secured else 0
        self._taken[source] += sum(
            size + extra + (2 if size + extra < SHORT else 9) for size in sizes
        )

    def notice(self) -> bool:
        """Take in who has connected, and who has gone.

        Returns:
            Whether there may be more: it takes so many events and no more.
        """
        more = [self.notice_at(port) for port in list(self._monitors)]
        return any(more)

    def notice_at(self, port: str) -> bool:
        """The same of one port.

        Args:
            port: its name; one that is not watched is passed over.

        Returns:
            As `notice` does.
        """
        monitor = self._monitors.get(port)
        if monitor is None:
            return False
        events = latest_events(monitor)
        for descriptor, event in events.of.items():
            self._noticed(event, descriptor, port)
        if events.stopped:  # its socket was closed
            del self._monitors[port]
            monitor.close()
            self.keys.port_closed(port)
            self.backoff.port_closed(port)
        return events.more

    def _noticed(self, event: int, descriptor: int, port: str) -> None:
        known = self._connections.get(descriptor)
        if event == zmq.EVENT_DISCONNECTED:
            if known is None or known.port == port:  # else another port has that number now
                self._connections.pop(descriptor, None)
                self._taken.pop(descriptor, None)
                self.keys.closed(descriptor)
        elif (peer := self._peer(descriptor, port)) is not None:
            self._connections[descriptor] = _Connection(peer, 0, self._clock(), port)
            self.keys.accepted(descriptor, port, peer[0])

    def descriptors(self) -> list[int]:
        """Those of the connections that there are."""
        return list(self._connections)

    def ahead(self, descriptor: int) -> int:
        """How many bytes arrived over a connection and were not taken.

        Args:
            descriptor: of the connection; 0 if it is gone.
        """
        connection = self._connections.get(descriptor)
        if connection is None:
            return 0
        with contextlib.suppress(OSError), copied(descriptor) as wire:
            if wire.getpeername()[:2] == connection.peer:
                info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                return self._ahead(descriptor, connection, info)
        del self._connections[descriptor]
        self.keys.closed(descriptor)
        return 0

    def _ahead(self, descriptor: int, connection: _Connection, info: bytes) -> int:
        (received,) = _RECEIVED.unpack_from(info, _RECEIVED_AT)
        ahead = int(received) - self._taken[descriptor] - connection.forgiven
        now = self._clock()
        forgiven = int((now - connection.at) * FORGIVEN_PER_S)
        if forgiven:
            connection.at = now
        # Below nothing: what was taken came over a former connection of that number.
        connection.forgiven += ahead if ahead < 0 else min(ahead, forgiven)
        return max(0, ahead - forgiven)

    def cut(self, descriptor: int) -> str:
        """End a connection; what of it was not taken is dropped, and its key may have to wait.

        Returns:
            Where its peer is; empty if there is no such connection.
        """
        ended = self._end(descriptor)
        if ended is None:
            return ""
        self.backoff.cut(ended.port, ended.key)
        return ended.peer

    def _end(self, descriptor: int) -> _Ended | None:
        connection = self._connections.pop(descriptor, None)
        key = self.keys.cut(descriptor)
        if connection is None or self._peer(descriptor, connection.port) != connection.peer:
            return None
        with contextlib.suppress(OSError), copied(descriptor) as wire:
            # Closed with a reset: a peer whose window is shut would not hear of an ordinary end.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            wire.shutdown(socket.SHUT_RDWR)
        return _Ended("{}:{}".format(*connection.peer), connection.port, key)

    def cut_those_ahead(self, aheads: dict[int, int]) -> list[str]:
        """Cut connections that are beyond a bound: those furthest ahead, as long as all are.

        Args:
            aheads: bytes, by file descriptor.

        Returns:
            What was cut, a line for each.
        """
        total = sum(aheads.values())
        cut = []
        blamed = set()  # once, however many connections it has
        for descriptor, ahead in sorted(aheads.items(), key=lambda item: -item[1]):
            if ahead <= MAX_AHEAD and total <= MAX_AHEAD_OF_ALL:
                break
            total -= ahead
            if (ended := self._end(descriptor)) is not None:
                blamed.add((ended.port, ended.key))
                cut.append(f"{ended.peer} is cut off: {ahead} bytes that it sent were not taken")
        for port, key in sorted(blamed):
            self.backoff.cut(port, key)
        return cut

    def look(self) -> list[str]:
        """Look at all connections at once, if this process needs much more memory than before.

        Returns:
            What was cut, a line for each.
        """
        self.notice()
        if not self._growth.noticed():
            return []
        return self.cut_those_ahead({each: self.ahead(each) for each in self.descriptors()})

    async def run(self, refused: Callable[[str], None]) -> None:
        """The same, again and again, for ever, and without holding up the loop.

        Args:
            refused: called with a line for each connection that was cut.
        """
        while True:
            await asyncio.sleep(EVERY_S)
            while self.notice():
                await asyncio.sleep(0)
            if not self._growth.noticed():
                continue
            aheads = {}
            for place, descriptor in enumerate(self.descriptors(), start=1):
                aheads[descriptor] = self.ahead(descriptor)
                if place % SLICE == 0:
                    await asyncio.sleep(0)
            for line in self.cut_those_ahead(aheads):
                refused(line)

    def _peer(self, descriptor: int, port: str) -> tuple[str, int] | None:
        """The other end of a connection of ours; None if it is none, or no more."""
        with contextlib.suppress(OSError), copied(descriptor) as wire:
            if wire.family in {socket.AF_INET, socket.AF_INET6} and (
                wire.getsockname()[1] == self._ports[port]
            ):
                host, number = wire.getpeername()[:2]
                return str(host), int(number)
        return None

    def close(self) -> None:
        """Watch no more."""
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        self._monitors.clear()


def memory_bytes() -> int:
    """What this process has in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


class Growth:
    """Whether there is much more of something than at its least since that was last so."""

    def __init__(self, now: Callable[[], int], step: int) -> None:
        self._now = now
        self._step = step
        self._least = now()

    def noticed(self) -> bool:
        """Whether it has grown so much."""
        now = self._now()
        grew = now - self._least >= self._step
        self._least = now if grew else min(self._least, now)
        return grew


def copied(descriptor: int) -> socket.socket:
    """A connection once more: libzmq closes its own whenever it likes.

    Args:
        descriptor: of a socket, or of what has its number by now.

    Raises:
        OSError: if it is none.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the number is something else's by now
        os.close(copy)
        raise
