"""Virtual time: a heap of what happens next.

How time passes in a simulation, and how its policy is asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How time passes; all times are virtual seconds."""

    instant_changes: bool  # slots change hands in no time, and stalls follow
    whole_seconds: bool  # epochs end at whole seconds
    telemetry_s: float  # between reports of a job's steps, at most; 0: none
    round_s: float  # between plans; 0: whenever something happens
    stall_s: float | None = None  # of every change, instead of what jobs need
    first_stall_s: float | None = None  # of every start
    prepare_s: float | None = None  # of a newcomer beside a group that trains
    share_families: bool = True  # jobs of one application are one family; else each is its own
    record_allocations: bool = False  # write down who had which slot when
    noise: float = 0.0  # deviation of the logarithm of measured speeds and noise scales
    noise_scale_error: float = 1.0  # all noise scales of a job are off by up to this factor
    noise_scale_alone: bool = True  # one worker in one pass tells one, which a live one cannot
    seed: int = 0  # of these errors


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """When a policy is asked, and how much it may think; all times are virtual seconds."""

    round_s: float  # between plans; 0: whenever something happens
    latency_s: float  # from a question to its answer
    generations: int  # that a searching policy evolves at each question; 0: it does not search
    think_s: float  # at least, between questions that only the end of an epoch raised
    asks_after_epochs: bool  # whether the end of an epoch raises a question at all
    seed: int  # of the search
    rebatches: bool = False  # it is also asked for batches alone, when a job tells something new
