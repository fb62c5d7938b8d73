"""A cluster in which jobs come, are placed, slow each other down and end: no more than that."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from controlplane.policy.harmony_drl.shared_nodes import SharedNodes

ROUNDING: Final = 1e-9  # of work: a job that has so little left has ended
Speeds = Callable[[SharedNodes, Sequence[str]], Mapping[str, float]]
PassTime = Callable[[float, float, int], None]
Place = Callable[[SharedNodes, "Arrival", Sequence["Arrival"]], None]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that is submitted."""

    name: str
    at: float  # seconds
    number: int  # of its class
    size: int  # workers
    work_s: float  # that it trains alone on as few nodes as possible


@dataclass(slots=True)
class _Running:
    arrival: Arrival
    left_s: float  # of its work
    trains_at: float  # it starts until then


@dataclass(slots=True)
class Episode:
    """From the first submission to the last end.

    As in the simulator, time goes from event to event. Paper: intervals of equal length. Here: an
    interval ends when a job comes or ends, which is when anything can be decided.
    """

    arrivals: Sequence[Arrival]  # by time
    shared: SharedNodes  # with nobody there
    speeds: Speeds  # shares of their speed alone that these jobs have
    start_s: float = 0.0  # from its slots to its first step
    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)  # of jobs, seconds
    _coming: deque[Arrival] = field(default_factory=deque)
    _line: deque[Arrival] = field(default_factory=deque)
    _running: dict[str, _Running] = field(default_factory=dict)

    def run(self, place: Place, pass_time: PassTime | None = None) -> None:
        """Live through it.

        Args:
            place: puts a job for which there is room onto nodes; it is added there without
                workers, and told who waits behind it.
            pass_time: told of seconds that pass, of the sum of normalised speeds in them, and of
                the jobs that are there, whether they run or wait.
        """
        self._coming.extend(self.arrivals)
        while self._coming or self._line or self._running:
            while self._coming and self._coming[0].at <= self.now:
                self._line.append(self._coming.popleft())
            while self._line and self._line[0].size <= int(self.shared.free.sum()):
                job = self._line.popleft()
                self.shared.add(job.name, job.number, job.size)
                place(self.shared, job, self._line)
                self._running[job.name] = _Running(job, job.work_s, self.now + self.start_s)
            self._advance(pass_time)

    def _advance(self, pass_time: PassTime | None) -> None:
        """To the next event."""
        training = [name for name, job in self._running.items() if job.trains_at <= self.now]
        speeds = self.speeds(self.shared, training) if training else {}
        until = self._coming[0].at if self._coming else math.inf
        for name, job in self._running.items():
            due = self.now + job.left_s / speeds[name] if name in speeds else job.trains_at
            until = min(until, due)
        passed = until - self.now
        if pass_time is not None and passed > 0.0:
            pass_time(passed, math.fsum(speeds.values()), len(self._running) + len(self._line))
        self.now = until
        for name, speed in speeds.items():
            job = self._running[name]
            if job.left_s <= speed * passed * (1.0 + ROUNDING):
                self.ends[name] = until
                del self._running[name]
                self.shared.remove(name)
            else:
                job.left_s -= speed * passed
