"""How long a key waits for its next connection after some of its were cut off.

Whoever is cut and connects again at once makes the server decrypt as much as before: so each
further cut doubles the time for which the key gets no handshake at that port. A peer that is
refused hears nothing, and with libzmq it tries again when its handshake's time is over: 30 s by
default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
