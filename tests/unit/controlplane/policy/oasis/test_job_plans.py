"""Prices of slots, and the cheapest schedule for each completion time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.oasis.job_plans import (
    IDLE,
    INITIAL_BOUNDS,
    PriceBounds,
    SlotPrices,
    cheapest_schedules,
    price,
)
from tests.support.sizes import examples

INF = math.inf


Table = Sequence[Sequence[int]]


def amount(chosen: Sequence[int], done: Table, fresh: Table, *, runs: bool) -> int:
    """Return the units that a schedule does."""
    units = 0
    for interval, option in enumerate(chosen):
        if option != IDLE:
            units += (done if runs else fresh)[min(interval, 1)][option]
        runs = option != IDLE
    return units


def cost_of(chosen: Sequence[int], costs: Sequence[Sequence[float]]) -> float:
    return math.fsum(
        costs[interval][option] for interval, option in enumerate(chosen) if option != IDLE
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], Table, Table, int, bool]:
    intervals, options = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    cost = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.0, INF])
    costs = [[draw(cost) for _ in range(options)] for _ in range(intervals)]
    done = [[draw(st.integers(0, 3)) for _ in range(options)] for _ in range(2)]
    fresh = [[draw(st.integers(0, most)) for most in row] for row in done]
    return costs, done, fresh, draw(st.integers(1, 5)), draw(st.booleans())


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems())
def test_no_schedule_is_cheaper_for_any_completion_time(
    problem: tuple[list[list[float]], Table, Table, int, bool],
) -> None:
    costs, done, fresh, units, running = problem
    options = range(IDLE, len(done[0]))

    found = cheapest_schedules(
        np.array(costs), np.array(done), np.array(fresh), units, running=running
    )

    for last in range(len(costs)):
        least = min(
            (
                cost_of(chosen, costs)
                for chosen in itertools.product(options, repeat=last + 1)
                if chosen[-1] != IDLE and amount(chosen, done, fresh, runs=running) >= units
            ),
            default=INF,
        )
        assert found.cost[last] == pytest.approx(least)
        if least < INF:
            chosen = found.options(last)
            assert (len(chosen), cost_of(chosen, costs)) == (last + 1, pytest.approx(least))
            assert amount(chosen, done, fresh, runs=running) >= units


def test_a_pause_costs_the_work_of_a_start() -> None:
    """The middle interval is expensive: with free starts it is left out."""
    costs = np.array([[1.0], [3.0], [1.0], [1.0]])
    does = np.array([[2], [2]])

    free = cheapest_schedules(costs, does, does, 4, running=False)
    dear = cheapest_schedules(costs, does, np.array([[1], [1]]), 4, running=False)

    assert (free.options(2), free.cost[2]) == ([0, IDLE, 0], 2.0)
    assert (dear.options(2), dear.cost[2]) == ([0, 0, 0], 5.0)


def test_the_search_stops_when_a_schedule_is_good_enough() -> None:
    one = np.array([[1], [1]])

    found = cheapest_schedules(
        np.ones((4, 1)), one, one, 2, running=True, enough=lambda _, cost: cost < INF
    )

    assert found.cost.tolist() == [INF, 2.0, INF, INF]


# --- prices


def test_a_price_rises_by_equal_factors() -> None:
    assert price(np.array([0.0, 0.5, 1.0]), 1.0, 100.0) == pytest.approx([1.0, 10.0, 100.0])


def test_bounds_follow_the_latest_jobs() -> None:
    bounds = PriceBounds(window=3, low=None, high=None)
    assert bounds.now() == INITIAL_BOUNDS

    for density in (5.0, 1.0, 2.0, 400.0, math.nan, -1.0):
        bounds.add(density)

    low, high = bounds.now()
    equal = PriceBounds(window=9, low=None, high=None)
    equal.add(1.0)
    assert equal.now()[1] >= 4.0 * equal.now()[0]  # or the price would not rise
    assert low == 0.25  # the first is forgotten; NaN and negative values are ignored
    assert 200.0 < high <= 400.0


@pytest.mark.parametrize(("low", "high"), [(0.5, None), (None, 30.0), (0.5, 30.0), (900.0, None)])
def test_a_given_bound_is_kept(low: float | None, high: float | None) -> None:
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
def test_a_cost_is_that_of_the_placed_slots(
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
