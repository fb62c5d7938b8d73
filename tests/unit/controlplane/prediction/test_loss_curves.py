"""How the loss goes on falling."""

from __future__ import annotations

import pytest

from controlplane.prediction.lengths import LossCurve, fit_loss


def test_a_curve_worked_out_by_hand() -> None:
    """After 2 epochs 1 / (0.5 x 2 + 1) + 0.25; the next takes 0.5 - 0.4 of 0.75 away."""
    curve = LossCurve(0.5, 1.0, 0.25)

    assert curve.at(2) == 0.75
    assert curve.fall(2) == pytest.approx(0.1 / 0.75)


@pytest.mark.parametrize("true", [LossCurve(0.3, 0.5, 0.2), LossCurve(0.05, 0.4, 0.0)])
def test_a_fit_tells_how_the_curve_goes_on(true: LossCurve) -> None:
    epochs = range(1, 13)

    found = fit_loss(list(epochs), [true.at(k) for k in epochs])

    assert found is not None
    for k in (1, 12, 20, 40):
        assert found.at(k) == pytest.approx(true.at(k), rel=0.05)


def test_convergence_is_the_first_epoch_after_which_too_little_is_gained() -> None:
    """Loss 1 / k falls by 1 / (k + 1) of itself: 1 / 10 after 9, 1 / 11 after 10."""
    assert LossCurve(1.0, 0.0, 0.0).converged_at(0.095) == 10


def test_a_curve_that_never_flattens_ends_somewhere() -> None:
    assert LossCurve(1.0, 0.0, 0.0).converged_at(1e-6) == 10_000


def test_a_curve_that_is_flat_has_converged() -> None:
    assert LossCurve(0.0, 2.0, 0.0).converged_at(0.01) == 0


@pytest.mark.parametrize(
    ("epochs", "losses"),
    [
        ([], []),
        ([1, 2], [1.0, 0.5]),
        ([1, 2, 3], [1.0, 1.0, 1.0]),
        ([1, 2, 3], [float("nan"), 1.0, 0.5]),
        ([1, 2, 3], [-1.0, -2.0, 1.0]),
    ],
)
def test_too_few_points_tell_nothing(epochs: list[int], losses: list[float]) -> None:
    assert fit_loss(epochs, losses) is None
