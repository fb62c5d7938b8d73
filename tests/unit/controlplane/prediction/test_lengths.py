"""Remaining work of jobs, and Optimus' loss curve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.lengths import LossCurve, fit_loss, remaining_samples


@pytest.mark.parametrize("true", [LossCurve(0.3, 0.5, 0.2), LossCurve(0.05, 0.4, 0.0)])
def test_a_fit_predicts_the_loss_curve(true: LossCurve) -> None:
    epochs = range(1, 13)

    found = fit_loss(list(epochs), [true.at(k) for k in epochs])

    assert found is not None
    for k in (1, 12, 20, 40):
        assert found.at(k) == pytest.approx(true.at(k), rel=0.05)


@pytest.mark.parametrize(
    ("curve", "convergence", "epoch"),
    [
        # The loss 1 / k falls by 1 / (k + 1) of itself: 1 / 10 after 9, 1 / 11 after 10.
        (LossCurve(1.0, 0.0, 0.0), 0.095, 10),
        (LossCurve(1.0, 0.0, 0.0), 1e-6, 10_000),
        (LossCurve(0.0, 2.0, 0.0), 0.01, 0),
    ],
    ids=["1 / k", "never flat", "flat"],
)
def test_a_curve_has_converged_before_the_first_epoch_that_gains_too_little(
    curve: LossCurve, convergence: float, epoch: int
) -> None:
    assert curve.converged_at(convergence) == epoch


@pytest.mark.parametrize(
    ("epochs", "losses"),
    [
        ([], []), ([1, 2], [1.0, 0.5]), ([1, 2, 3], [1.0, 1.0, 1.0]),
        ([1, 2, 3], [float("nan"), 1.0, 0.5]), ([1, 2, 3], [-1.0, -2.0, 1.0]),
    ],
)  # fmt: skip
def test_too_few_or_flat_losses_have_no_curve(epochs: list[int], losses: list[float]) -> None:
    assert fit_loss(epochs, losses) is None


@pytest.mark.parametrize(
    ("done", "stated", "finished", "largest", "left"),
    [
        pytest.param(300.0, 1000.0, [5000.0], 9000.0, 700.0, id="what was stated"),
        pytest.param(1200.0, 1000.0, [], 0.0, 0.0, id="more than was stated"),
        pytest.param(300.0, None, [400.0, 500.0, 200.0], 500.0, 150.0, id="the mean of relatives that went on longer"),
        pytest.param(0.0, None, [400.0, 500.0], 500.0, 450.0, id="all relatives, before it has begun"),
        pytest.param(600.0, None, [400.0, 500.0], 500.0, 600.0, id="as much again, after all relatives had ended"),
        pytest.param(600.0, None, [], 2000.0, 1400.0, id="up to the furthest relative, before one has finished"),
        pytest.param(600.0, None, [], 700.0, 600.0, id="as much again, if that is more"),
        pytest.param(500.0, None, [500.0], 500.0, 500.0, id="a relative that ended here tells nothing"),
    ],
)  # fmt: skip
def test_the_remaining_samples_follow_statement_relatives_or_progress(
    done: float, stated: float | None, finished: list[float], largest: float, left: float
) -> None:
    assert remaining_samples(done, stated, finished, largest) == left


amount = st.floats(0, 1e12)


@given(
    done=amount, stated=st.none() | amount, finished=st.lists(amount, max_size=5), largest=amount
)
def test_the_remaining_samples_are_never_negative(
    done: float, stated: float | None, finished: list[float], largest: float
) -> None:
    assert remaining_samples(done, stated, finished, largest) >= 0.0
