"""Times of steps: measured, interpolated, extrapolated."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.sim.models.recording import (
    BATCH_POWER,
    SLOTS_POWER,
    EpochSpeed,
    Family,
    FamilyStepTimes,
    StepTime,
)
from controlplane.sim.traces.trace_csv import STEPS_PER_S
from schemas.epochs import StepTimes


def measured(nodes: int, slots: int, local: int, step_s: float) -> EpochSpeed:
    batch = slots * local
    return EpochSpeed(nodes, slots, batch, batch / step_s)


def family(*speeds: EpochSpeed) -> FamilyStepTimes:
    return FamilyStepTimes(Family(name="m", speeds=speeds, epoch_samples=1000))


def about(seconds: float, *, extrapolated: bool) -> tuple[object, bool]:
    return pytest.approx(seconds), extrapolated


def test_a_step_divides_as_reported_at_its_size() -> None:
    told = [EpochSpeed(1, 2, 128, 64.0, sync_s=sync_s, passes=2) for sync_s in (0.25, 0.75)]
    step_times = family(*told, EpochSpeed(1, 4, 128, 100.0))

    assert step_times.parts((2,), 128, 2.0) == StepTimes(1.25, 0.5, 32, 2)
    assert step_times.parts((2,), 128, 0.25) == StepTimes(0.25, 0.25, 32, 2)
    assert [
        step_times.parts(*group, 2.0) for group in [((2,), 64), ((4,), 128), ((1, 1), 128)]
    ] == [None] * 3


def test_a_measured_size_takes_the_mean_of_its_measurements() -> None:
    times = family(measured(1, 2, 64, 0.1), measured(1, 2, 64, 0.3), measured(1, 1, 64, 0.5))

    assert times.step((2,), 128) == about(0.2, extrapolated=False)


def test_between_local_batches_a_step_lies_on_the_line_of_the_nearest_two() -> None:
    times = family(measured(1, 2, 32, 0.1), measured(1, 2, 64, 0.4), measured(1, 2, 128, 0.5))

    assert times.step((2,), 2 * 40) == about(0.175, extrapolated=False)
    assert times.step((2,), 2 * 96) == about(0.45, extrapolated=False)


def test_between_two_sizes_a_step_lies_on_the_line_between_them() -> None:
    times = family(
        measured(1, 2, 64, 0.3), measured(1, 4, 64, 0.1), measured(1, 4, 32, 0.1),
        measured(2, 4, 64, 9.0),
    )  # fmt: skip

    assert times.step((3,), 3 * 64) == about(0.2, extrapolated=False)
    # On 2 slots never below 64: half of the line is extrapolated, so all of it counts as that.
    half = (0.3 * (40 / 64) ** BATCH_POWER + 0.1) / 2
    assert times.step((3,), 3 * 40) == about(half, extrapolated=True)


def test_slots_on_other_nodes_are_the_same_size_unless_it_was_measured() -> None:
    times = family(measured(2, 4, 64, 0.2), measured(2, 8, 64, 0.4))
    both = family(measured(2, 4, 64, 0.2), measured(4, 4, 64, 0.6))

    assert times.step((2, 1, 1), 4 * 64) == about(0.2, extrapolated=False)
    assert times.step((3, 3), 6 * 64) == about(0.3, extrapolated=False)
    assert both.step((2, 2), 4 * 64) == about(0.2, extrapolated=False)
    assert both.step((2, 1, 1), 4 * 64) == about(0.4, extrapolated=False)


def test_beyond_the_local_batches_a_step_grows_as_between_the_nearest_two() -> None:
    times = family(
        measured(1, 2, 32, 0.1), measured(1, 2, 64, 0.1 * 2**0.5), measured(1, 2, 128, 0.2 * 2**0.5)
    )

    assert times.step((2,), 2 * 8) == about(0.05, extrapolated=True)
    assert times.step((2,), 2 * 256) == about(0.4 * 2**0.5, extrapolated=True)
    falling = family(measured(1, 2, 32, 0.2), measured(1, 2, 64, 0.1))
    assert falling.step((2,), 2 * 8) == about(0.2, extrapolated=True)


def test_beyond_the_sizes_a_step_grows_as_between_the_nearest_two() -> None:
    times = family(
        measured(1, 1, 64, 0.1), measured(1, 2, 64, 0.1), measured(1, 4, 64, 0.1 * 2**0.5)
    )

    assert times.step((8,), 8 * 64) == about(0.2, extrapolated=True)
    steep = family(measured(1, 1, 64, 0.1), measured(1, 2, 64, 0.9))
    assert steep.step((4,), 4 * 64) == about(1.8, extrapolated=True)  # of no use, not of harm
    falling = family(measured(1, 1, 64, 0.2), measured(1, 2, 64, 0.1))
    assert falling.step((4,), 4 * 64) == about(0.1, extrapolated=True)


def test_a_single_measurement_is_extrapolated_by_published_powers() -> None:
    times = family(measured(1, 2, 64, 0.1))

    assert times.step((4,), 4 * 64) == about(0.1 * 2**SLOTS_POWER, extrapolated=True)
    assert times.step((1,), 64) == about(0.1 / 2**SLOTS_POWER, extrapolated=True)
    assert times.step((2,), 2 * 128) == about(0.1 * 2**BATCH_POWER, extrapolated=True)
    assert times.step((1,), 32) == about(0.1 / 2 ** (SLOTS_POWER + BATCH_POWER), extrapolated=True)


def test_growth_with_the_slots_is_the_median_of_gavels_measurements() -> None:
    grown = [1.0 - math.log(of[8] / of[1], 8) for of in STEPS_PER_S.values() if 8 in of]

    assert len(grown) == 19
    assert median(grown) == pytest.approx(SLOTS_POWER, abs=0.005)


def test_an_unmeasured_group_across_nodes_is_as_fast_as_within_a_node() -> None:
    near, far = family(measured(1, 4, 64, 0.1)), family(measured(2, 4, 64, 0.1))

    assert near.step((2, 2), 4 * 64) == about(0.1, extrapolated=True)
    assert far.step((4,), 4 * 64) == about(0.1, extrapolated=True)


Points = dict[tuple[int, int], float]  # seconds by slots and local batch
some_points = st.dictionaries(
    st.tuples(st.integers(1, 8), st.sampled_from([16, 32, 64])), st.floats(0.01, 10.0), min_size=1,
    max_size=12,
)  # fmt: skip


@given(some_points, st.integers(1, 12), st.integers(8, 100))
def test_interpolated_times_are_bounded_by_measurements(
    points: Points, slots: int, local: int
) -> None:
    times = family(*(measured(1, on, batch, s) for (on, batch), s in points.items()))

    step: StepTime = times.step((slots,), slots * local)

    assert math.isfinite(step.seconds)
    assert step.seconds > 0.0
    if not step.extrapolated:
        inside = min(points.values()) * (1 - 1e-9), max(points.values()) * (1 + 1e-9)
        assert inside[0] <= step.seconds <= inside[1]
    if (slots, local) in points:
        assert step == about(points[slots, local], extrapolated=False)
