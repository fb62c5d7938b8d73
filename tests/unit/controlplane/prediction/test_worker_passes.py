"""Steps that are taken in several passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.throughput import PassLimits, SeenPasses, SpeedModel
from elastic.batches import passes as dealt

MODEL = SpeedModel(compute=(0.1, 0.01), near=(0.2, 0.0), known=True)


def step_s(model: SpeedModel, slots: int, local: float) -> float:
    return float(model.step_s(np.array([1]), np.array([slots]), np.array([local]))[0])


def test_a_step_is_its_passes_of_which_only_the_last_one_is_reduced() -> None:
    model = SpeedModel(
        compute=MODEL.compute, near=MODEL.near, known=True, limits=PassLimits(several=10)
    )

    # three passes of 9, 8 and 8 samples, told as 9 each: 0.19 s of computing, and 0.2 s of talk
    assert step_s(model, 2, 25) == pytest.approx(2 * 0.19 + (0.19 + 0.2))
    assert step_s(model, 2, 10) == step_s(MODEL, 2, 10)
    assert step_s(model, 1, 25) == step_s(MODEL, 1, 25), "alone one was always enough"


def test_until_somebody_took_several_passes_one_is_enough() -> None:
    seen = SeenPasses()
    seen.add(2, 16, 1)
    before = seen.limits
    seen.add(2, 24, 2)
    seen.add(1, 64, 1)

    assert before == PassLimits()
    assert seen.limits == PassLimits(alone=math.inf, several=24.0)


@given(bound=st.integers(1, 500), shares=st.lists(st.integers(1, 4000), min_size=1, max_size=8))
def test_shares_take_as_many_passes_as_in_the_training_library_once_a_full_one_was_seen(
    bound: int, shares: list[int]
) -> None:
    seen = SeenPasses()
    for share in [*shares, 2 * bound]:
        parts = dealt(share, bound)
        seen.add(2, parts[0], len(parts))

    found = seen.limits.passes(np.full(len(shares), 2), np.array(shares, dtype=np.float64))

    assert found.tolist() == [len(dealt(share, bound)) for share in shares]
