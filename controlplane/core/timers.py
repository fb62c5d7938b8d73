"""Times at which something is due for a job."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from controlplane.core.model.job import Job, number_of
from controlplane.core.state import State
from schemas.ids import JobId, Seconds

SLACK: Final = 64  # outdated entries that the heap may always have
NextTime = Callable[[State, Job, Seconds], Seconds]


class JobTimers:
    """Time at which something is due next for each active job, or infinity.

    The time of a job is computed again after the job has changed, and when the time has come.

    Args:
        next_time: returns the time of a job.
    """

    def __init__(self, state: State, next_time: NextTime) -> None:
        self._state, self._next_time = state, next_time
        self._stale = dict(state.active)
        self._times: dict[JobId, Seconds] = {}
        self._heap: list[tuple[Seconds, JobId]] = []  # some entries are outdated

    @property
    def size(self) -> int:
        """Number of entries that are kept, with outdated ones."""
        return len(self._heap)

    def touch(self, jobs: Mapping[JobId, None]) -> None:
        """Mark jobs as possibly changed."""
        for name in jobs:
            if name in self._state.active:
                self._stale[name] = None
            else:
                self._stale.pop(name, None)
                self._times.pop(name, None)

    def passed(self, now: Seconds) -> list[JobId]:
        """Return the jobs whose time has come, in order of arrival."""
        self._update(self._stale, now)
        self._stale = {}
        self._update(dict.fromkeys(self._pop(now)), now)
        found = list(dict.fromkeys(self._pop(now)))
        for name in found:  # the next call returns them as well, if they have not changed
            heapq.heappush(self._heap, (self._times[name], name))
        return sorted(found, key=number_of)

    def _pop(self, now: Seconds) -> Iterator[JobId]:
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._times.get(name) == at:
                yield name

    def _update(self, jobs: Mapping[JobId, None], now: Seconds) -> None:
        for name in jobs:
            self._times.pop(name, None)
            if name in self._state.active:
                at = self._next_time(self._state, self._state.jobs[name], now)
                if at < math.inf:
                    self._times[name] = at
                    heapq.heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._times) + SLACK:
            self._heap = [(at, name) for name, at in self._times.items()]
            heapq.heapify(self._heap)
