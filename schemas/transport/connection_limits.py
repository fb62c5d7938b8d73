"""Limits of each key at each port: open connections, and a delay after connections were cut.

libzmq asks whether a key may connect without naming the connection, and names the connection
only with its first message. Therefore a silent connection, which has sent no message yet, is
counted against the keys that were admitted from its address; the number of these keys never exceeds
the number of silent connections.

A peer that is disconnected and reconnects at once makes the server decrypt as much as before.
Therefore each further cut doubles the time for which its key gets no handshake at that port. A
refused peer gets no reply, and with libzmq it retries after the handshake timeout: 30 s by default.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

MAX_CONNECTIONS_PER_KEY: Final = 1000  # connections to one port
FREE_CUTS: Final = 2  # cuts without a delay: an honest peer may be cut once or twice
FIRST_DELAY_S: Final = 1.0  # delay after the next cut
MAX_DELAY_S: Final = 60.0
FORGET_AFTER_S: Final = 300.0  # after so long without a cut the count restarts


@dataclass(slots=True)
class _Open:
    port: str
    host: str
    at: float
    key: bytes = b""  # empty: not known before the first message
    kept_bytes: int = 0  # bytes counted by `count_kept_bytes`


@dataclass(slots=True)
class _Silent:
    """Silent connections of one host to one port."""

    connections: int = 0
    admissions: list[tuple[float, bytes]] = field(default_factory=list)  # time and key of admission

    def remove_admission(self, key: bytes) -> bool:
        """Remove an admission of a key that is no longer silent; False if there is none."""
        for place, (_, found) in enumerate(self.admissions):
            if found == key:
                del self.admissions[place]
                return True
        return False

    def pop_surplus(self, since: float) -> bytes:
        """Remove an admission without a connection, if possible since `since`; return its key."""
        if len(self.admissions) <= self.connections:
            return b""
        later = (place for place, (at, _) in enumerate(self.admissions) if at >= since)
        return self.admissions.pop(next(later, 0))[1]


class KeyConnections:
    """Open connections of each key at each port; descriptors that are not known are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, _Open] = {}  # by file descriptor
        self._silent: dict[tuple[str, str], _Silent] = {}  # by port and host
        self._counts: Counter[tuple[str, bytes]] = Counter()  # by port and key
        self._full: set[tuple[str, bytes]] = set()
        self._kept_bytes: Counter[tuple[str, bytes]] = Counter()  # by port and key, bytes

    def record_opened(self, descriptor: int, port: str, host: str) -> None:
        """Record a new connection; the key of its peer is not known yet."""
        self.closed(descriptor)
        self._open[descriptor] = _Open(port, host, self._clock())
        self._silent.setdefault((port, host), _Silent()).connections += 1

    def admit(self, port: str, host: str, key: bytes) -> bool:
        """Admit one more connection of a key, or return False if the key has reached the limit."""
        silent = self._silent.get((port, host))
        if silent is None:  # closed already
            return True
        self._settle(port, silent, since=float("inf"))
        if self._counts[port, key] >= MAX_CONNECTIONS_PER_KEY:
            return False
        self._full.discard((port, key))
        silent.admissions.append((self._clock(), key))
        self._counts[port, key] += 1
        return True

    def first_refusal(self, port: str, key: bytes) -> bool:
        """True if this is the first refusal of a key since it was below the limit."""
        first = (port, key) not in self._full
        self._full.add((port, key))
        return first

    def record_key(self, descriptor: int, key: bytes) -> None:
        """Record the key of a connection over which a message arrived."""
        found = self._open.get(descriptor)
        if found is None or found.key:
            return
        found.key = key
        silent = self._silent[found.port, found.host]
        silent.connections -= 1
        if not silent.remove_admission(key):
            self._counts[found.port, key] += 1
        self._settle(found.port, silent, found.at)

    def count_kept_bytes(self, descriptor: int, size: int) -> int | None:
        """Count bytes that are kept for a peer as long as its connection is open.

        Returns the bytes counted for its key over all open connections to its port; None if this
        connection is closed. A message must have arrived over the connection before.
        """
        found = self._open.get(descriptor)
        if found is None:
            return None
        found.kept_bytes += size
        self._kept_bytes[found.port, found.key] += size
        return self._kept_bytes[found.port, found.key]

    def closed(self, descriptor: int) -> None:
        """Record that a connection was closed."""
        found = self._open.pop(descriptor, None)
        if found is None:
            return
        if found.key:
            self._forget(found.port, found.key)
            self._uncount(found)
            return
        silent = self._silent[found.port, found.host]
        silent.connections -= 1
        self._settle(found.port, silent, found.at)
        if not silent.connections:
            del self._silent[found.port, found.host]

    def cut(self, descriptor: int) -> bytes:
        """Record that a connection was cut off for sending too much, and return its key.

        For a silent connection this is the only key admitted from its host since it was accepted;
        empty if there are several, so that no key is blamed for another one.
        """
        found = self._open.get(descriptor)
        if found is None:
            return b""
        key = found.key
        if not key:
            silent = self._silent[found.port, found.host]
            keys = {each for at, each in silent.admissions if at >= found.at}
            key = keys.pop() if len(keys) == 1 else b""
            if key and silent.remove_admission(key):
                self._forget(found.port, key)
        self.closed(descriptor)
        return key

    def is_of(self, descriptor: int, key: bytes) -> bool:
        """True if a message with this key arrived over the connection; descriptors are reused."""
        found = self._open.get(descriptor)
        return found is not None and found.key == key

    def port_closed(self, port: str) -> None:
        """Forget a port and all of its connections."""
        for descriptor in [each for each, found in self._open.items() if found.port == port]:
            self.closed(descriptor)

    def _settle(self, port: str, silent: _Silent, since: float) -> None:
        while key := silent.pop_surplus(since):
            self._forget(port, key)

    def _uncount(self, gone: _Open) -> None:
        self._kept_bytes[gone.port, gone.key] -= gone.kept_bytes
        if not self._kept_bytes[gone.port, gone.key]:
            del self._kept_bytes[gone.port, gone.key]

    def _forget(self, port: str, key: bytes) -> None:
        self._counts[port, key] -= 1
        if not self._counts[port, key]:
            del self._counts[port, key]
            self._full.discard((port, key))


