"""Smoothed step times, and when a model of them is out of date."""

from __future__ import annotations

from controlplane.prediction.step_times import MAX_WEIGHT, Size, StepTimes

ONE: Size = (1, 1, 64)
TWO: Size = (1, 2, 32)


def test_a_size_that_was_never_measured_and_a_mean_that_drifts_tell_something_new() -> None:
    times: StepTimes[Size] = StepTimes()

    assert times.add(ONE, 0.1)
    assert not times.add(ONE, 0.11)  # the mean is 3% longer
    assert times.add(ONE, 0.2)  # 32%
    times.mark_fitted()
    assert not times.add(ONE, times.means[ONE].step_s)
    assert times.add(TWO, 0.1)


def test_a_mean_follows_the_newest_and_weighs_as_much_as_a_few_measurements() -> None:
    times: StepTimes[Size] = StepTimes()
    for step_s in [0.1, *[0.2] * 30]:
        times.add(ONE, step_s)

    assert 0.199 < times.means[ONE].step_s < 0.2
    assert times.means[ONE].weight == MAX_WEIGHT


def test_only_the_latest_sizes_are_remembered_if_there_is_a_bound() -> None:
    bounded, unbounded = StepTimes[Size](kept=2), StepTimes[Size]()
    for times in (bounded, unbounded):
        for local in range(3):
            times.add((1, 1, local), 0.1)

    assert list(bounded.means) == [(1, 1, 1), (1, 1, 2)]
    assert len(unbounded.means) == 3
