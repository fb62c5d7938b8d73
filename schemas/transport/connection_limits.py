"""Limits of each key at each port, on open connections and on reconnecting after a cut.

When libzmq asks whether a key may connect, it does not name the connection. It names the connection
only with the first message. Therefore a silent connection, which has sent no message yet, counts
for the keys that were admitted from its address. There are never more such keys than silent
connections.

A peer that is disconnected and reconnects at once causes the server the same work of decryption
again. Therefore each further cut doubles the time for which its key gets no handshake at this port.
A refused peer gets no reply. libzmq retries after the handshake timeout, 30 s by default.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

MAX_CONNECTIONS_PER_KEY: Final = 1000  # connections to one port
FREE_CUTS: Final = 2  # cuts without a delay, because an honest peer may be cut once or twice
FIRST_DELAY_S: Final = 1.0  # delay after the next cut
MAX_DELAY_S: Final = 60.0
FORGET_AFTER_S: Final = 300.0  # after this time without a cut, the count restarts at 0


@dataclass(slots=True)
class _Open:
    port: str
    host: str
    at: float
    key: bytes = b""  # empty before the first message
    kept_bytes: int = 0  # the bytes that `count_kept_bytes` has counted


@dataclass(slots=True)
class _Silent:
    """Silent connections of one host to one port."""

    connections: int = 0
    admissions: list[tuple[float, bytes]] = field(default_factory=list)  # (time, key) of each

    def remove_admission(self, key: bytes) -> bool:
        """Remove an admission of a key that is no longer silent. Return False if there is none."""
        for place, (_, found) in enumerate(self.admissions):
            if found == key:
                del self.admissions[place]
                return True
        return False

    def pop_surplus(self, since: float) -> bytes:
        """Remove an admission if there are more admissions than connections.

        Return the key of the removed admission, or b"".

        Admissions at or after `since` are removed first.
        """
        if len(self.admissions) <= self.connections:
            return b""
        later = bisect_left(self.admissions, (since, b""))  # they are in the order of their times
        return self.admissions.pop(later if later < len(self.admissions) else 0)[1]


class KeyConnections:
    """Open connections of each key at each port. Unknown descriptors are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, _Open] = {}  # by file descriptor
        self._silent: dict[tuple[str, str], _Silent] = {}  # by port and host
        self._counts: Counter[tuple[str, bytes]] = Counter()  # by port and key
        self._full: set[tuple[str, bytes]] = set()
        self._kept_bytes: Counter[tuple[str, bytes]] = Counter()  # by port and key, bytes
        self.admissions = 0  # silent connections that have completed a handshake

    def record_opened(self, descriptor: int, port: str, host: str) -> None:
        """Record a new connection. The key of its peer is not known yet."""
        self.closed(descriptor)
        self._open[descriptor] = _Open(port, host, self._clock())
        self._silent.setdefault((port, host), _Silent()).connections += 1

    def admit(self, port: str, host: str, key: bytes) -> bool:
        """Admit one more connection of a key. Return False if the key has reached the limit."""
        silent = self._silent.get((port, host))
        if silent is None:  # the connection is closed already
            return True
        self._settle(port, silent, since=float("inf"))
        if self._counts[port, key] >= MAX_CONNECTIONS_PER_KEY:
            return False
        self._full.discard((port, key))
        silent.admissions.append((self._clock(), key))
        self.admissions += 1
        self._counts[port, key] += 1
        return True

    def admitted(self, port: str, host: str) -> int:
        """Return how many silent connections of a host have completed a handshake."""
        silent = self._silent.get((port, host))
        return len(silent.admissions) if silent is not None else 0

    def first_refusal(self, port: str, key: bytes) -> bool:
        """True if the key has not been refused since it was last below the limit."""
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
        if silent.remove_admission(key):
            self.admissions -= 1
        else:
            self._counts[found.port, key] += 1
        self._settle(found.port, silent, found.at)

    def count_kept_bytes(self, descriptor: int, size: int) -> int | None:
        """Count bytes that are kept in memory for a peer as long as its connection is open.

        A message must have arrived over the connection before. Return the bytes counted for the
        peer's key over all its open connections to this port, or None if this one is closed.
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

        The key of a silent connection is unknown. If only one key was admitted from the host since
        the connection was accepted, return this key. Otherwise return b"", so that no other key is
        blamed.
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
                self.admissions -= 1
                self._forget(found.port, key)
        self.closed(descriptor)
        return key

    def is_of(self, descriptor: int, key: bytes) -> bool:
        """True if a message with this key arrived over the connection that has the descriptor."""
        found = self._open.get(descriptor)
        return found is not None and found.key == key

    def port_closed(self, port: str) -> None:
        """Remove the records of a port and of all its connections."""
        for descriptor in [each for each, found in self._open.items() if found.port == port]:
            self.closed(descriptor)

    def _settle(self, port: str, silent: _Silent, since: float) -> None:
        while key := silent.pop_surplus(since):
            self.admissions -= 1
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
    at: float  # time of the last cut
    logged: bool = False  # the delay has been logged


class ReconnectBackoff:
    """Delays that keys must wait at each port after their connections were cut."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cuts: dict[tuple[str, bytes], _Cuts] = {}  # by port and authorised key

    def cut(self, port: str, key: bytes) -> None:
        """Record that a connection of a key was cut off. An empty key is ignored."""
        if key:
            known = self._known(port, key)
            count = known.count + 1 if known else 1
            self._cuts[port, key] = _Cuts(count, self._clock())

    def left_s(self, port: str, key: bytes) -> float:
        """Return for how many seconds a key must not connect to a port, or 0 if it may now."""
        known = self._known(port, key)
        if known is None or known.count <= FREE_CUTS:
            return 0.0
        doubled = min(known.count - FREE_CUTS - 1, 32)  # limited to avoid an overflow
        wait_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**doubled)
        return max(0.0, known.at + wait_s - self._clock())

    def first_refusal(self, port: str, key: bytes) -> bool:
        """True if this is the first refusal of a delayed key since its last cut."""
        known = self._cuts[port, key]
        first, known.logged = not known.logged, True
        return first

    def port_closed(self, port: str) -> None:
        """Remove the records of a port."""
        self._cuts = {place: cuts for place, cuts in self._cuts.items() if place[0] != port}

    def _known(self, port: str, key: bytes) -> _Cuts | None:
        known = self._cuts.get((port, key))
        if known is not None and self._clock() - known.at >= FORGET_AFTER_S:
            del self._cuts[port, key]
            return None
        return known
