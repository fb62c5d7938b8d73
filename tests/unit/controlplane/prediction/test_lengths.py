"""Lengths of jobs as distributions, their remaining work, and Optimus' loss curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.prediction.lengths import (
    Evidence,
    LengthDistribution,
    LossCurve,
    fit_loss,
    of_relatives,
    one_length,
    pooled_spread,
    remaining_samples,
)


def certain(*totals: float) -> LengthDistribution:
    return of_relatives(totals, [], spread=0.0)


@pytest.mark.parametrize(
    ("totals", "done", "left"),
    [
        ([1000.0] * 3, 0.0, 1000.0),
        ([1000.0] * 3, 400.0, 600.0),
        ([100.0, 400.0, 600.0], 200.0, 300.0),
    ],
    ids=["before the start", "later", "relatives that ended before"],
)
def test_relatives_that_trained_for_longer_leave_their_mean(
    totals: list[float], done: float, left: float
) -> None:
    assert of_relatives(totals, [], spread=0.0).mean_left(done) == pytest.approx(left, rel=1e-3)


def test_a_job_that_outlived_all_relatives_is_nearly_done() -> None:
    family = of_relatives([1000.0] * 5, [], spread=0.1)

    assert 0.0 < family.mean_left(1200.0) < 120.0
    assert 0.0 < family.mean_left(5000.0) < 500.0


@pytest.mark.parametrize(("lost", "weights"), [(200.0, [1 / 3, 2 / 3]), (50.0, [0.5, 0.5])])
def test_a_job_given_up_counts_as_the_relatives_that_trained_for_longer(
    lost: float, weights: list[float]
) -> None:
    """Kaplan and Meier: of three, one ended at 100; of the two others one was lost at 200."""
    family = of_relatives([100.0, 300.0], [lost], spread=0.0)

    assert family.weights.tolist() == pytest.approx(weights)
    expected = weights[0] * 100 + weights[1] * 300
    assert family.mean_left(0.0) == pytest.approx(expected, rel=1e-2)


def test_evidence_of_equal_spread_gives_the_geometric_mean() -> None:
    relatives = one_length(Evidence(math.log(100.0), 0.2))

    both = relatives.given(Evidence(math.log(400.0), 0.2))

    assert both.log_totals.tolist() == pytest.approx([math.log(200.0)])
    assert both.spread == pytest.approx(0.2 / math.sqrt(2))


def test_evidence_chooses_among_relatives() -> None:
    family = of_relatives([100.0, 1000.0], [], spread=0.1).given(Evidence(math.log(950.0), 0.1))

    assert family.mean_left(0.0) == pytest.approx(975.0, rel=0.03)


def test_intervals_cover_their_share_of_lengths() -> None:
    """Lengths are drawn from what is believed; then 80% lie in the interval of 80%."""
    family, rng = of_relatives([300.0, 1000.0, 1100.0], [500.0], spread=0.3), default_rng(1)
    bump = rng.choice(len(family.weights), size=60_000, p=family.weights)
    totals = np.exp(family.log_totals[bump] + family.spread * rng.standard_normal(60_000))
    for done in (0.0, 400.0, 1300.0):
        left = totals[totals > done] - done
        low, high = family.quantiles_left(done, (0.1, 0.9))
        assert np.mean((low <= left) & (left <= high)) == pytest.approx(0.8, abs=0.03)
        assert family.mean_left(done) == pytest.approx(left.mean(), rel=0.05)


def test_families_of_equal_lengths_reduce_the_common_spread() -> None:
    assert pooled_spread([], 0.3, 2.0) == pytest.approx(0.3)
    assert pooled_spread([[5.0]], 0.3, 2.0) == pytest.approx(0.3)
    assert pooled_spread([[5.0] * 20, [7.0] * 20], 0.3, 2.0) == pytest.approx(0.067, abs=0.001)
    assert pooled_spread([[100.0, 200.0] * 500], 0.01, 2.0) == pytest.approx(0.3466, abs=0.001)


samples = st.floats(1.0, 1e12)


@given(
    finished=st.lists(samples, min_size=1, max_size=6),
    outlived=st.lists(samples, max_size=6),
    spread=st.floats(0.0, 3.0),
    said=st.tuples(samples, st.floats(0.01, 5.0)),
    done=st.just(0.0) | samples,
)
@example([1.0], [], 0.1, (1.0, 0.01), 1e12)  # outlives all components
def test_the_remaining_work_is_finite_and_quantiles_ascend(
    finished: list[float],
    outlived: list[float],
    spread: float,
    said: tuple[float, float],
    done: float,
) -> None:
    family, (total, doubt) = of_relatives(finished, outlived, spread), said
    for likely in (family, family.given(Evidence(math.log(total), doubt))):
        low, middle, high = likely.quantiles_left(done, (0.1, 0.5, 0.9))

        assert 0.0 < likely.mean_left(done) < math.inf
        assert 0.0 <= low <= middle <= high < math.inf
        assert likely.weights.sum() == pytest.approx(1.0)


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
