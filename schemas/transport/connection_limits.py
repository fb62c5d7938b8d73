"""How many connections each key has open at each port: one key takes no place from others.

libzmq asks whether a key may connect without saying over which connection, and says over which
connection a message came only with the message. So a connection whose peer has said nothing yet is
held against the keys that were let in from its address; there are never more of these than of such
connections.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

MAX_OF_KEY: Final = 1000  # connections to one port


@dataclass(slots=True)
class _Open:
    port: str
    host: str
    at: float
    key: bytes = b""  # not known before its peer says something
    said: int = 0  # bytes that `says` counted


@dataclass(slots=True)
class _Silent:
    """Connections of one host to one port, whose peers have said nothing yet."""

    connections: int = 0
    let_in: list[tuple[float, bytes]] = field(default_factory=list)  # when, and with which key

    def takes(self, key: bytes) -> bool:
        """One of that key is not silent any more."""
        for place, (_, found) in enumerate(self.let_in):
            if found == key:
                del self.let_in[place]
                return True
        return False

    def surplus(self, since: float) -> bytes:
        """The key of one that is open no more: let in at `since` or later, if there is such."""
        if len(self.let_in) <= self.connections:
            return b""
        later = (place for place, (at, _) in enumerate(self.let_in) if at >= since)
        return self.let_in.pop(next(later, 0))[1]


class KeyConnections:
    """Counts, and says who may not have one more.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, _Open] = {}  # by file descriptor
        self._silent: dict[tuple[str, str], _Silent] = {}  # by port and host
        self._counts: Counter[tuple[str, bytes]] = Counter()  # by port and key
        self._full: set[tuple[str, bytes]] = set()
        self._said: Counter[tuple[str, bytes]] = Counter()  # by port and key, bytes

    def accepted(self, descriptor: int, port: str, host: str) -> None:
        """A connection is there, of whom is not known yet.

        Args:
            descriptor: of it; one that is known under that number is gone.
        """
        self.closed(descriptor)
        self._open[descriptor] = _Open(port, host, self._clock())
        self._silent.setdefault((port, host), _Silent()).connections += 1

    def admits(self, port: str, host: str, key: bytes) -> bool:
        """Count one more connection of a key, if it may have one more."""
        silent = self._silent.get((port, host))
        if silent is None:  # it is gone already
            return True
        self._settle(port, silent, since=float("inf"))
        if self._counts[port, key] >= MAX_OF_KEY:
            return False
        self._full.discard((port, key))
        silent.let_in.append((self._clock(), key))
        self._counts[port, key] += 1
        return True

    def first_refusal(self, port: str, key: bytes) -> bool:
        """Whether a key that has too many is refused for the first time since it had fewer."""
        first = (port, key) not in self._full
        self._full.add((port, key))
        return first

    def spoke(self, descriptor: int, key: bytes) -> None:
        """A message came over a connection, with the key that its peer showed.

        Args:
            descriptor: of it; one that is not known is passed over.
        """
        found = self._open.get(descriptor)
        if found is None or found.key:
            return
        found.key = key
        silent = self._silent[found.port, found.host]
        silent.connections -= 1
        if not silent.takes(key):
            self._counts[found.port, key] += 1
        self._settle(found.port, silent, found.at)

    def says(self, descriptor: int, size: int) -> int | None:
        """Count what a peer said, where it is kept for as long as the connection is open.

        Args:
            descriptor: of the connection, over which something came before.

        Returns:
            All that was said with its key over connections that are open to its port, bytes; None
            if this one is open no more.
        """
        found = self._open.get(descriptor)
        if found is None:
            return None
        found.said += size
        self._said[found.port, found.key] += size
        return self._said[found.port, found.key]

    def closed(self, descriptor: int) -> None:
        """A connection is gone.

        Args:
            descriptor: of it; one that is not known is passed over.
        """
        found = self._open.pop(descriptor, None)
        if found is None:
            return
        if found.key:
            self._forget(found.port, found.key)
            self._unsay(found)
            return
        silent = self._silent[found.port, found.host]
        silent.connections -= 1
        self._settle(found.port, silent, found.at)
        if not silent.connections:
            del self._silent[found.port, found.host]

    def cut(self, descriptor: int) -> bytes:
        """A connection was ended whose peer sent too much, for which it was let in.

        Args:
            descriptor: of it; one that is not known is passed over.

        Returns:
            The key of its peer. Of one who said nothing whole that of everybody who was let in from
            its host since it was made; empty if these have several, so that nobody is blamed for
            another one.
        """
        found = self._open.get(descriptor)
        if found is None:
            return b""
        key = found.key
        if not key:
            silent = self._silent[found.port, found.host]
            keys = {each for at, each in silent.let_in if at >= found.at}
            key = keys.pop() if len(keys) == 1 else b""
            if key and silent.takes(key):
                self._forget(found.port, key)
        self.closed(descriptor)
        return key

    def is_of(self, descriptor: int, key: bytes) -> bool:
        """Whether a connection is one over which something came with that key.

        Args:
            descriptor: of it; a number is used again when a connection is gone.
        """
        found = self._open.get(descriptor)
        return found is not None and found.key == key

    def port_closed(self, port: str) -> None:
        """A port is gone, and all of its connections."""
        for descriptor in [each for each, found in self._open.items() if found.port == port]:
            self.closed(descriptor)

    def _settle(self, port: str, silent: _Silent, since: float) -> None:
        while key := silent.surplus(since):
            self._forget(port, key)

    def _unsay(self, gone: _Open) -> None:
        self._said[gone.port, gone.key] -= gone.said
        if not self._said[gone.port, gone.key]:
            del self._said[gone.port, gone.key]

    def _forget(self, port: str, key: bytes) -> None:
        self._counts[port, key] -= 1
        if not self._counts[port, key]:
            del self._counts[port, key]
            self._full.discard((port, key))
