"""The lower bound of completion times, and the optimum of tiny instances."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.sim.analysis.bounds import fluid_srpt, least_flow
from tests.support.sizes import examples

SLOTS = 3
INF = float("inf")


def bound(
    release: Sequence[float], work: Sequence[float], most: Sequence[float], capacity: float
) -> float:
    return fluid_srpt(
        np.array(release, float), np.array(work, float), np.array(most, float), capacity
    )


def linear(jobs: int, slots: int = SLOTS) -> list[list[float]]:
    return [[float(slot) for slot in range(slots + 1)]] * jobs


# --- the bound


@pytest.mark.parametrize(
    ("release", "work", "most", "capacity", "expected"),
    [
        ([], [], [], 4.0, 0.0),
        ([7.0], [12.0], [3.0], 4.0, 4.0), ([7.0], [12.0], [INF], 4.0, 3.0),
        # On one machine: the second runs 1-2, the first 0-1 and 2-5, the third 5-9.
        ([0.0, 1.0, 1.0], [4.0, 1.0, 4.0], [INF] * 3, 1.0, (5.0 + 1.0 + 8.0) / 3.0),
        # At 3 the first has 1 left, which is less than the 2 of the second.
        ([0.0, 3.0], [4.0, 2.0], [INF] * 2, 1.0, (4.0 + 3.0) / 2.0),
        # Limited jobs cannot use an empty cluster.
        ([0.0, 0.0], [10.0, 10.0], [1.0, 2.0], 100.0, (10.0 + 5.0) / 2.0),
        ([5.0, 5.0], [0.0, 2.0], [1.0, 1.0], 1.0, 1.0),  # the first has no work
    ],
)  # fmt: skip
def test_the_bound_of_few_jobs(
    release: list[float], work: list[float], most: list[float], capacity: float, expected: float
) -> None:
    assert bound(release, work, most, capacity) == expected


@pytest.mark.parametrize(
    ("release", "work", "most", "capacity"),
    [
        ([0.0], [1.0, 2.0], [1.0], 1.0), ([0.0], [-1.0], [1.0], 1.0), ([np.nan], [1.0], [1.0], 1.0),
        ([0.0], [INF], [1.0], 1.0), ([0.0], [1.0], [0.0], 1.0), ([0.0], [1.0], [1.0], 0.0),
        ([0.0], [1.0], [1.0], INF),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(
    release: list[float], work: list[float], most: list[float], capacity: float
) -> None:
    with pytest.raises(ValueError, match=r"must be|differ"):
        bound(release, work, most, capacity)


@pytest.mark.slow
def test_a_hundred_thousand_jobs_take_seconds() -> None:
    rng = np.random.default_rng(0)
    release, work = np.sort(rng.uniform(0.0, 1e6, 100_000)), rng.exponential(600.0, 100_000)

    began = time.process_time()
    fluid_srpt(release, work, np.full(100_000, 8.0), 64.0)

    assert time.process_time() - began < 10.0


# --- the best that any policy could do on tiny instances, by trying everything

MARGIN: Final = 1e-9  # of a completion time, below which two schedules are as good


def brute_force(
    release: Sequence[float], work: Sequence[float], speeds: Sequence[Sequence[float]], slots: int
) -> float:
    """The smallest average completion time (end minus release) of a tiny instance.

    Over all schedules that hold every job on a constant number of slots from one event to the
    next, an event being that a job is released or ends, and leave no slot idle that would speed
    up a job; changes are free. Branch and bound, most promising first: a fraction of a second for
    4 jobs, some seconds for most instances of 5.

    Args:
        release: seconds, one for each job.
        work: of each job, in what its speeds count in a second.
        speeds: of each job on 0, 1, 2 ... slots.
        slots: of the cluster.
    """
    order = sorted(range(len(work)), key=lambda job: release[job])
    search = _Search(
        release=tuple(float(release[job]) for job in order),
        speeds=tuple(tuple(speeds[job]) for job in order),
        slots=slots,
    )
    return search.best(tuple(float(work[job]) for job in order)) / len(work)


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
    found: float = math.inf
    known: dict[tuple[bool, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up once what every bound needs."""
        self.fastest = [max(speeds) for speeds in self.speeds]
        self.per_slot = [max(x / n for n, x in enumerate(of) if n) for of in self.speeds]

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

    def _allocations(self, state: _State) -> list[tuple[int, ...]]:
        """Slots of each job: all that leave no slot idle which would speed up a job."""
        active = tuple(
            left > 0.0 and at <= state.now
            for left, at in zip(state.left, self.release, strict=True)
        )
        if active not in self.known:
            self.known[active] = list(self._full(active))
        return self.known[active]

    def _full(self, active: tuple[bool, ...]) -> Iterator[tuple[int, ...]]:
        useful = [
            [n for n in range(self.slots + 1) if n == 0 or speeds[n] > max(speeds[:n])]
            if is_active
            else [0]
            for is_active, speeds in zip(active, self.speeds, strict=True)
        ]
        for on in itertools.product(*useful):
            free = self.slots - sum(on)
            if free >= 0 and not any(
                n < more <= n + free for n, of in zip(on, useful, strict=True) for more in of
            ):
                yield on

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
        since = [max(state.now, self.release[job]) for job in jobs]
        waited = sum(since) - sum(self.release[job] for job in jobs)
        work = [state.left[job] / self.per_slot[job] for job in jobs]
        fastest = [self.fastest[job] / self.per_slot[job] for job in jobs]
        return state.flow + waited + least_flow(since, work, fastest, float(self.slots))


