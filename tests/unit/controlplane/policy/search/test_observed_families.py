"""What the jobs of one script teach about each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.search.observed_families import (
    MAX_SIZES,
    NO_PARTS,
    Colocation,
    FamilyRecord,
    Priors,
    SmoothedNoise,
    is_plausible_noise,
    stage,
)

HUNGRY: Colocation = (False, "hungry", False)


def step_s(family: FamilyRecord, slots: int = 1, local_batch: int = 64) -> float:
    """What its model says, on one node."""
    model = family.speed_model(64)
    return float(model.step_s(np.array([1]), np.array([slots]), np.array([float(local_batch)]))[0])


def taught(
    *seconds: float, gpu_type: str = "", colocation: Colocation | None = None
) -> FamilyRecord:
    """A family that took these steps on one slot."""
    family = FamilyRecord()
    for each in seconds:
        family.add(1, 1, 64, each, gpu_type=gpu_type, colocation=colocation)
    return family


# --- speeds


def test_a_family_that_was_never_seen_has_a_model_without_seconds() -> None:
    assert not FamilyRecord().speed_model(64).known


def test_a_model_says_what_was_measured() -> None:
    family = taught(0.2)
    family.add(1, 2, 64, 0.25)

    assert family.speed_model(64).known
    assert [step_s(family), step_s(family, 2)] == [pytest.approx(0.2), pytest.approx(0.25)]
    assert family.largest == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e7, math.inf, math.nan])
def test_a_step_that_nobody_can_have_taken_teaches_nothing(seconds: float) -> None:
    family = taught(seconds)

    assert (family.means, family.largest) == ({}, 1)


def test_of_several_steps_at_one_size_the_newest_counts_for_three_tenths() -> None:
    family = taught(0.1, 0.2, 0.2)

    (mean,) = family.means.values()
    assert [mean.step_s, mean.weight] == pytest.approx([0.151, 3.0])


def test_no_size_counts_more_than_ten_measurements() -> None:
    (mean,) = taught(*[0.1] * 50).means.values()

    assert mean.weight == 10.0


def test_a_model_is_fitted_again_for_a_new_size_or_a_drift_and_not_for_noise() -> None:
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


def test_of_many_sizes_the_latest_are_remembered() -> None:
    family = FamilyRecord()

    for local_batch in range(1, MAX_SIZES + 2):
        family.add(1, 1, local_batch, 0.1)

    batches = [batch for _, _, batch, *_ in family.means]
    assert batches == list(range(2, MAX_SIZES + 2))


# --- types of GPU, and neighbours


def test_on_one_type_and_alone_there_is_nothing_to_tell_apart() -> None:
    family = taught(0.2, gpu_type="fast")

    assert step_s(family) == pytest.approx(0.2)
    assert family.parts == NO_PARTS


def test_steps_are_told_for_the_fastest_type_wherever_they_were_measured() -> None:
    priors = Priors(gpu_types={"fast": -0.35, "slow": 0.35}, types=("slow", "fast"))
    both, slow_only = FamilyRecord(priors=priors), FamilyRecord(priors=priors)
    for _ in range(10):
        both.add(1, 1, 64, 0.1, gpu_type="fast")
        both.add(1, 1, 64, 0.1 * math.exp(0.7), gpu_type="slow")
        slow_only.add(1, 1, 64, 0.2, gpu_type="slow")

    assert step_s(both) == pytest.approx(0.1, rel=0.05)
    assert step_s(slow_only) == pytest.approx(0.2 / math.exp(0.7), rel=0.05)


def test_steps_beside_neighbours_are_told_as_if_alone() -> None:
    family = taught(*[0.1] * 10)
    for _ in range(10):
        family.add(1, 1, 64, 0.15, colocation=HUNGRY)
        family.add(1, 2, 64, 0.18, colocation=HUNGRY)

    assert [step_s(family), step_s(family, 2)] == [
        pytest.approx(0.1, rel=0.05),
        pytest.approx(0.12, rel=0.05),
    ]
    assert family.parts.colocations == {HUNGRY: pytest.approx(math.log(1.5), rel=0.1)}


# --- noise scales


def test_the_first_noise_scale_is_taken_whole_and_further_ones_by_three_tenths() -> None:
    noise = SmoothedNoise()
    values = []
    for value in (100.0, 800.0, 100.0, 800.0):
        noise.add(value)
        values.append(noise.value)

    # a half, a third and then three tenths of the way, in logarithms
    second = 100 * 8 ** (1 / 2)
    third = second * (100 / second) ** (1 / 3)
    assert values == pytest.approx([100.0, second, third, third * (800 / third) ** 0.3])
    assert noise.count == 4


@pytest.mark.parametrize("hostile", [None, 0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e308])
def test_a_noise_scale_that_nobody_can_have_measured_is_not_heard(hostile: float | None) -> None:
    family = FamilyRecord()

    family.observe_noise(1, hostile)

    assert family.noise_at(1) is None
    assert not is_plausible_noise(hostile)


@given(told=st.lists(st.floats() | st.none(), max_size=20))
def test_whatever_is_told_a_noise_scale_stays_a_number_above_zero(told: list[float | None]) -> None:
    family = FamilyRecord()

    for each in told:
        family.observe_noise(0, each)

    found = family.noise_at(0)
    assert found is None or is_plausible_noise(found)


def test_relatives_tell_of_their_own_stage_of_training_and_of_two_beside() -> None:
    family = FamilyRecord()
    family.observe_noise(4, 100.0)
    family.observe_noise(7, 900.0)

    assert [family.noise_at(epoch) for epoch in range(1, 11)] == [
        None, 100.0, 100.0, 100.0, 100.0, 900.0, 900.0, 900.0, 900.0, None,
    ]  # fmt: skip


def test_at_the_same_distance_the_stage_before_counts() -> None:
    family = FamilyRecord()
    family.observe_noise(3, 100.0)
    family.observe_noise(5, 900.0)

    assert family.noise_at(4) == 100.0


def test_stages_are_epochs_at_first_and_then_eight_to_a_doubling() -> None:
    assert [stage(epoch) for epoch in (0, 1, 15, 16, 17, 18, 32, 64, 1600)] == [
        0, 1, 15, 16, 16, 17, 24, 32, 69,
    ]  # fmt: skip


@given(epoch=st.integers(0, 10**6))
def test_a_later_epoch_is_never_at_an_earlier_stage(epoch: int) -> None:
    assert 0 <= stage(epoch + 1) - stage(epoch) <= 1
