"""New candidates from old ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import JobView
from controlplane.policy.ones.evolution import (
    crossed,
    laid_out,
    moved,
    mutated,
    node_jitter,
    present,
    refreshed,
    resized,
)
from controlplane.policy.ones.greedy import filled, used
from controlplane.policy.ones.problem import Problem
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, C, changed_job, job_view
from tests.support.sizes import examples
from tests.support.views import (
    any_levels,
    pace,
    problem_of,
    problems,
    row_of,
    some_levels,
    surrounded,
    view_of,
)

SIZE = settings(max_examples=examples(30), deadline=None)
seeds = st.integers(0, 1000)
LINEAR = pace("f", 100.0, 200.0, 300.0, 400.0)


def a_job(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """A warm job of 1 to 4 slots with a batch of 64."""
    held = dict.fromkeys(on, 64 // len(on)) if on else {}
    view = job_view(job, slots=(1, 4), family="f", epoch=1, start_s=0.0, running_on=held)
    return changed_job(view, **changes)


def test_who_gets_too_little_room_after_a_crossover_gives_way_by_chance() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)
    one, other = np.array([3, 1]), np.array([1, 3])

    children = {tuple(crossed(problem, one, other, default_rng(seed))) for seed in range(40)}

    assert children >= {(3, 1), (1, 3)}
    assert all(sum(child) == 4 for child in children)


def test_a_mutation_takes_slots_away_from_some_and_others_get_them() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)

    children = {
        tuple(mutated(problem, np.array([4, 0]), 0.5, default_rng(seed))) for seed in range(80)
    }

    assert len(children) > 1
    assert all(sum(child) == 4 for child in children)


def test_a_mutation_at_rate_zero_still_changes_somebody() -> None:
    problem = problem_of(view_of(row_of(1), a_job(A), a_job(B)), events=LINEAR)

    children = {
        tuple(mutated(problem, np.array([1, 0]), 0.0, default_rng(seed))) for seed in range(40)
    }

    assert children == {(1, 0), (0, 1)}


def test_one_job_takes_each_size_that_it_may_have() -> None:
    problem = problem_of(view_of(row_of(4), a_job(A), a_job(B)), events=LINEAR)

    children = {tuple(resized(problem, np.array([2, 2]), default_rng(seed))) for seed in range(80)}

    assert children >= {(4, 0), (3, 1), (2, 2), (1, 3), (0, 4)}


# --- refresh


def test_a_job_that_never_ran_takes_its_first_slot_from_the_one_that_ran_longest() -> None:
    young, old = a_job(A, S0, S1, ran_s=5.0), a_job(B, T0, T1, ran_s=500.0)
    problem = problem_of(view_of(row_of(2, 2), young, old, a_job(C, epoch=0)), events=LINEAR)

    assert refreshed(problem, problem.present).tolist() == [2, 1, 1]


def test_a_job_that_ran_before_and_waits_takes_nothing_from_others() -> None:
    young, old = a_job(A, S0, S1, ran_s=5.0), a_job(B, T0, T1, ran_s=500.0)
    problem = problem_of(view_of(row_of(2, 2), young, old, a_job(C)), events=LINEAR)

    assert refreshed(problem, problem.present).tolist() == [2, 2, 0]


def test_of_those_who_never_ran_the_first_that_came_is_served_first() -> None:
    late = a_job(B, epoch=0, submitted_at=Seconds(9.0))
    early = a_job(C, epoch=0, submitted_at=Seconds(3.0))
    problem = problem_of(view_of(row_of(2), a_job(A, S0, S1), late, early), events=LINEAR)

    assert refreshed(problem, problem.present).tolist() == [1, 0, 1]


# --- moves


def test_one_on_more_nodes_than_it_needs_is_moved() -> None:
    is_scattered, whole = a_job(A, S0, T0), a_job(B, S1)
    problem = problem_of(view_of(row_of(2, 2), whole, is_scattered), events=LINEAR)

    found = [moved(problem, present(problem), default_rng(seed)) for seed in range(10)]

    assert [hints and (hints.movers, hints.jitter) for hints in found] == [((1,), None)] * 10


def test_nobody_is_moved_where_all_are_together_and_one_place_is_as_good_as_another() -> None:
    problem = problem_of(view_of(row_of(2, 2), a_job(A, S0), a_job(B, T0)), events=LINEAR)

    assert moved(problem, present(problem), default_rng(0)) is None
    assert node_jitter(problem, default_rng(0)) is None


def test_where_neighbours_matter_anybody_who_runs_and_may_move_is_moved() -> None:
    late = a_job(C, T1, moved_at=Seconds(99.0))
    view = view_of(row_of(2, 3), a_job(A, S0), a_job(B, T0), late, a_job(JobId("d-4")))
    costs = [[0.1] * 4] * 4
    problem = surrounded(problem_of(view, events=LINEAR), costs=costs)

    found = [moved(problem, present(problem), default_rng(seed)) for seed in range(40)]

    assert {hints.movers for hints in found if hints} == {(0,), (1,)}
    assert all(hints and hints.jitter is not None for hints in found)


# --- whatever the problem


@SIZE
@given(problem=problems(), seed=seeds)
def test_every_child_is_allowed_fits_and_can_be_placed(problem: Problem, seed: int) -> None:
    rng = default_rng(seed)
    if not problem.job_rows:
        return
    one, other = (filled(problem, some_levels(problem, seed + n)) for n in (0, 1))
    children = (
        *(crossed(problem, one, other, rng) for _ in range(8)),
        mutated(problem, one, 0.3, rng),
        resized(problem, one, rng),
        refreshed(problem, any_levels(problem, seed)),
    )

    for child in children:
        assert problem.allowed[problem.rows, child].all()
        assert used(problem, child) <= problem.capacity
        assert laid_out(problem, present(problem), child) is not None


@SIZE
@given(problem=problems(), seed=seeds)
def test_parents_stay_as_they_are(problem: Problem, seed: int) -> None:
    rng = default_rng(seed)
    one, other = (some_levels(problem, seed + n) for n in (0, 1))
    copies = one.tolist(), other.tolist()

    if len(one):
        crossed(problem, one, other, rng)
        mutated(problem, one, 0.3, rng)
        resized(problem, one, rng)
        refreshed(problem, one)

    assert (one.tolist(), other.tolist()) == copies


@SIZE
@given(problem=problems(), seed=seeds)
def test_only_jobs_that_run_and_may_move_are_moved(problem: Problem, seed: int) -> None:
    parent = laid_out(problem, present(problem), some_levels(problem, seed))
    assert parent is not None

    hints = moved(problem, parent, default_rng(seed))

    for row in hints.movers if hints else ():
        assert problem.free_to_move[row]
        assert parent.levels[row] > 0
