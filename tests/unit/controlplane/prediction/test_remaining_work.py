"""How much is left, and what a sample is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.lengths import remaining_samples
from controlplane.prediction.throughput import statistical_efficiency


@pytest.mark.parametrize(
    ("done", "stated", "finished", "largest", "left"),
    [
        (300.0, 1000.0, [5000.0], 9000.0, 700.0),
        (1200.0, 1000.0, [], 0.0, 0.0),
        (300.0, None, [400.0, 500.0, 200.0], 500.0, 150.0),
        (0.0, None, [400.0, 500.0], 500.0, 450.0),
        (600.0, None, [400.0, 500.0], 500.0, 600.0),
        (600.0, None, [], 2000.0, 1400.0),
        (600.0, None, [], 700.0, 600.0),
        (500.0, None, [500.0], 500.0, 500.0),
    ],
    ids=[
        "what was stated",
        "more than was stated",
        "the mean of relatives that went on longer",
        "all relatives, before it has begun",
        "as much again, after all relatives had ended",
        "up to the furthest relative, before one has finished",
        "as much again, if that is more",
        "a relative that ended here tells nothing",
    ],
)
def test_what_is_left(
    done: float, stated: float | None, finished: list[float], largest: float, left: float
) -> None:
    assert remaining_samples(done, stated, finished, largest) == left


amount = st.floats(0, 1e12)


@given(
    done=amount, stated=st.none() | amount, finished=st.lists(amount, max_size=5), largest=amount
)
def test_what_is_left_is_never_negative(
    done: float, stated: float | None, finished: list[float], largest: float
) -> None:
    assert remaining_samples(done, stated, finished, largest) >= 0.0


def test_a_sample_is_worth_less_in_a_larger_batch() -> None:
    batches = np.array([32.0, 64.0, 160.0, 672.0])

    worth = statistical_efficiency(batches, 32.0, 96.0)

    assert worth.tolist() == [1.0, 128 / 160, 0.5, 128 / 768]


def test_without_noise_a_larger_batch_gains_nothing_and_with_much_it_loses_nothing() -> None:
    twice = np.array([64.0])

    assert statistical_efficiency(twice, 32.0, 0.0).tolist() == [0.5]
    assert statistical_efficiency(twice, 32.0, 1e12) == pytest.approx([1.0])
