"""Virtual time: what comes when, and that it goes on or says why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.engine.event_queue import AFTER, FIRST, LAST, USUAL, Kernel


def test_events_come_in_order_of_time_urgency_and_scheduling() -> None:
    kernel, seen = Kernel(), list[str]()
    for when, name, priority in [
        (2.0, "later", FIRST),
        (1.0, "after", AFTER),
        (1.0, "last", LAST),
        (1.0, "usual", USUAL),
        (1.0, "usual too", USUAL),
        (1.0, "first", FIRST),
    ]:
        kernel.call_at(when, seen.append, name, priority=priority)

    kernel.run()

    assert seen == ["first", "usual", "usual too", "last", "after", "later"]
    assert kernel.now == 2.0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([FIRST, USUAL, LAST, AFTER]))))
def test_any_schedule_is_sorted_and_stable(rows: list[tuple[int, int]]) -> None:
    kernel, seen = Kernel(), list[tuple[int, int, int]]()
    for number, (when, priority) in enumerate(rows):
        kernel.call_at(float(when), seen.append, (when, priority, number), priority=priority)

    kernel.run()

    assert seen == sorted(seen)
    assert len(seen) == len(rows)


def test_what_is_too_late_comes_now() -> None:
    kernel, seen = Kernel(), list[float]()

    def look() -> None:
        seen.append(kernel.now)

    kernel.call_at(5.0, kernel.call_at, 3.0, look)
    kernel.run()

    assert seen == [5.0]


def test_what_happens_knows_its_urgency() -> None:
    kernel, seen = Kernel(), list[int]()

    def look() -> None:
        seen.append(kernel.priority)

    kernel.call_at(1.0, look, priority=AFTER)
    kernel.call_at(1.0, look, priority=FIRST)
    kernel.run()

    assert seen == [FIRST, AFTER]


def test_it_goes_on_where_it_was_told_to_pause() -> None:
    kernel, seen = Kernel(), list[float]()
    for when in (1.0, 2.0, 3.0):
        kernel.call_at(when, seen.append, when)

    kernel.run(until=2.0)
    assert (seen, kernel.now) == ([1.0, 2.0], 2.0)
    kernel.run()
    assert (seen, kernel.now) == ([1.0, 2.0, 3.0], 3.0)


def test_somebody_can_stop_it() -> None:
    kernel, seen = Kernel(), list[float]()

    def stop() -> None:
        kernel.stopped = True

    kernel.call_at(1.0, seen.append, 1.0)
    kernel.call_at(1.0, stop)
    kernel.call_at(1.0, seen.append, 2.0)
    kernel.run()

    assert seen == [1.0]


def test_time_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.sim.engine.event_queue.MAX_CALLS_AT_ONCE", 1000)
    kernel = Kernel()

    def again() -> None:
        kernel.call_at(kernel.now, again)

    kernel.call_at(7.0, again)
    with pytest.raises(RuntimeError, match=r"time stands still at 7\.0 s: .*again"):
        kernel.run()
