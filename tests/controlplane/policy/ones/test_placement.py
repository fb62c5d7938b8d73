"""Where jobs go: few moves, few nodes."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.api import JobView
from controlplane.policy.ones.genome import repaired, used
from controlplane.policy.ones.placement import place
from controlplane.policy.ones.problem import Problem
from schemas.ids import JobId, SlotId
from tests.support.builders import A, B, C, job_view, slot_view
from tests.support.views import any_levels, problem_of, problems, row_of, view_of

N, P, Q = ([SlotId(f"n{node}/{index}") for index in range(4)] for node in (1, 2, 3))
WHOLE = settings(max_examples=40, deadline=None)


def a_job(job: JobId, *on: SlotId) -> JobView:
    """A warm job of 1 to 8 slots."""
    view = job_view(job, slots=(1, 8), epoch=1)
    return msgspec.structs.replace(view, running_on=dict.fromkeys(on, 8))


def placed(
    problem: Problem, packed: tuple[JobId, ...] = (), **slots: int
) -> dict[JobId, tuple[SlotId, ...]]:
    """Where jobs go if those that are named get so many slots."""
    names = [case.job.job for case in problem.cases]
    levels = problem.present.copy()
    for letter, many in slots.items():
        row = next(row for row, name in enumerate(names) if name.startswith(letter))
        levels[row] = problem.sizes[row].tolist().index(many) if many else 0
    chosen = place(problem, levels, np.array([name in packed for name in names]))
    assert chosen is not None
    return {
        name: tuple(problem.slots[slot] for slot in slots)
        for name, slots in zip(names, chosen, strict=True)
    }


def test_a_job_that_grows_stays_and_takes_slots_beside_its_own() -> None:
    problem = problem_of(view_of(row_of(4, 4), a_job(A, P[0])))

    assert placed(problem, a=2) == {A: (P[0], P[1])}


def test_a_job_that_shrinks_keeps_the_nodes_where_it_has_most() -> None:
    problem = problem_of(view_of(row_of(4, 4), a_job(A, N[0], P[0], P[1], N[1], P[2])))

    assert placed(problem, a=3) == {A: (P[0], P[1], P[2])}
    assert placed(problem, a=4) == {A: (N[0], P[0], P[1], P[2])}


def test_a_small_job_goes_where_it_fits_best() -> None:
    problem = problem_of(view_of(row_of(4, 2, 1), a_job(A)))

    assert placed(problem, a=1) == {A: (Q[0],)}


def test_a_job_that_fits_no_node_alone_begins_with_the_emptiest() -> None:
    view = view_of(row_of(2, 3), msgspec.structs.replace(a_job(A), least=4))

    assert placed(problem_of(view), a=4) == {A: (P[0], P[1], P[2], N[0])}


def test_a_start_comes_before_growth_and_the_largest_first() -> None:
    small, large = a_job(A), msgspec.structs.replace(a_job(B), least=2)
    problem = problem_of(view_of(row_of(2, 2), small, large, a_job(C, N[0])))

    assert placed(problem, a=1, b=2, c=1) == {A: (N[1],), B: (P[0], P[1]), C: (N[0],)}
    assert placed(problem, a=1, c=2) == {A: (N[1],), B: (), C: (N[0], P[0])}


def test_what_one_gives_up_another_may_have() -> None:
    problem = problem_of(view_of(row_of(3), a_job(A, N[0], N[1], N[2]), a_job(B)))

    assert placed(problem, a=2, b=1) == {A: (N[0], N[1]), B: (N[2],)}


def test_a_slot_that_is_left_just_now_is_taken_after_the_free_ones_of_its_node() -> None:
    leaving = msgspec.structs.replace(slot_view(N[0], usable=False), leaving=True)
    view = view_of([leaving, slot_view(N[1])], a_job(A))

    assert placed(problem_of(view), a=1) == {A: (N[1],)}


def test_a_start_takes_a_slot_that_is_free_now_wherever_that_is() -> None:
    leaving = msgspec.structs.replace(slot_view(N[0], usable=False), leaving=True)
    view = view_of([leaving, slot_view(P[0]), slot_view(P[1])], a_job(A))

    assert placed(problem_of(view), a=1) == {A: (P[0],)}


def test_a_job_that_is_brought_together_keeps_what_it_can() -> None:
    problem = problem_of(view_of(row_of(2, 3), a_job(A, N[0], P[0]), a_job(B, N[1])))

    assert placed(problem, (A,)) == {A: (P[0], P[1]), B: (N[1],)}


def test_there_is_no_place_for_more_than_there_are() -> None:
    problem = problem_of(view_of(row_of(1), a_job(A), a_job(B)))

    assert place(problem, np.array([1, 1]), np.zeros(2, dtype=np.bool_)) is None


def test_a_job_is_brought_together_on_few_nodes() -> None:
    problem = problem_of(view_of(row_of(2, 4), a_job(A, N[0], P[0]), a_job(B, N[1])))

    together = placed(problem, (A,))

    assert together[B] == (N[1],)
    assert {slot.partition("/")[0] for slot in together[A]} == {"n2"}


# --- whatever the problem


@WHOLE
@given(problem=problems(), seed=st.integers(0, 1000))
def test_jobs_that_do_not_change_stay_and_no_slot_is_given_twice(
    problem: Problem, seed: int
) -> None:
    rng = default_rng(seed)
    levels = repaired(problem, any_levels(problem, seed), rng.permutation(len(problem.cases)))
    none = np.zeros(len(levels), dtype=np.bool_)

    chosen = place(problem, levels, none)

    assert chosen is not None
    taken = [slot for slots in chosen for slot in slots]
    assert len(taken) == len(set(taken)) == used(problem, levels)
    mine = {slot for case in problem.cases for slot in case.now}
    assert set(taken) <= mine | {*problem.free_now, *problem.free_soon}
    for row, case in enumerate(problem.cases):
        size = int(problem.sizes[row, levels[row]])
        assert len(chosen[row]) == size
        if size <= len(case.now):
            assert set(chosen[row]) <= set(case.now)
        else:
            assert set(chosen[row]) >= set(case.now)
        if levels[row] == problem.present[row]:
            assert chosen[row] == case.now


@WHOLE
@given(problem=problems(), seed=st.integers(0, 1000))
def test_a_job_that_shrinks_keeps_as_few_nodes_as_it_can(problem: Problem, seed: int) -> None:
    rng = default_rng(seed)
    levels = repaired(problem, any_levels(problem, seed), rng.permutation(len(problem.cases)))

    chosen = place(problem, levels, np.zeros(len(levels), dtype=np.bool_))

    assert chosen is not None
    for row, case in enumerate(problem.cases):
        many = np.bincount(problem.node_of[list(case.now)].astype(int), minlength=1)
        if 0 < len(chosen[row]) < len(case.now):
            fewest = int(np.searchsorted(np.cumsum(np.sort(many)[::-1]), len(chosen[row]))) + 1
            assert len({int(problem.node_of[slot]) for slot in chosen[row]}) == fewest
