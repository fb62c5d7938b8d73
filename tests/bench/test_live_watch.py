"""Who counts as held: at a size that is known to be slower than another one that can be had."""

from __future__ import annotations

import pytest

from tests.bench.live_policies import idle_while_waiting
from tests.bench.live_watch import Look, SizeWatch, Violation

PHI = 1e9  # every sample is worth one


def lived(
    watch: SizeWatch, begin: float, end: float, slots: int, speed: float, *, idle: int = 0
) -> list[Violation]:
    """Half-second looks at a job that stays as it is."""
    found = []
    for half in range(int(2 * begin), int(2 * end)):
        found += watch.take([Look(half / 2, "a", slots, 24 * slots, speed, PHI)], idle)
    return found


def told(violation: Violation) -> tuple[float, tuple[int, int], tuple[int, int], str]:
    return violation.began, violation.shape, violation.better, violation.reason


def test_a_growth_that_loses_may_live_for_ten_seconds() -> None:
    watch = SizeWatch()

    assert lived(watch, 0.0, 10.0, 1, 100.0) == []
    assert lived(watch, 10.0, 20.0, 2, 80.0) == []
    (held,) = lived(watch, 20.0, 30.0, 2, 80.0)

    assert told(held) == (10.0, (2, 48), (1, 24), "the same or fewer slots")
    assert [held.progress, held.better_progress] == pytest.approx([80.0, 100.0])
    assert watch.violations == [held]
    assert [held.ended, watch.most_s] == [29.5, 19.5]


def test_a_growth_that_brings_little_or_nothing_is_none() -> None:
    watch = SizeWatch()
    lived(watch, 0.0, 10.0, 1, 100.0)

    assert lived(watch, 10.0, 60.0, 2, 95.0) == []


def test_fewer_slots_are_held_only_while_enough_are_idle() -> None:
    watch = SizeWatch()
    lived(watch, 0.0, 10.0, 4, 300.0)

    assert lived(watch, 10.0, 40.0, 2, 160.0) == []
    assert lived(watch, 40.0, 60.0, 2, 160.0, idle=1) == []
    assert lived(watch, 60.0, 70.0, 2, 160.0, idle=2) == []
    (held,) = lived(watch, 70.0, 75.0, 2, 160.0, idle=2)

    assert told(held) == (60.0, (2, 48), (4, 96), "slots were idle")


def test_more_samples_a_second_are_no_better_where_they_are_worth_less() -> None:
    """At phi 0 a batch four times as large makes a sample worth a quarter."""
    watch = SizeWatch()
    for half in range(20):
        watch.take([Look(half / 2, "a", 1, 24, 100.0, 0.0)], 0)
    for half in range(20, 60):
        assert watch.take([Look(half / 2, "a", 1, 12, 60.0, 0.0)], 0) == []


def test_a_size_that_was_seen_for_a_moment_is_not_known() -> None:
    watch = SizeWatch()
    lived(watch, 0.0, 4.0, 1, 100.0)

    assert lived(watch, 4.0, 60.0, 2, 50.0) == []


def test_idle_slots_count_while_somebody_waits() -> None:
    """Two slots. One is taken from 0 to 10, the other from 4 to 6; somebody waits from 2 to 5."""
    assert idle_while_waiting([(0.0, 10.0), (4.0, 6.0)], [(2.0, 5.0)], 2) == 2.0
    assert idle_while_waiting([], [(2.0, 5.0)], 2) == 3.0
    assert idle_while_waiting([(0.0, 10.0)] * 2, [(2.0, 5.0)], 2) == 0.0
