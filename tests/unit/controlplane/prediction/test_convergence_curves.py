"""Convergence curves of many jobs at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.prediction import FloatArray
from controlplane.prediction.convergence_curves import MAX_REPORTS, Form, fit_curves, job_curve
from tests.support.sizes import examples

NAN, INF = float("nan"), float("inf")
ANYTHING = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, 1.0, NAN, 1e25])


@pytest.mark.parametrize(
    ("true", "form"),
    [
        (lambda k: 1 / (0.02 * k**2 + 0.1 * k + 0.5) + 0.3, Form.SUBLINEAR),
        (lambda k: 1 / (0.3 * k + 0.5) + 0.2, Form.SUBLINEAR),
        (lambda k: 2.0 * 0.9**k + 0.4, Form.EXPONENTIAL),
        (lambda k: 500.0 * 0.5**k - 80.0, Form.EXPONENTIAL),
    ],
    ids=["1/k^2", "1/k", "linear", "fast, and below 0"],
)
def test_a_fit_predicts_the_curves_of_the_paper(
    true: Callable[[FloatArray], FloatArray], form: Form
) -> None:
    reports = np.arange(1.0, 21.0)

    found = job_curve(reports, true(reports))

    assert found.forms.tolist() == [form]
    assert found.at(np.array([[20.0, 30.0, 40.0]]))[0] == pytest.approx(
        true(np.array([20.0, 30.0, 40.0])), rel=0.03
    )


def test_a_curve_on_the_grid_is_exact() -> None:
    """1 / (k - 2) for k = 3, 4, 5 is on the grid: d = 0."""
    found = job_curve([3, 4, 5], [1.0, 1 / 2, 1 / 3])

    assert found.limit.tolist() == [0.0]
    assert found.at(np.array([[6.0, 12.0]])) == pytest.approx(np.array([[1 / 4, 1 / 10]]))


def test_newer_reports_count_more() -> None:
    """The loss fell fast, then a step of the learning rate made it fall slowly from 10 on."""
    losses = [100.0 - 9 * k for k in range(10)] + [10.0 - 0.1 * k for k in range(10)]

    now = job_curve(range(20), losses, decay=0.7)
    as_ever = job_curve(range(20), losses, decay=1.0)

    off_now, off = (abs(float(curve.at(np.array([20.0]))[0]) - 9.0) for curve in (now, as_ever))
    assert off_now < 1.0
    assert off > 2.0


def test_only_the_latest_reports_count() -> None:
    tail = [1.0 / k for k in range(1, MAX_REPORTS + 1)]

    found = job_curve(range(MAX_REPORTS + 5), [7.0, 3.0, 9.0, 1e9, 0.1, *tail])

    assert found.first.tolist() == [5.0]
    assert found.limit.tolist() == [pytest.approx(0.0, abs=1e-3)]


@pytest.mark.parametrize(
    ("losses", "form"),
    [
        ([], Form.NONE), ([2.0, 1.0], Form.NONE), ([2.0, NAN, 1.0], Form.NONE),
        ([NAN, INF, -INF, 1e200, None], Form.NONE), ([1.0, 1.0, 1.0], Form.FLAT),
        ([0.0, 0.0, 0.0], Form.FLAT), ([1.0, 2.0, 3.0], Form.FLAT),
        ([1.0, 10.0, 1e5, 1e20], Form.FLAT), ([1e200, 3.0, 2.0, None, 1.5, NAN], Form.SUBLINEAR),
    ],
)  # fmt: skip
def test_the_form_shows_whether_losses_fall(losses: list[float | None], form: Form) -> None:
    assert job_curve(range(len(losses)), losses).forms.tolist() == [form]


def test_a_flat_curve_is_the_mean_of_the_reports() -> None:
    found = job_curve([0, 1, 2], [1.0, 2.0, 3.0], decay=1.0)

    assert (found.at(np.array([5.0])).tolist(), found.limit.tolist()) == ([2.0], [2.0])
    assert job_curve([4, 4, 4], [3.0, 2.0, 1.0]).forms.tolist() == [Form.NONE], "one position"


def test_a_single_spike_is_ignored() -> None:
    calm = [1.0 / k for k in range(1, 21)]
    spiked = [*calm[:9], 1e6, *calm[10:]]

    once, twice = job_curve(range(1, 21), calm), job_curve(range(1, 21), spiked)

    assert twice.at(np.array([30.0])) == pytest.approx(once.at(np.array([30.0])), rel=0.02)


def rows(draw: st.DrawFn) -> FloatArray:
    losses = st.lists(ANYTHING, min_size=6, max_size=6)
    return np.array(draw(st.lists(losses, min_size=1, max_size=5)))


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_a_curve_never_rises_nor_falls_below_its_limit(data: st.DataObject) -> None:
    losses = data.draw(st.composite(rows)())
    positions = np.cumsum(data.draw(st.lists(st.integers(1, 1000), min_size=6, max_size=6)))
    grid = np.broadcast_to(positions.astype(float), losses.shape)

    found = fit_curves(grid, losses)
    later = found.at(positions[0] + np.geomspace(1.0, 1e6, 20) * np.ones((len(losses), 1)))

    curved = found.forms != Form.NONE
    height = (found.range + np.abs(found.lowest))[:, None]
    assert np.isfinite(later[curved]).all()
    assert np.isnan(later[~curved]).all()
    assert (np.diff(later)[curved] <= 1e-9 * height[curved]).all()
    assert (later[curved] >= (found.limit[:, None] - 1e-9 * height)[curved]).all()


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_jobs_fitted_together_have_the_curves_of_each_alone(data: st.DataObject) -> None:
    losses = data.draw(st.composite(rows)())
    positions = np.broadcast_to(np.arange(6.0), losses.shape)

    together = fit_curves(positions, losses)

    for row in range(len(losses)):
        alone = fit_curves(positions[row : row + 1], losses[row : row + 1])
        assert alone.forms[0] == together.forms[row]
        assert alone.at(np.array([9.0])) == pytest.approx(
            together.at(np.full(len(losses), 9.0))[row : row + 1], nan_ok=True, rel=1e-6
        )


@settings(max_examples=examples(40), deadline=None)
@given(
    # Four coefficients: fewer reports lie on many curves, of which rounding chooses one.
    losses=st.lists(st.floats(-100, 100), min_size=5, max_size=12),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    stretch=st.sampled_from([1e-3, 1e5]),
)
def test_units_of_losses_and_positions_do_not_matter(
    losses: list[float], scale: float, stretch: float
) -> None:
    losses = [-200.0 - round(loss, 3) for loss in losses]
    place = np.arange(float(len(losses)))

    plain = job_curve(place, losses)
    other = job_curve(stretch * place, [scale * loss for loss in losses])

    assert other.forms.tolist() == plain.forms.tolist()
    assert other.at(np.array([stretch * 20.0])) == pytest.approx(
        scale * plain.at(np.array([20.0])), rel=1e-5
    )
