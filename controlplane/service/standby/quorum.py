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

    The record of the lease lists the hosts that have everything, and only they may claim the lease.
    A standby is listed once it has all acknowledged inputs, and commits wait for it before that,
    so that it can catch up. A standby that falls silent is waited for until the record no longer
    lists it. After a request to the store that failed, the former and the new record are possible,
    and the hosts of both are waited for.
    """

    def __init__(self, host: str, silence_s: float, last: int) -> None:
        """Begin with `last`, the number of the own last input: all may have been acknowledged."""
        self.host = host
        self.listed = frozenset({host})  # hosts that the record may list
        self.joining: frozenset[str] = frozenset()  # hosts that are to be listed
        self.standbys: dict[str, Standby] = {}
        self.before: deque[tuple[int, int]] = deque()  # an input, and a file that later ones need
        self._acknowledged = last  # number of the last acknowledged input
        self._silence_s = silence_s

    def heard(self, host: str, *, after: int, files: int, mirrored: bool, now: float) -> None:
        """Note what a standby has stored."""
        self.standbys[host] = Standby(now, after, files, mirrored)

    def wanted(self, durable: int, now: float) -> frozenset[str]:
        """Return the hosts that the record should list, given the own last durable input.

        Commits begin to wait for hosts that lack little.
        """
        heard = {
            host: one
            for host, one in self.standbys.items()
            if now - one.heard_at < self._silence_s and (one.mirrored or host in self.listed)
        }
        self.joining = frozenset(
            host for host, one in heard.items() if durable - one.after <= JOIN_LAG
        )
        complete = (host for host, one in heard.items() if one.after >= self._acknowledged)
        return frozenset({self.host, *complete, *(self.listed & heard.keys())})

    def through(self, durable: int) -> int:
        """Return the number of the last input that may be acknowledged."""
        while self.before and self.has_files(self.before[0][1]):
            self.before.popleft()
        others = [one.after if one else 0 for one in self._others()]
        gates = [self.before[0][0]] if self.before else []
        through = min((durable, *others, *gates))
        self._acknowledged = max(self._acknowledged, through)
        return through

    def silent(self, now: float) -> list[str]:
        """Return the hosts that commits wait for although they have fallen silent."""
        return sorted(
            host
            for host in (self.listed | self.joining) - {self.host}
            if (one := self.standbys.get(host)) is None or now - one.heard_at >= self._silence_s
        )

    def has_files(self, number: int) -> bool:
        """True if all required hosts have the urgent files up to a number."""
        return all(one is not None and one.files >= number for one in self._others())

    def _others(self) -> list[Standby | None]:
        others = (self.listed | self.joining) - {self.host}
        return [self.standbys.get(host) for host in others]
