"""How much a job has left, as a distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.prediction.lengths import (
    Evidence,
    LengthDistribution,
    of_relatives,
    one_length,
    pooled_spread,
)


def certain(*totals: float) -> LengthDistribution:
    return of_relatives(totals, [], spread=0.0)


def test_relatives_that_all_took_as_long_leave_the_rest_of_that() -> None:
    family = certain(1000.0, 1000.0, 1000.0)

    assert family.mean_left(0.0) == pytest.approx(1000.0, rel=1e-3)
    assert family.mean_left(400.0) == pytest.approx(600.0, rel=1e-3)


def test_relatives_that_ended_before_do_not_count() -> None:
    family = certain(100.0, 400.0, 600.0)

    assert family.mean_left(200.0) == pytest.approx(300.0, rel=1e-3)


def test_who_has_outlived_all_relatives_is_nearly_done_and_not_half_way() -> None:
    family = of_relatives([1000.0] * 5, [], spread=0.1)

    assert 0.0 < family.mean_left(1200.0) < 120.0
    assert 0.0 < family.mean_left(5000.0) < 500.0


def test_a_job_that_was_given_up_late_speaks_for_long_lives() -> None:
    """Kaplan and Meier: of three, one ended at 100; of the two others one was lost at 200."""
    family = of_relatives([100.0, 300.0], [200.0], spread=0.0)

    assert family.weights.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert family.mean_left(0.0) == pytest.approx(100 / 3 + 200, rel=1e-2)


def test_a_job_that_was_given_up_early_tells_nothing() -> None:
    family = of_relatives([100.0, 300.0], [50.0], spread=0.0)

    assert family.weights.tolist() == pytest.approx([0.5, 0.5])


def test_evidence_as_sure_as_the_relatives_meets_them_half_way() -> None:
    relatives = one_length(Evidence(math.log(100.0), 0.2))

    both = relatives.given(Evidence(math.log(400.0), 0.2))

    assert both.log_totals.tolist() == pytest.approx([math.log(200.0)])
    assert both.spread == pytest.approx(0.2 / math.sqrt(2))


def test_evidence_chooses_among_relatives() -> None:
    family = of_relatives([100.0, 1000.0], [], spread=0.1).given(Evidence(math.log(950.0), 0.1))

    assert family.mean_left(0.0) == pytest.approx(975.0, rel=0.03)


def test_intervals_hold_as_often_as_they_say() -> None:
    """Lengths are drawn from what is believed; then 80% lie in the interval of 80%."""
    family, rng = of_relatives([300.0, 1000.0, 1100.0], [500.0], spread=0.3), default_rng(1)
    bump = rng.choice(len(family.weights), size=60_000, p=family.weights)
    totals = np.exp(family.log_totals[bump] + family.spread * rng.standard_normal(60_000))
    for done in (0.0, 400.0, 1300.0):
        left = totals[totals > done] - done
        low, high = family.quantiles_left(done, (0.1, 0.9))
        assert np.mean((low <= left) & (left <= high)) == pytest.approx(0.8, abs=0.03)
        assert family.mean_left(done) == pytest.approx(left.mean(), rel=0.05)


def test_one_family_of_equal_lengths_makes_all_of_them_surer() -> None:
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
def test_whatever_is_known_something_finite_is_left_and_bounds_are_in_order(
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
