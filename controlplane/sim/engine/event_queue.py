"""Virtual time: a heap of scheduled calls, and the options of the simulation and its planner."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from controlplane.sim.scenario import Scenario
from schemas.ids import Seconds

FIRST, USUAL, LAST, AFTER = 0, 1, 2, 3  # priorities of calls at the same time
MAX_CALLS_AT_ONCE: Final = 1_000_000  # more calls at one virtual time indicate an endless loop


class Kernel:
    """Scheduler that runs calls by virtual time, priority and order of scheduling."""

    def __init__(self) -> None:
        self.now = Seconds(0.0)
        self.priority = USUAL  # priority of the current call
        self.stopped = False
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def call_at(
        self, when: float, call: Callable[..., None], *arguments: Any, priority: int = USUAL
    ) -> None:
        """Schedule a call at virtual second `when`, or now; the lowest `priority` runs first."""
        self._scheduled += 1
        entry = (max(when, self.now), priority, self._scheduled, call, arguments)
        heapq.heappush(self._heap, entry)

    def run(self, until: float = float("inf")) -> None:
        """Run scheduled calls until none is left, the next is after `until`, or `stopped` is set.

        More than `MAX_CALLS_AT_ONCE` calls at the same virtual time raise `RuntimeError`.
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
    """Options of a simulation, apart from its jobs and nodes."""

    scenario: Scenario
    whole_seconds: bool = False  # epochs end at whole seconds
    telemetry_s: float = 0.0  # longest time between step reports of a job; 0: no reports
    seed: int = 0  # seed of the measurement errors


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The times of plan requests and the budget of the search; all times are virtual seconds."""

    round_s: float  # time between plans; 0: a plan follows each relevant event
    latency_s: float  # time from a request to the delivery of its plan
    generations: int  # generations per request; 0: the policy does not search
    think_s: float  # minimum time from a request to a request after an epoch
    asks_after_epochs: bool  # True: the end of an epoch causes a request
    seed: int  # seed of the search
    gangs: bool = False  # True: the policy gives a job exactly its wanted slots or none
    rebatches: bool = False  # True: reports cause requests for new batches on the same slots
