"""Smoothed step times, and Optimus' model of step times."""

from __future__ import annotations

import pytest

from controlplane.prediction.step_times import (
    MAX_WEIGHT,
    Size,
    StepModel,
    StepSample,
    StepTimes,
    fit_steps,
)

ONE: Size = (1, 1, 64)
TWO: Size = (1, 2, 32)


def test_a_new_size_or_a_drifting_mean_needs_a_new_fit() -> None:
    times: StepTimes[Size] = StepTimes()

    assert times.add(ONE, 0.1)
    assert not times.add(ONE, 0.11)  # the mean is 3% longer
    assert times.add(ONE, 0.2)  # 32%
    times.mark_fitted()
    assert not times.add(ONE, times.means[ONE].step_s)
    assert times.add(TWO, 0.1)


def test_a_mean_follows_the_newest_measurements_with_bounded_weight() -> None:
    times: StepTimes[Size] = StepTimes()
    for step_s in [0.1, *[0.2] * 30]:
        times.add(ONE, step_s)

    assert 0.199 < times.means[ONE].step_s < 0.2
    assert times.means[ONE].weight == MAX_WEIGHT


def test_a_bound_keeps_the_latest_sizes() -> None:
    bounded, unbounded = StepTimes[Size](kept=2), StepTimes[Size]()
    for times in (bounded, unbounded):
        for local in range(3):
            times.add((1, 1, local), 0.1)

    assert list(bounded.means) == [(1, 1, 1), (1, 1, 2)]
    assert len(unbounded.means) == 3


TRUE = StepModel((0.002, 0.05, 0.02, 0.003))
SEEN = [(slots, batch) for slots in (1, 2, 3, 4, 8) for batch in (64, 256)]


@pytest.mark.parametrize(
    ("slots", "batch", "within"), [(1, 128, 0.03), (6, 128, 0.03), (16, 256, 0.15)]
)
def test_a_fit_predicts_unmeasured_sizes(slots: int, batch: int, within: float) -> None:
    samples = [StepSample(w, b, TRUE.step_s(w, b)) for w, b in SEEN]

    # On 2 slots with batch 100: 0.002 x 50 + 0.05 + 0.02 / 2 + 0.003 x 2.
    assert TRUE.step_s(2, 100) == pytest.approx(0.166)
    assert fit_steps(samples, 64).step_s(slots, batch) == pytest.approx(
        TRUE.step_s(slots, batch), rel=within
    )


def test_a_job_that_slots_slow_down_is_not_predicted_to_gain() -> None:
    samples = [StepSample(slots, 64, 0.1 * slots) for slots in (1, 2, 4)]
    model = fit_steps(samples, 64)

    assert model.step_s(3, 64) < model.step_s(4, 64) < model.step_s(5, 64)


@pytest.mark.parametrize("samples", [[], [StepSample(2, 128, 0.6)]])
def test_unmeasured_sizes_speed_up_slightly_below_proportion(
    samples: list[StepSample],
) -> None:
    model = fit_steps(samples, 64)

    for slots in (1, 2, 4, 8):
        assert 1.6 < model.step_s(slots, 64) / model.step_s(2 * slots, 64) < 2.0


def test_coefficients_are_never_negative() -> None:
    samples = [StepSample(1, 64, 0.5), StepSample(2, 64, 0.1), StepSample(4, 256, 0.9)]

    assert min(fit_steps(samples, 64).coefficients) >= 0.0
