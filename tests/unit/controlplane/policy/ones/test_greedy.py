"""Deterministic choice of sizes: filling, repair, exchange, baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.ones.greedy import baselines, exchanged, filled, repaired, used
from controlplane.policy.ones.problem import Problem
from controlplane.prediction import IntArray
from tests.support.builders import S0, S1, A, B, C
from tests.support.sizes import examples
from tests.support.views import (
    LINEAR,
    any_levels,
    pace,
    problem_of,
    problems,
    row_of,
    some_levels,
    view_of,
    warm_job,
)

SIZE = settings(max_examples=examples(40), deadline=None)
seeds = st.integers(0, 1000)
TWO_JOBS = problem_of(view_of(row_of(4), warm_job(A), warm_job(B)), events=LINEAR)


def with_worth(*rows: list[float]) -> Problem:
    """Two waiting jobs on four slots, with these values of their levels."""
    return replace(TWO_JOBS, value=np.array(rows, dtype=np.float64))


def fits(problem: Problem, levels: IntArray) -> bool:
    allowed = problem.allowed[problem.rows, levels].all()
    return bool(allowed) and used(problem, levels) <= problem.capacity


# --- filling


def test_slots_go_to_the_job_with_the_largest_value_per_slot() -> None:
    short, long = warm_job(A, stop_samples=100), warm_job(B, stop_samples=10_000)
    problem = problem_of(view_of(row_of(4), long, short), events=LINEAR)

    assert filled(problem, problem.lowest).tolist() == [0, 4]
    assert filled(problem, np.array([1, 0])).tolist() == [1, 3]


def test_slots_without_value_stay_idle() -> None:
    slower = pace("f", 100.0, 50.0, 33.0, 25.0)
    problem = problem_of(view_of(row_of(4), warm_job(A, S0)), events=slower)

    assert filled(problem, problem.present).tolist() == [1]


def test_filling_skips_sizes_of_little_value_below_a_valuable_size() -> None:
    hilly = with_worth([0.0, 4.0, 4.0, 4.0, 4.0], [0.0, 0.1, 0.2, 6.0, 6.1])

    assert filled(hilly, hilly.lowest).tolist() == [1, 3]


def test_noise_decides_the_order_of_filling() -> None:
    for noise, levels in (([9.0, 1.0], [4, 0]), ([1.0, 9.0], [0, 4])):
        assert filled(TWO_JOBS, TWO_JOBS.lowest, np.array(noise)).tolist() == levels


@SIZE
@given(problem=problems(), seed=seeds)
def test_filled_levels_fit_shrink_no_job_and_leave_no_slot_with_a_gain(
    problem: Problem, seed: int
) -> None:
    before = some_levels(problem, seed)
    noise = np.exp(default_rng(seed).normal(0.0, 1.0, len(before)))

    for after in (filled(problem, before, noise), filled(problem, before)):
        assert fits(problem, after)
        assert (after >= before).all()

    value = problem.value[problem.rows, after]
    assert (value >= problem.value[problem.rows, before]).all()
    left = problem.capacity - used(problem, after)
    more = problem.sizes - problem.sizes[problem.rows, after][:, None]
    assert not ((more > 0) & (more <= left) & (problem.value - value[:, None] > 1e-9)).any()


# --- repair


def test_repair_reduces_the_last_jobs_of_the_order() -> None:
    for levels, order, expected in (
        ([3, 3], [0, 1], [3, 0]), ([3, 3], [1, 0], [0, 3]), ([3, 1], [0, 1], [3, 1]),
    ):  # fmt: skip
        assert repaired(TWO_JOBS, np.array(levels), np.array(order)).tolist() == expected


@SIZE
@given(problem=problems(), seed=seeds)
def test_repair_returns_levels_that_fit_and_leaves_such_levels_unchanged(
    problem: Problem, seed: int
) -> None:
    order = default_rng(seed).permutation(len(problem.job_rows))
    levels = some_levels(problem, seed)

    assert fits(problem, repaired(problem, any_levels(problem, seed), order))
    assert repaired(problem, levels, order).tolist() == levels.tolist()
    assert repaired(problem, problem.present, order).tolist() == problem.present.tolist()


# --- exchange


@pytest.mark.parametrize(
    ("worth", "before", "after"),
    [
        ([[0.0, 5.0, 5.1, 5.2, 5.3], [0.0, 1.0, 3.0, 6.0, 6.1]], [3, 1], [1, 3]),
        ([[0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 0.0, 0.0, 0.0, 9.0]], [4, 0], [0, 4]),
        # Greedy filling gives one slot to the first job; the second job needs all four.
        ([[0.0, 3.0, 3.5, 4.0, 4.2], [0.0, 0.0, 0.0, 0.0, 8.0]], [4, 0], [0, 4]),
    ],
    ids=["one slot", "several slots at once", "greedy filling is improved"],
)
def test_an_exchange_moves_slots_to_the_job_with_more_value(
    worth: list[list[float]], before: list[int], after: list[int]
) -> None:
    assert exchanged(with_worth(*worth), np.array(before)).tolist() == after


def test_an_exchange_fills_idle_slots_and_leaves_a_single_job_alone() -> None:
    one = problem_of(view_of(row_of(4), warm_job(A)), events=LINEAR)

    assert exchanged(TWO_JOBS, np.array([1, 1])).sum() == 4
    assert exchanged(one, np.array([2])).tolist() == [2]


@SIZE
@given(problem=problems(), seed=seeds)
def test_an_exchange_fits_is_never_worse_and_keeps_its_input(problem: Problem, seed: int) -> None:
    before = some_levels(problem, seed)
    copy = before.tolist()
    full = replace(problem, capacity=used(problem, before))

    for table in (problem, full):
        after = exchanged(table, before)

        assert fits(table, after)
        worth = [float(table.value[table.rows, levels].sum()) for levels in (before, after)]
        assert worth[1] >= worth[0] - 1e-9
    filled(problem, before)
    assert before.tolist() == copy


# --- baselines


def test_baselines_serve_wanted_sizes_by_arrival_by_length_and_by_service() -> None:
    first = warm_job(A, submitted_at=1.0, wanted=3, stop_samples=90_000, slot_s=500.0)
    short = warm_job(B, submitted_at=2.0, wanted=3, stop_samples=1_000, slot_s=400.0)
    fresh = warm_job(C, submitted_at=3.0, wanted=3, stop_samples=9_000, slot_s=0.0)
    problem = problem_of(view_of(row_of(3), first, short, fresh), events=LINEAR)

    assert [levels.tolist() for levels in baselines(problem)] == [[3, 0, 0], [0, 3, 0], [0, 0, 3]]


def test_baselines_fill_the_slots_that_wanted_sizes_leave() -> None:
    problem = problem_of(view_of(row_of(4), warm_job(A, S0, S1, wanted=2)), events=LINEAR)

    assert [levels.tolist() for levels in baselines(problem)] == [[4], [4], [4]]


@SIZE
@given(problem=problems())
def test_baselines_fit(problem: Problem) -> None:
    assert all(fits(problem, levels) for levels in baselines(problem))