# --- both, and policies

Instance = tuple[list[float], list[float], list[list[float]]]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Up to four jobs with concave speeds on up to three slots, some limited to fewer."""
    jobs = draw(st.integers(1, 4))
    moments = st.floats(0.0, 20.0).map(lambda at: round(at, 1))
    release = draw(st.lists(moments, min_size=jobs, max_size=jobs))
    work = draw(st.lists(st.floats(0.5, 30.0), min_size=jobs, max_size=jobs))
    bends = draw(st.lists(st.floats(0.0, 1.0), min_size=jobs, max_size=jobs))
    limits = draw(st.lists(st.integers(1, SLOTS), min_size=jobs, max_size=jobs))
    speeds = [
        [min(slots, limit) ** bend if slots else 0.0 for slots in range(SLOTS + 1)]
        for bend, limit in zip(bends, limits, strict=True)
    ]
    return release, work, speeds


def by_order(instance: Instance, order: Callable[[list[float]], list[int]], width: int) -> float:
    """Average completion time of a policy that leaves no slot idle.

    At every event the jobs in `order` take up to `width` slots each, and then, again in order,
    what is left over and makes them faster.
    """
    release, work, speeds = instance
    now, left, flow = min(release), list(work), 0.0
    while any(left):
        active = [job for job in order(left) if left[job] > 0.0 and release[job] <= now]
        free, on = SLOTS, [0] * len(left)
        for most in (width, SLOTS):  # first all up to `width`, then whoever can use more
            for job in active:
                while free and on[job] < most and speeds[job][on[job] + 1] > speeds[job][on[job]]:
                    free, on[job] = free - 1, on[job] + 1
        pace = [of[slots] for of, slots in zip(speeds, on, strict=True)]
        ends = [left[job] / x for job, x in enumerate(pace) if x > 0.0]
        step = min(ends + [at - now for at in release if at > now])
        now = min([at for at in release if at > now and at - now == step], default=now + step)
        for job, x in enumerate(pace):
            if x > 0.0:
                over = left[job] / x <= step * (1.0 + 1e-12)
                left[job] = 0.0 if over else left[job] - x * step
                flow += now - release[job] if over else 0.0
    return flow / len(work)


@settings(deadline=None, max_examples=examples(60))
@given(instance=instances())
def test_no_policy_beats_the_optimum_nor_the_optimum_the_bound(instance: Instance) -> None:
    release, work, speeds = instance
    # The table of a slot's worth: one slot is the most efficient, for speeds are concave.
    lower = bound(release, work, [max(of) for of in speeds], SLOTS)

    best = brute_force(release, work, speeds, SLOTS)

    def shortest(left: list[float]) -> list[int]:
        return sorted(range(len(left)), key=left.__getitem__)

    def first(left: list[float]) -> list[int]:
        return sorted(range(len(left)), key=release.__getitem__)

    policies = [
        by_order(instance, order, width) for order in (shortest, first) for width in (1, 2, SLOTS)
    ]
    assert lower <= best * (1.0 + 1e-9)
    assert best <= min(policies) * (1.0 + 1e-9)


@settings(deadline=None, max_examples=examples(60))
@given(instance=instances())
def test_linear_jobs_on_one_slot_reach_the_bound(instance: Instance) -> None:
    release, work, _ = instance

    best = brute_force(release, work, linear(len(work), 1), 1)

    assert best == pytest.approx(bound(release, work, [INF] * len(work), 1.0), rel=1e-9)
