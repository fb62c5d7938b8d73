"""Levels that fit, slots that follow, and what that is worth."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.ones.fitness import IntArray
from controlplane.policy.ones.genome import filled, lowest, repaired, score, used
from controlplane.policy.ones.operators import crossed, mutated, refreshed, repacked, resized
from controlplane.policy.ones.problem import Problem
from schemas.ids import JobId, SlotId
from tests.support.builders import S0, S1, T0, A, B, job_view
from tests.support.views import any_levels, problem_of, problems, row_of, view_of

SIZE = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 1000)


def a_job(job: JobId, on: tuple[SlotId, ...] = (), **changes: Any) -> JobView:
    """A warm job of 1 to 4 slots with a batch of 64."""
    held = dict.fromkeys(on, 64 // len(on)) if on else {}
    view = job_view(job, slots=(1, 4), family="f", epoch=1, start_s=0.0)
    return msgspec.structs.replace(view, running_on=held, **changes)


def linear(most: int = 4) -> list[tuple[float, EpochSeen]]:
    """A family whose steps take half the time on twice the slots."""
    return [
        (1.0, EpochSeen(job=JobId("old-9"), family="f", slots=slots, nodes=1, global_batch=64,
                        samples_per_s=100.0 * slots, whole=True))
        for slots in range(1, most + 1)
    ]  # fmt: skip


def allowed(problem: Problem, levels: IntArray) -> bool:
    return bool(np.isfinite(problem.worth[np.arange(len(levels)), levels]).all())


def order_of(problem: Problem, seed: int) -> IntArray:
    return default_rng(seed).permutation(len(problem.cases))


# --- by example


def test_slots_are_given_where_they_are_worth_most() -> None:
    short, long = a_job(A, stop_samples=100), a_job(B, stop_samples=10_000)

    problem = problem_of(view_of(row_of(4), long, short), news=linear())

    assert filled(problem, lowest(problem)).tolist() == [0, 4]
    assert filled(problem, np.array([1, 0])).tolist() == [1, 3]


def test_nothing_is_filled_where_no_slot_is_worth_anything() -> None:
    slower = [
        (1.0, EpochSeen(job=JobId("old-9"), family="f", slots=slots, nodes=1, global_batch=64,
                        samples_per_s=100.0 / slots, whole=True))
        for slots in (1, 2, 3, 4)
    ]  # fmt: skip
    problem = problem_of(view_of(row_of(4), a_job(A, on=(S0,))), news=slower)

    assert filled(problem, problem.present).tolist() == [1]


def test_a_schedule_that_does_not_fit_is_cut_at_the_end_of_the_order() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), news=linear())

    assert repaired(problem, np.array([3, 3]), np.array([0, 1])).tolist() == [3, 0]
    assert repaired(problem, np.array([3, 3]), np.array([1, 0])).tolist() == [0, 3]
    assert repaired(problem, np.array([3, 1]), np.array([0, 1])).tolist() == [3, 1]


def test_who_gets_too_little_room_after_a_crossover_gives_way_by_chance() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), news=linear())
    one, other = np.array([3, 1]), np.array([1, 3])

    children = {tuple(crossed(problem, one, other, default_rng(seed))) for seed in range(40)}

    assert children >= {(3, 1), (1, 3)}
    assert all(sum(child) == 4 for child in children)


def test_a_schedule_is_worth_the_sum_of_what_its_jobs_are() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), news=linear())
    levels = np.array([3, 1])

    candidate = score(problem, levels, np.zeros(2, dtype=np.bool_))

    assert candidate is not None
    assert candidate.placed == ((0, 1, 2), (3,))
    assert candidate.fitness == pytest.approx(problem.worth[0, 3] + problem.worth[1, 1])


def test_a_job_over_more_nodes_than_it_needs_is_worth_less_by_what_its_steps_take_longer() -> None:
    held = a_job(B, on=(slot(3, 0), slot(3, 1)))
    problem = problem_of(view_of(row_of(1, 1, 2), held, a_job(A)))
    levels = np.array([problem.present[0], 2])

    candidate = score(problem, levels, np.zeros(2, dtype=np.bool_))

    assert candidate is not None
    assert candidate.placed == (problem.cases[0].now, (0, 1))
    worth = problem.worth[0, levels[0]] + problem.worth[1, 2] * 1.1**-0.8  # a tenth longer
    assert candidate.fitness == pytest.approx(worth)


def test_to_bring_a_job_together_costs_the_move_and_gains_the_nodes() -> None:
    job = a_job(A, on=(S0, T0), stop_samples=10_000)
    problem = problem_of(view_of(row_of(2, 2), job))

    stays, packed = (score(problem, problem.present, np.array([moves])) for moves in (False, True))

    assert stays is not None
    assert packed is not None
    assert {int(problem.node_of[slot]) for slot in packed.placed[0]} == {0}
    gain = (1.1 * problem.cases[0].moved) ** 0.8
    assert packed.fitness == pytest.approx(stays.fitness * gain)


def slot(node: int, index: int) -> SlotId:
    return SlotId(f"n{node}/{index}")


# --- whatever the problem


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_repaired_is_allowed_and_fits(problem: Problem, seed: int) -> None:
    levels = repaired(problem, any_levels(problem, seed), order_of(problem, seed))

    assert allowed(problem, levels)
    assert used(problem, levels) <= problem.capacity


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_fits_and_is_allowed_needs_no_repair(problem: Problem, seed: int) -> None:
    levels = repaired(problem, any_levels(problem, seed), order_of(problem, seed))

    assert repaired(problem, levels, order_of(problem, seed + 1)).tolist() == levels.tolist()
    assert repaired(problem, problem.present, order_of(problem, seed)).tolist() == (
        problem.present.tolist()
    )


@SIZE
@given(problem=problems(), seed=seeds)
def test_what_is_filled_fits_is_allowed_and_shrinks_nobody(problem: Problem, seed: int) -> None:
    before = repaired(problem, any_levels(problem, seed), order_of(problem, seed))

    after = filled(problem, before)

    assert allowed(problem, after)
    assert used(problem, after) <= problem.capacity
    assert (after >= before).all()
    rows = np.arange(len(before))
    assert (problem.worth[rows, after] >= problem.worth[rows, before]).all()


@SIZE
@given(problem=problems())
def test_the_schedule_in_force_is_worth_what_the_table_says(problem: Problem) -> None:
    none = np.zeros(len(problem.cases), dtype=np.bool_)

    candidate = score(problem, problem.present, none)

    assert candidate is not None
    rows = np.arange(len(problem.cases))
    assert candidate.fitness == pytest.approx(problem.worth[rows, problem.present].sum())
    assert candidate.placed == tuple(case.now for case in problem.cases)


@SIZE
@given(problem=problems(), seed=seeds)
def test_every_child_is_allowed_fits_and_can_be_placed(problem: Problem, seed: int) -> None:
    rng = default_rng(seed)
    if not problem.cases:
        return
    one, other = (
        filled(problem, repaired(problem, any_levels(problem, seed + n), order_of(problem, n)))
        for n in (0, 1)
    )
    packed = rng.random(len(one)) < 0.5
    children = (
        *(crossed(problem, one, other, rng) for _ in range(8)),
        mutated(problem, one, 0.3, rng),
        resized(problem, one, rng),
        refreshed(problem, any_levels(problem, seed)),
    )

    for child in children:
        assert allowed(problem, child)
        assert used(problem, child) <= problem.capacity
        assert score(problem, child, repacked(problem, packed, child, rng)) is not None


@SIZE
@given(problem=problems(), seed=seeds)
def test_only_spread_jobs_of_unchanged_size_that_may_move_are_brought_together(
    problem: Problem, seed: int
) -> None:
    rng = default_rng(seed)
    levels = repaired(problem, any_levels(problem, seed), order_of(problem, seed))

    packed = repacked(problem, rng.random(len(levels)) < 0.5, levels, rng)

    for row in np.flatnonzero(packed):
        case = problem.cases[row]
        nodes = {int(problem.node_of[place]) for place in case.now}
        assert levels[row] == problem.present[row]
        assert not case.gated
        assert len(nodes) > -(-len(case.now) // problem.widest)


def test_a_job_that_never_ran_takes_its_first_slot_from_the_one_that_ran_longest() -> None:
    young, old = a_job(A, on=(S0, S1), ran_s=5.0), a_job(B, on=(T0, slot(2, 1)), ran_s=500.0)
    new = msgspec.structs.replace(a_job(JobId("c-3")), epoch=0)
    problem = problem_of(view_of(row_of(2, 2), young, old, new), news=linear())

    assert refreshed(problem, problem.present).tolist() == [2, 1, 1]
