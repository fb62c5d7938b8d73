"""Virtual time: a heap of what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from schemas.ids import Seconds

FIRST, USUAL, LAST, AFTER = 0, 1, 2, 3  # priorities among what happens at the same time
MAX_AT_ONCE: Final = 1_000_000  # events at one time; more is a circle


class Kernel:
    """Calls what was scheduled, in order of time, priority and scheduling; no clock, no threads."""

    def __init__(self) -> None:
        self.now = Seconds(0.0)
        self.priority = USUAL  # of what happens now
        self.stopped = False
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def call_at(
        self, when: float, what: Callable[..., None], *arguments: Any, priority: int = USUAL
    ) -> None:
        """Call something later.

        Args:
            when: virtual seconds; not before now.
            priority: among what happens at the same time: `FIRST`, `USUAL`, `LAST` or `AFTER`.
        """
        self._scheduled += 1
        entry = (max(when, self.now), priority, self._scheduled, what, arguments)
        heapq.heappush(self._heap, entry)

    def run(self, until: float = float("inf")) -> None:
        """Go on until nothing is left, the time is over, or somebody sets `stopped`.

        Args:
            until: virtual seconds; what comes later is left.

        Raises:
            RuntimeError: if time stands still.
        """
        at_once = 0
        while self._heap and not self.stopped and self._heap[0][0] <= until:
            when, self.priority, _, what, arguments = heapq.heappop(self._heap)
            at_once = at_once + 1 if when == self.now else 0
            if at_once > MAX_AT_ONCE:
                raise RuntimeError(f"time stands still at {self.now} s: {what!r} again and again")
            self.now = Seconds(when)
            what(*arguments)
