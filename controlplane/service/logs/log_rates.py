"""How fast output of one job is taken: who is beyond his rate waits, in his own files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from controlplane.service.client_api.request_shares import Timer

BURST_S: Final = 16.0  # of output that a job may ship at once
MOST_CREDIT: Final = 2 << 20  # bytes that an agent may be ahead of what is stored, for each stream
LEAST_CREDIT: Final = 256 << 10  # the same, of a job that is beyond its rate
REMEMBERED: Final = 1000  # streams; those that are not beyond their rate may be forgotten
Whom = TypeVar("Whom", bound=Hashable)
Of = tuple[str, str]  # job and stream


@dataclass(slots=True)
class _Stream(Generic[Whom]):
    tokens: float  # bytes
    at: float  # when they were counted
    took_at: float = float("-inf")  # when something came last
    held: dict[Whom, None] = field(default_factory=dict)  # who waits for an answer, in this order


class LogRates(Generic[Whom]):
    """Gives credit for output, of each job's stream no more than its rate and a burst.

    What arrives is stored at once, whatever its rate: it is the answer that waits, and with it the
    credit for more. So nothing is lost, and nobody else waits.

    Args:
        answer: says to somebody what is stored, and how many bytes he may send beyond that.
        per_s: bytes of one job's stream each second.
        clock: seconds that only grow.
        later: calls back after so many seconds.
    """

    def __init__(
        self,
        answer: Callable[[Whom, int], None],
        per_s: Callable[[], float],
        clock: Callable[[], float] | None = None,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self._answer = answer
        self._per_s = per_s
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._later = later or (lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._streams: dict[Of, _Stream[Whom]] = {}

    def took(self, of: Of, size: int) -> None:
        """Output was stored.

        Args:
            size: bytes.
        """
        stream = self._counted(of)
        stream.tokens -= size
        stream.took_at = stream.at

    def answer(self, of: Of, whom: Whom) -> None:
        """Answer now, or when the job is within its rate again.

        Args:
            whom: one who waits already is answered once, in his old place.
        """
        stream = self._counted(of)
        if not stream.held and stream.tokens >= 0:
            self._answer(whom, self._credit(stream))
            return
        if not stream.held:
            self._wait(of, stream)
        stream.held[whom] = None

    def quiet_s(self, of: Of) -> float:
        """How long nothing has come."""
        stream = self._streams.get(of)
        return float("inf") if stream is None else self._clock() - stream.took_at

    def _wait(self, of: Of, stream: _Stream[Whom]) -> None:
        wait_s = max(LEAST_CREDIT, -stream.tokens) / self._per_s()
        self._later(wait_s, lambda: self._turn(of, stream))

    def _turn(self, of: Of, stream: _Stream[Whom]) -> None:
        """Answer as many of those who wait as there is credit for, the longest first."""
        self._counted(of)
        room = stream.tokens
        while stream.held and room >= 0:
            whom = next(iter(stream.held))
            del stream.held[whom]
            self._answer(whom, self._credit(stream))
            room -= LEAST_CREDIT
        if stream.held:
            self._wait(of, stream)

    def _credit(self, stream: _Stream[Whom]) -> int:
        return int(min(MOST_CREDIT, max(LEAST_CREDIT, stream.tokens)))

    def _counted(self, of: Of) -> _Stream[Whom]:
        now, per_s = self._clock(), self._per_s()
        stream = self._streams.get(of)
        if stream is None:
            if len(self._streams) >= REMEMBERED:
                self._forget()
            stream = self._streams[of] = _Stream(BURST_S * per_s, now)
        stream.tokens = min(BURST_S * per_s, stream.tokens + (now - stream.at) * per_s)
        stream.at = now
        return stream

    def _forget(self) -> None:
        """Those that have all of their burst again are as new ones."""
        now, full = self._clock(), BURST_S * self._per_s()
        for of, stream in list(self._streams.items()):
            if not stream.held and stream.tokens + (now - stream.at) * self._per_s() >= full:
                del self._streams[of]
