"""Virtual time: order of calls, limits of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.engine.event_queue import AFTER, FIRST, LAST, USUAL, Kernel


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([FIRST, USUAL, LAST, AFTER]))))
def test_any_schedule_is_sorted_and_stable(rows: list[tuple[int, int]]) -> None:
    kernel, seen = Kernel(), list[tuple[int, int, int]]()
    for number, (when, priority) in enumerate(rows):
        kernel.call_at(float(when), seen.append, (when, priority, number), priority=priority)

    kernel.run()

    assert seen == sorted(seen)
    assert len(seen) == len(rows)


def test_a_call_sees_its_time_and_priority_and_is_never_in_the_past() -> None:
    kernel, seen = Kernel(), list[tuple[float, int]]()

    def look() -> None:
        seen.append((kernel.now, kernel.priority))

    kernel.call_at(5.0, kernel.call_at, 3.0, look)
    for priority in (AFTER, FIRST):
        kernel.call_at(1.0, look, priority=priority)
    kernel.run()

    assert seen == [(1.0, FIRST), (1.0, AFTER), (5.0, USUAL)]


def test_a_run_continues_after_its_limit() -> None:
    kernel, seen = Kernel(), list[float]()
    for when in (1.0, 2.0, 3.0):
        kernel.call_at(when, seen.append, when)

    kernel.run(until=2.0)
    assert (seen, kernel.now) == ([1.0, 2.0], 2.0)
    kernel.run()
    assert (seen, kernel.now) == ([1.0, 2.0, 3.0], 3.0)


def test_a_call_can_stop_the_run() -> None:
    kernel, seen = Kernel(), list[float]()

    def stop() -> None:
        kernel.stopped = True

    kernel.call_at(1.0, seen.append, 1.0)
    kernel.call_at(1.0, stop)
    kernel.call_at(1.0, seen.append, 2.0)
    kernel.run()

    assert seen == [1.0]


def test_an_endless_cycle_at_one_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.sim.engine.event_queue.MAX_CALLS_AT_ONCE", 1000)
    kernel = Kernel()

    def again() -> None:
        kernel.call_at(kernel.now, again)

    kernel.call_at(7.0, again)
    with pytest.raises(RuntimeError, match=r"time stands still at 7\.0 s: .*again"):
        kernel.run()
