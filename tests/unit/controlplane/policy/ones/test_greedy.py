"""Sizes for all jobs at once, without chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import JobView
from controlplane.policy.ones.greedy import baselines, exchanged, filled, repaired, used
from controlplane.policy.ones.problem import Problem
from controlplane.prediction import IntArray
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import any_levels, pace, problem_of, problems, row_of, some_levels, view_of

SIZE = settings(max_examples=examples(40), deadline=None)
seeds = st.integers(0, 1000)
LINEAR = pace("f", 100.0, 200.0, 300.0, 400.0)


def a_job(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """A warm job of 1 to 4 slots with a batch of 64."""
    held = dict.fromkeys(on, 64 // len(on)) if on else {}
    view = job_view(job, slots=(1, 4), family="f", epoch=1, start_s=0.0, running_on=held)
    return msgspec.structs.replace(view, **changes)


def with_worth(problem: Problem, *rows: list[float]) -> Problem:
    """`problem` with other worth at each level."""
    return replace(problem, value=np.array(rows, dtype=np.float64))


def worth_of(problem: Problem, levels: IntArray) -> float:
    return float(problem.value[problem.rows, levels].sum())


def allowed(problem: Problem, levels: IntArray) -> bool:
    return bool(problem.allowed[problem.rows, levels].all())


# --- filling


def test_slots_are_given_where_they_are_worth_most() -> None:
    short, long = a_job(A, stop_samples=100), a_job(B, stop_samples=10_000)

    problem = problem_of(view_of(row_of(4), long, short), events=LINEAR)

    assert filled(problem, problem.lowest).tolist() == [0, 4]
    assert filled(problem, np.array([1, 0])).tolist() == [1, 3]


def test_nothing_is_filled_where_no_slot_is_worth_anything() -> None:
    slower = pace("f", 100.0, 50.0, 33.0, 25.0)
    problem = problem_of(view_of(row_of(4), a_job(A, S0)), events=slower)

    assert filled(problem, problem.present).tolist() == [1]


def test_a_size_that_is_worth_more_only_far_up_is_reached_over_one_that_is_worth_less() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)
    hilly = with_worth(problem, [0.0, 4.0, 4.0, 4.0, 4.0], [0.0, 0.1, 0.2, 6.0, 6.1])

    assert filled(hilly, hilly.lowest).tolist() == [1, 3]


def test_noise_draws_who_is_served_first() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)

    assert filled(problem, problem.lowest, np.array([9.0, 1.0])).tolist() == [4, 0]
    assert filled(problem, problem.lowest, np.array([1.0, 9.0])).tolist() == [0, 4]


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_filled_fits_is_allowed_and_shrinks_nobody(problem: Problem, seed: int) -> None:
    before = some_levels(problem, seed)

    after = filled(problem, before)

    assert allowed(problem, after)
    assert used(problem, after) <= problem.capacity
    assert (after >= before).all()
    assert (problem.value[problem.rows, after] >= problem.value[problem.rows, before]).all()


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_filled_leaves_no_slot_to_which_somebody_would_still_grow(
    problem: Problem, seed: int
) -> None:
    after = filled(problem, some_levels(problem, seed))

    left = problem.capacity - used(problem, after)
    more = problem.sizes - problem.sizes[problem.rows, after][:, None]
    gain = problem.value - problem.value[problem.rows, after][:, None]
    assert not ((more > 0) & (more <= left) & (gain > 1e-9)).any()


@SIZE
@given(problem=problems(), seed=seeds)
def test_noise_changes_who_grows_but_nothing_that_must_hold(problem: Problem, seed: int) -> None:
    before = some_levels(problem, seed)
    noise = np.exp(default_rng(seed).normal(0.0, 1.0, len(before)))

    after = filled(problem, before, noise)

    assert allowed(problem, after)
    assert used(problem, after) <= problem.capacity
    assert (after >= before).all()


# --- repair


def test_a_schedule_that_does_not_fit_is_cut_at_the_end_of_the_order() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)

    assert repaired(problem, np.array([3, 3]), np.array([0, 1])).tolist() == [3, 0]
    assert repaired(problem, np.array([3, 3]), np.array([1, 0])).tolist() == [0, 3]
    assert repaired(problem, np.array([3, 1]), np.array([0, 1])).tolist() == [3, 1]


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_repaired_is_allowed_and_fits(problem: Problem, seed: int) -> None:
    order = default_rng(seed).permutation(len(problem.job_rows))

    levels = repaired(problem, any_levels(problem, seed), order)

    assert allowed(problem, levels)
    assert used(problem, levels) <= problem.capacity


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_fits_and_is_allowed_needs_no_repair(problem: Problem, seed: int) -> None:
    levels = some_levels(problem, seed)
    order = default_rng(seed + 1).permutation(len(levels))

    assert repaired(problem, levels, order).tolist() == levels.tolist()
    assert repaired(problem, problem.present, order).tolist() == problem.present.tolist()


# --- exchange


def test_slots_change_hands_where_that_is_worth_it() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)
    table = with_worth(problem, [0.0, 5.0, 5.1, 5.2, 5.3], [0.0, 1.0, 3.0, 6.0, 6.1])

    assert exchanged(table, np.array([3, 1])).tolist() == [1, 3]


def test_one_job_takes_several_slots_where_a_single_one_is_worth_nothing() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)
    table = with_worth(problem, [0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 0.0, 0.0, 0.0, 9.0])

    assert exchanged(table, np.array([4, 0])).tolist() == [0, 4]


def test_greedy_that_began_with_the_steepest_is_mended_by_an_exchange() -> None:
    """One slot to the first leaves too few to the second, which needs all four."""
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)
    table = with_worth(problem, [0.0, 3.0, 3.5, 4.0, 4.2], [0.0, 0.0, 0.0, 0.0, 8.0])

    greedy = filled(table, table.lowest)

    assert greedy.tolist() == [4, 0]
    assert exchanged(table, greedy).tolist() == [0, 4]


def test_what_nobody_has_after_an_exchange_is_filled() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)

    assert exchanged(problem, np.array([1, 1])).sum() == 4


def test_one_job_alone_has_nobody_to_exchange_with() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A)), events=LINEAR)

    assert exchanged(problem, np.array([2])).tolist() == [2]


@SIZE
@given(problem=problems(), seed=seeds)
def test_an_exchange_is_never_worse_and_takes_no_slots_that_are_not_there(
    problem: Problem, seed: int
) -> None:
    before = some_levels(problem, seed)
    full = replace(problem, capacity=used(problem, before))

    for table in (problem, full):
        after = exchanged(table, before)

        assert allowed(table, after)
        assert used(table, after) <= table.capacity
        assert worth_of(table, after) >= worth_of(table, before) - 1e-9


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_given_to_an_exchange_stays_as_it_is(problem: Problem, seed: int) -> None:
    before = some_levels(problem, seed)
    copy = before.tolist()

    exchanged(problem, before)
    filled(problem, before)

    assert before.tolist() == copy


# --- what others would answer


def test_the_others_serve_users_sizes_by_arrival_by_length_and_by_service_so_far() -> None:
    first = a_job(A, submitted_at=1.0, wanted=3, stop_samples=90_000, slot_s=500.0)
    short = a_job(B, submitted_at=2.0, wanted=3, stop_samples=1_000, slot_s=400.0)
    fresh = a_job(C, submitted_at=3.0, wanted=3, stop_samples=9_000, slot_s=0.0)
    problem = problem_of(view_of(row_of(3), first, short, fresh), events=LINEAR)

    assert [levels.tolist() for levels in baselines(problem)] == [[3, 0, 0], [0, 3, 0], [0, 0, 3]]


def test_what_is_left_by_the_sizes_that_users_want_is_filled() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A, S0, S1, wanted=2)), events=LINEAR)

    assert [levels.tolist() for levels in baselines(problem)] == [[4], [4], [4]]


@SIZE
@given(problem=problems())
def test_what_others_would_answer_fits_and_is_allowed(problem: Problem) -> None:
    for levels in baselines(problem):
        assert allowed(problem, levels)
        assert used(problem, levels) <= problem.capacity
