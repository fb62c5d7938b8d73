"""Speeds and noise scales of families."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.search.observed_families import (
    MAX_SIZES,
    NO_PARTS,
    FamilyRecord,
    Priors,
    SmoothedNoise,
    is_plausible_noise,
    stage,
)


def step_s(family: FamilyRecord, slots: int = 1, local_batch: int = 64) -> float:
    """Step time of the model on one node."""
    model = family.speed_model(64)
    return float(model.step_s(np.array([1]), np.array([slots]), np.array([float(local_batch)]))[0])


def taught(*seconds: float, gpu_type: str = "") -> FamilyRecord:
    """Family with these step times on one slot."""
    family = FamilyRecord()
    for each in seconds:
        family.add(1, 1, 64, each, gpu_type=gpu_type)
    return family


# --- speeds


def test_a_model_agrees_with_measurements() -> None:
    family = taught(0.2)
    family.add(1, 2, 64, 0.25)

    assert family.speed_model(64).known
    assert not FamilyRecord().speed_model(64).known
    assert [step_s(family), step_s(family, 2)] == [pytest.approx(0.2), pytest.approx(0.25)]
    assert family.largest == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e7, math.inf, math.nan])
def test_an_implausible_step_time_is_ignored(seconds: float) -> None:
    family = taught(seconds)

    assert (family.means, family.largest) == ({}, 1)


def test_a_mean_step_time_is_smoothed_and_its_weight_bounded() -> None:
    family = taught(0.1, 0.2, 0.2)

    (mean,) = family.means.values()
    assert [mean.step_s, mean.weight] == pytest.approx([0.151, 3.0])
    assert [mean.weight for mean in taught(*[0.1] * 50).means.values()] == [10.0]


def test_a_model_is_fitted_again_for_a_new_size_or_a_drift() -> None:
    family = taught(0.1)
    first = family.speed_model(64)

    family.add(1, 1, 64, 0.11)
    assert family.speed_model(64) is first
    family.add(1, 2, 64, 0.12)
    second = family.speed_model(64)
    assert second is not first
    for _ in range(3):
        family.add(1, 1, 64, 0.2)
    assert family.speed_model(64) is not second
    assert family.edition == 3


def test_the_latest_sizes_are_kept() -> None:
    family = FamilyRecord()

    for local_batch in range(1, MAX_SIZES + 2):
        family.add(1, 1, local_batch, 0.1)

    batches = [batch for _, _, batch, *_ in family.means]
    assert batches == list(range(2, MAX_SIZES + 2))


# --- types of GPU


def test_step_times_are_those_of_the_fastest_gpu_type() -> None:
    priors = Priors(gpu_types={"fast": -0.35, "slow": 0.35}, types=("slow", "fast"))
    both, slow_only = FamilyRecord(priors=priors), FamilyRecord(priors=priors)
    for _ in range(10):
        both.add(1, 1, 64, 0.1, gpu_type="fast")
        both.add(1, 1, 64, 0.1 * math.exp(0.7), gpu_type="slow")
        slow_only.add(1, 1, 64, 0.2, gpu_type="slow")

    alone = taught(0.2, gpu_type="fast")
    assert (step_s(alone), alone.parts) == (pytest.approx(0.2), NO_PARTS)
    assert step_s(both) == pytest.approx(0.1, rel=0.05)
    assert step_s(slow_only) == pytest.approx(0.2 / math.exp(0.7), rel=0.05)


# --- noise scales


def test_noise_scales_are_smoothed_in_logarithms() -> None:
    noise = SmoothedNoise()
    values = []
    for value in (100.0, 800.0, 100.0, 800.0):
        noise.add(value)
        values.append(noise.value)

    # weights of 1/2, 1/3 and then 0.3
    second = 100 * 8 ** (1 / 2)
    third = second * (100 / second) ** (1 / 3)
    assert values == pytest.approx([100.0, second, third, third * (800 / third) ** 0.3])
    assert noise.count == 4


@given(reports=st.lists(st.floats() | st.none(), max_size=20))
def test_implausible_noise_scales_are_ignored(reports: list[float | None]) -> None:
    family, ignored = FamilyRecord(), FamilyRecord()
    for value in (None, 0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e308):
        ignored.observe_noise(0, value)
        assert not is_plausible_noise(value)

    for value in reports:
        family.observe_noise(0, value)

    found = family.noise_at(0)
    assert ignored.noise_at(0) is None
    assert found is None or is_plausible_noise(found)


def test_a_noise_scale_counts_for_near_stages_of_training() -> None:
    family = FamilyRecord()
    family.observe_noise(4, 100.0)
    family.observe_noise(7, 900.0)

    even = FamilyRecord()
    even.observe_noise(3, 100.0)
    even.observe_noise(5, 900.0)
    assert even.noise_at(4) == 100.0  # the earlier of two equally near stages
    assert [family.noise_at(epoch) for epoch in range(1, 11)] == [
        None, 100.0, 100.0, 100.0, 100.0, 900.0, 900.0, 900.0, 900.0, None,
    ]  # fmt: skip


def test_stages_are_epochs_then_eight_per_doubling() -> None:
    assert [stage(epoch) for epoch in (0, 1, 15, 16, 17, 18, 32, 64, 1600)] == [
        0, 1, 15, 16, 16, 17, 24, 32, 69,
    ]  # fmt: skip
    assert all(0 <= stage(epoch + 1) - stage(epoch) <= 1 for epoch in range(5000))
