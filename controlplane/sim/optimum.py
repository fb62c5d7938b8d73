"""The best that any policy could do on tiny instances, by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.sim.bounds import fluid_srpt

MOST_JOBS: Final = 5
MOST_SLOTS: Final = 4
MARGIN: Final = 1e-9  # of a completion time, below which two schedules are as good


def brute_force(
    release: Sequence[float],
    work: Sequence[float],
    speeds: Sequence[Sequence[float]],
    slots: int,
) -> float:
    """The smallest average completion time (end minus release) of a tiny instance.

    Over all schedules that hold every job on a constant number of slots from one event to the
    next, an event being that a job is released or ends; changes are free. Branch and bound with
    `fluid_srpt`, most promising first; idle slots are tried too.

    Args:
        release: seconds, one for each of at most `MOST_JOBS` jobs.
        work: of each job, in what its speeds count in a second.
        speeds: of each job on 0, 1, 2 ... slots; on more slots than it has entries, the last.
        slots: of the cluster, at most `MOST_SLOTS`.

    Returns:
        Seconds; 0 without jobs.

    Raises:
        ValueError: if the instance is larger, or a job could never end.
    """
    if len(work) > MOST_JOBS or not 1 <= slots <= MOST_SLOTS:
        raise ValueError(f"too large to try everything: {len(work)} jobs, {slots} slots")
    if not len(release) == len(work) == len(speeds):
        raise ValueError("release, work and speeds must be of the same jobs")
    if not len(work):
        return 0.0
    order = sorted(range(len(work)), key=lambda job: release[job])
    search = _Search(
        release=tuple(float(release[job]) for job in order),
        speeds=tuple(_speeds_on(speeds[job], slots) for job in order),
        slots=slots,
    )
    return search.best(tuple(float(work[job]) for job in order)) / len(work)


def _speeds_on(speeds: Sequence[float], slots: int) -> tuple[float, ...]:
    found = tuple(float(speeds[min(slot, len(speeds) - 1)]) for slot in range(1, slots + 1))
    if not max(found, default=0.0) > 0.0:
        raise ValueError("a job that never progresses never ends")
    return (0.0, *found)


@dataclass(frozen=True, slots=True)
class _State:
    now: float
    left: tuple[float, ...]  # work of each job, in order of release; 0: ended
    flow: float  # completion times of the jobs that ended, summed up


@dataclass
class _Search:
    release: tuple[float, ...]
    speeds: tuple[tuple[float, ...], ...]
    slots: int
    found: float = float("inf")

    def best(self, work: tuple[float, ...]) -> float:
        """The smallest sum of completion times."""
        self._visit(_State(self.release[0], work, 0.0))
        return self.found

    def _visit(self, state: _State) -> None:
        if not any(state.left):
            self.found = min(self.found, state.flow)
            return
        children = [self._after(state, on) for on in self._allocations(state)]
        promising = sorted(
            ((self._bound(child), child) for child in children if child is not None),
            key=lambda pair: pair[0],
        )
        for bound, child in promising:
            if bound >= self.found * (1.0 - MARGIN):
                return
            self._visit(child)

    def _allocations(self, state: _State, job: int = 0, used: int = 0) -> Iterator[tuple[int, ...]]:
        """Slots of each job from `job` on; only numbers that are faster than all smaller ones."""
        if job == len(state.left):
            yield ()
            return
        speeds = self.speeds[job]
        active = state.left[job] > 0.0 and self.release[job] <= state.now
        useful = [
            slots
            for slots in range((self.slots - used if active else 0) + 1)
            if slots == 0 or speeds[slots] > max(speeds[:slots])
        ]
        for slots in useful:
            for rest in self._allocations(state, job + 1, used + slots):
                yield (slots, *rest)

    def _after(self, state: _State, on: tuple[int, ...]) -> _State | None:
        """The state at the next event; None if there is none."""
        pace = [speeds[slots] for speeds, slots in zip(self.speeds, on, strict=True)]
        ends = [left / x for left, x in zip(state.left, pace, strict=True) if x > 0.0]
        coming = [at - state.now for at in self.release if at > state.now]
        if not ends and not coming:
            return None
        step = min([*ends, *coming])
        now, flow, left = state.now + step, state.flow, list(state.left)
        if coming and step == coming[0]:
            now = min(at for at in self.release if at > state.now)  # exactly
        for job, x in enumerate(pace):
            if x > 0.0:
                over = left[job] / x <= step * (1.0 + MARGIN)
                left[job] = 0.0 if over else left[job] - x * step
                flow += now - self.release[job] if over else 0.0
        return _State(now, tuple(left), flow)

    def _bound(self, state: _State) -> float:
        """No schedule from here on has a smaller sum of completion times."""
        jobs = [job for job, left in enumerate(state.left) if left > 0.0]
        if not jobs:
            return state.flow
        per_slot = np.array([max(x / n for n, x in enumerate(self.speeds[j]) if n) for j in jobs])
        fastest = np.array([max(self.speeds[job]) for job in jobs])
        since = np.array([max(state.now, self.release[job]) for job in jobs])
        waited = sum(max(0.0, state.now - self.release[job]) for job in jobs)
        left = np.array([state.left[job] for job in jobs])
        ahead = fluid_srpt(since, left / per_slot, fastest / per_slot, float(self.slots))
        return state.flow + waited + ahead * len(jobs)
