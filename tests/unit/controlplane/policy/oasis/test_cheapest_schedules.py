"""The cheapest schedule for each completion time, against all schedules that there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.oasis.job_plans import IDLE, cheapest_schedules
from tests.support.sizes import examples

INF = math.inf


def amount(
    chosen: Sequence[int],
    done: Sequence[Sequence[int]],
    fresh: Sequence[Sequence[int]],
    *,
    runs: bool,
) -> int:
    """Units that a schedule does."""
    units = 0
    for interval, option in enumerate(chosen):
        if option != IDLE:
            units += (done if runs else fresh)[min(interval, 1)][option]
        runs = option != IDLE
    return units


def price(chosen: Sequence[int], costs: Sequence[Sequence[float]]) -> float:
    return math.fsum(
        costs[interval][option] for interval, option in enumerate(chosen) if option != IDLE
    )


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[list[list[float]], list[list[int]], list[list[int]], int, bool]:
    intervals, options = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    cost = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.0, INF])
    costs = [[draw(cost) for _ in range(options)] for _ in range(intervals)]
    done = [[draw(st.integers(0, 3)) for _ in range(options)] for _ in range(2)]
    fresh = [[draw(st.integers(0, most)) for most in row] for row in done]
    return costs, done, fresh, draw(st.integers(1, 5)), draw(st.booleans())


@settings(max_examples=examples(150), deadline=None)
@given(problem=problems())
def test_no_schedule_is_cheaper_for_any_completion_time(
    problem: tuple[list[list[float]], list[list[int]], list[list[int]], int, bool],
) -> None:
    costs, done, fresh, units, running = problem
    options = range(IDLE, len(done[0]))

    found = cheapest_schedules(
        np.array(costs), np.array(done), np.array(fresh), units, running=running
    )

    for last in range(len(costs)):
        least = min(
            (
                price(chosen, costs)
                for chosen in itertools.product(options, repeat=last + 1)
                if chosen[-1] != IDLE and amount(chosen, done, fresh, runs=running) >= units
            ),
            default=INF,
        )
        assert found.cost[last] == pytest.approx(least)
        if least < INF:
            chosen = found.options(last)
            assert (len(chosen), price(chosen, costs)) == (last + 1, pytest.approx(least))
            assert amount(chosen, done, fresh, runs=running) >= units


def test_to_stop_and_go_on_costs_the_work_of_a_start() -> None:
    """The middle interval is dear: with free starts it would be left out."""
    costs = np.array([[1.0], [3.0], [1.0], [1.0]])
    does = np.array([[2], [2]])

    free = cheapest_schedules(costs, does, does, 4, running=False)
    dear = cheapest_schedules(costs, does, np.array([[1], [1]]), 4, running=False)

    assert (free.options(2), free.cost[2]) == ([0, IDLE, 0], 2.0)
    assert (dear.options(2), dear.cost[2]) == ([0, 0, 0], 5.0)


def test_what_lies_behind_enough_is_left_out() -> None:
    one = np.array([[1], [1]])

    found = cheapest_schedules(
        np.ones((4, 1)), one, one, 2, running=True, enough=lambda _, cost: cost < INF
    )

    assert found.cost.tolist() == [INF, 2.0, INF, INF]