@dataclass(slots=True)
class _Cuts:
    count: int
    at: float  # time of the last one
    logged: bool = False  # the delay has been logged


class ReconnectBackoff:
    """Reconnect delays of keys after cuts of their connections, for each port."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cuts: dict[tuple[str, bytes], _Cuts] = {}  # by port and key, of authorised keys

    def cut(self, port: str, key: bytes) -> None:
        """Record that a connection of a key was cut off; an empty key is ignored."""
        if key:
            known = self._known(port, key)
            count = known.count + 1 if known else 1
            self._cuts[port, key] = _Cuts(count, self._clock())

    def left_s(self, port: str, key: bytes) -> float:
        """Return how long a key must not connect to a port, in seconds; 0: it may connect now."""
        known = self._known(port, key)
        if known is None or known.count <= FREE_CUTS:
            return 0.0
        doubled = min(known.count - FREE_CUTS - 1, 32)  # avoids overflow of the float
        wait_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**doubled)
        return max(0.0, known.at + wait_s - self._clock())

    def first_refusal(self, port: str, key: bytes) -> bool:
        """True if this is the first refusal of a delayed key since its last cut."""
        known = self._cuts[port, key]
        first, known.logged = not known.logged, True
        return first

    def port_closed(self, port: str) -> None:
        """Forget a port."""
        self._cuts = {place: cuts for place, cuts in self._cuts.items() if place[0] != port}

    def _known(self, port: str, key: bytes) -> _Cuts | None:
        known = self._cuts.get((port, key))
        if known is not None and self._clock() - known.at >= FORGET_AFTER_S:
            del self._cuts[port, key]
            return None
        return known
