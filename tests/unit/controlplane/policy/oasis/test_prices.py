"""What slots cost by how much is promised already, and what that is estimated from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.oasis.prices import INITIAL_BOUNDS, PriceBounds, SlotPrices, price
from tests.support.sizes import examples


def test_a_price_rises_from_the_least_to_the_greatest_by_equal_factors() -> None:
    assert price(np.array([0.0, 0.5, 1.0]), 1.0, 100.0) == pytest.approx([1.0, 10.0, 100.0])


def test_bounds_begin_somewhere_and_follow_the_jobs_seen() -> None:
    bounds = PriceBounds(window=3, low=None, high=None)
    assert bounds.now() == INITIAL_BOUNDS

    for density in (5.0, 1.0, 2.0, 400.0, math.nan, -1.0):
        bounds.add(density)

    low, high = bounds.now()
    assert low == 0.25  # the first one is forgotten, and what is no density does not count
    assert 200.0 < high <= 400.0


def test_bounds_of_jobs_that_are_all_alike_still_make_a_price_that_rises() -> None:
    bounds = PriceBounds(window=9, low=None, high=None)
    bounds.add(1.0)

    low, high = bounds.now()

    assert high >= 4.0 * low


@pytest.mark.parametrize(("low", "high"), [(0.5, None), (None, 30.0), (0.5, 30.0), (900.0, None)])
def test_a_bound_that_was_chosen_stays(low: float | None, high: float | None) -> None:
    bounds = PriceBounds(window=9, low=low, high=high)
    for density in (1.0, 100.0):
        bounds.add(density)

    found = bounds.now()

    assert low is None or found[0] == low
    assert high is None or found[1] == high
    assert 0.0 < found[0] <= found[1]


@settings(max_examples=examples(80), deadline=None)
@given(
    data=st.data(),
    capacity=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    slots=st.integers(1, 6),
)
def test_the_cheapest_slots_are_as_dear_as_those_that_are_placed(
    data: st.DataObject, capacity: list[int], slots: int
) -> None:
    if not any(capacity):
        return
    used = [[data.draw(st.integers(0, each)) for each in capacity]]
    prices = SlotPrices(np.array(used), np.array(capacity), 1.0, 50.0)

    for together, cost in ((True, prices.on_one_node(slots)), (False, prices.on_any(slots))):
        free = [each - taken for each, taken in zip(capacity, used[0], strict=True)]
        if (max(free) if together else sum(free)) < slots:
            assert cost[0] == math.inf
            continue
        placed = prices.place(0, slots, together=together)
        assert sum(many for _, many in placed) == slots
        assert all(many <= free[node] for node, many in placed)
        paid = sum(
            float(price(np.array((used[0][node] + at + 0.5) / capacity[node]), 1.0, 50.0))
            for node, many in placed
            for at in range(many)
        )
        assert cost[0] == pytest.approx(paid)
