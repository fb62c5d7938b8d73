"""Optimus' model of step times."""

from __future__ import annotations

import pytest

from controlplane.prediction.step_times import StepModel, StepSample, fit_steps

TRUE = StepModel((0.002, 0.05, 0.02, 0.003))
SEEN = [(slots, batch) for slots in (1, 2, 3, 4, 8) for batch in (64, 256)]


def test_a_model_worked_out_by_hand() -> None:
    """On 2 slots with batch 100: 0.002 x 50 + 0.05 + 0.02 / 2 + 0.003 x 2."""
    assert TRUE.step_s(2, 100) == pytest.approx(0.166)


@pytest.mark.parametrize(
    ("slots", "batch", "within"), [(1, 128, 0.03), (6, 128, 0.03), (16, 256, 0.15)]
)
def test_a_fit_says_what_the_truth_says_at_sizes_it_never_saw(
    slots: int, batch: int, within: float
) -> None:
    samples = [StepSample(w, b, TRUE.step_s(w, b)) for w, b in SEEN]

    assert fit_steps(samples, 64).step_s(slots, batch) == pytest.approx(
        TRUE.step_s(slots, batch), rel=within
    )


def test_a_job_that_further_slots_slow_down_is_not_thought_to_gain() -> None:
    samples = [StepSample(slots, 64, 0.1 * slots) for slots in (1, 2, 4)]
    model = fit_steps(samples, 64)

    assert model.step_s(3, 64) < model.step_s(4, 64) < model.step_s(5, 64)


@pytest.mark.parametrize("samples", [[], [StepSample(2, 128, 0.6)]])
def test_what_was_not_measured_is_believed_to_speed_up_a_little_below_proportion(
    samples: list[StepSample],
) -> None:
    model = fit_steps(samples, 64)

    for slots in (1, 2, 4, 8):
        assert 1.6 < model.step_s(slots, 64) / model.step_s(2 * slots, 64) < 2.0


def test_coefficients_are_never_negative() -> None:
    samples = [StepSample(1, 64, 0.5), StepSample(2, 64, 0.1), StepSample(4, 256, 0.9)]

    assert min(fit_steps(samples, 64).coefficients) >= 0.0
