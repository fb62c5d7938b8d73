"""Virtual time: a heap of scheduled calls, and the options of time and planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds

FIRST, USUAL, LAST, AFTER = 0, 1, 2, 3  # priorities of calls at the same time
MAX_CALLS_AT_ONCE: Final = 1_000_000  # calls at one time; more means a cycle


class Kernel:
    """Scheduler of calls by time, priority and order of scheduling; without clock or threads."""

    def __init__(self) -> None:
        self.now = Seconds(0.0)
        self.priority = USUAL  # of the current call
        self.stopped = False
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def call_at(
        self, when: float, call: Callable[..., None], *arguments: Any, priority: int = USUAL
    ) -> None:
        """Schedule a call at virtual second `when`, at least now; `priority` orders equal times."""
        self._scheduled += 1
        entry = (max(when, self.now), priority, self._scheduled, call, arguments)
        heapq.heappush(self._heap, entry)

    def run(self, until: float = float("inf")) -> None:
        """Run until the heap is empty, `until` is passed, or `stopped` is set.

        Calls after `until` (virtual seconds) stay scheduled.

        Raises:
            RuntimeError: if time stands still.
        """
        at_once = 0
        while self._heap and not self.stopped and self._heap[0][0] <= until:
            when, self.priority, _, call, arguments = heapq.heappop(self._heap)
            at_once = at_once + 1 if when == self.now else 0
            if at_once > MAX_CALLS_AT_ONCE:
                raise RuntimeError(f"time stands still at {self.now} s: {call!r} again and again")
            self.now = Seconds(when)
            call(*arguments)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Costs and errors of measurements of a scenario; its jobs and nodes are given elsewhere."""

    scenario: Scenario
    whole_seconds: bool = False  # epochs end at whole seconds
    telemetry_s: float = 0.0  # between reports of a job's steps, at most; 0: none
    seed: int = 0  # of the errors of measurements


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Schedule of plan requests and budget of the search; all times are virtual seconds."""

    round_s: float  # between plans; 0: whenever something happens
    latency_s: float  # from a request to its plan
    generations: int  # evolved per request; 0: the policy does not search
    think_s: float  # minimum distance of requests caused by ends of epochs
    asks_after_epochs: bool  # whether the end of an epoch causes a request
    seed: int  # of the search
    rebatches: bool = False  # also request batches alone after new reports
