"""Rules that decide when an input is acknowledged. They do no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

JOIN_LAG: Final = 1000  # inputs that a standby may lack when commits begin to wait for it


@dataclass(slots=True)
class Standby:
    """What a standby has said about itself."""

    heard_at: float  # monotonic
    after: int  # number of its last durable input
    files: int  # number of the last urgent file that it has stored
    mirrored: bool  # True once it has all files


class Quorum:
    """Hosts that must have an input before the active controller acknowledges it.

    The record of the lease lists the hosts that have everything. Only they may claim the lease. So
    a host that was removed from the record durably needs no longer be waited for, and a host that
    might have entered it must be. After a request to the store that failed, both versions of the
    record are possible, and the hosts of both are required.
    """

    def __init__(self, host: str, silence_s: float) -> None:
        self.host = host
        self.required = frozenset({host})  # hosts that the record may list
        self.standbys: dict[str, Standby] = {}
        self.before: deque[tuple[int, int]] = deque()  # an input, and a file that later ones need
        self._silence_s = silence_s

    def heard(self, host: str, *, after: int, files: int, mirrored: bool, now: float) -> None:
        """Note what a standby has stored."""
        self.standbys[host] = Standby(now, after, files, mirrored)

    def wanted(self, durable: int, now: float) -> frozenset[str]:
        """Return the hosts that the record should list, given the own last durable input."""
        return frozenset({self.host}) | {
            host
            for host, one in self.standbys.items()
            if now - one.heard_at < self._silence_s
            and (host in self.required or (one.mirrored and durable - one.after <= JOIN_LAG))
        }

    def through(self, durable: int) -> int:
        """Return the number of the last input that may be acknowledged."""
        while self.before and self.has_files(self.before[0][1]):
            self.before.popleft()
        others = [one.after if one else 0 for one in self._others()]
        gates = [self.before[0][0]] if self.before else []
        return min((durable, *others, *gates))

    def has_files(self, number: int) -> bool:
        """True if all required hosts have the urgent files up to a number."""
        return all(one is not None and one.files >= number for one in self._others())

    def _others(self) -> list[Standby | None]:
        return [self.standbys.get(host) for host in self.required - {self.host}]
