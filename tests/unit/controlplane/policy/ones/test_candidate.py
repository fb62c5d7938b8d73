"""Candidates: their value in a layout, and the operators of the evolution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from controlplane.policy.ones.evolution import (
    Candidate,
    crossed,
    laid_out,
    moved,
    mutated,
    node_jitter,
    present,
    refreshed,
    resized,
    score,
)
from controlplane.policy.ones.greedy import filled, used
from controlplane.policy.ones.placement import PlacementHints, lay_out
from controlplane.policy.ones.problem import Problem
from controlplane.prediction import IntArray
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, C
from tests.support.sizes import examples
from tests.support.views import (
    LINEAR,
    any_levels,
    problem_of,
    problems,
    row_of,
    some_levels,
    surrounded,
    view_of,
    warm_job,
)

SIZE = settings(max_examples=examples(40), deadline=None)
seeds = st.integers(0, 1000)


def slot(node: int, index: int) -> SlotId:
    return SlotId(f"n{node}/{index}")


def made(problem: Problem, levels: list[int], hints: PlacementHints | None = None) -> Candidate:
    """The schedule in force, changed to these levels."""
    hints = hints or PlacementHints()
    found = laid_out(problem, present(problem), np.array(levels, dtype=np.int64), hints)
    assert found is not None
    return found


# --- by example


def test_the_fitness_is_the_sum_of_the_values_of_jobs() -> None:
    problem = problem_of(view_of(row_of(4), warm_job(A), warm_job(B)), events=LINEAR)

    candidate = made(problem, [3, 1])

    assert (candidate.slots(0), candidate.slots(1)) == ((0, 1, 2), (3,))
    assert candidate.value.tolist() == [problem.value[0, 3], problem.value[1, 1]]
    assert candidate.fitness == pytest.approx(problem.value[0, 3] + problem.value[1, 1])
    assert candidate.moves == 2


def test_bringing_a_job_together_costs_a_move_and_gains_speed() -> None:
    problem = problem_of(view_of(row_of(2, 2), warm_job(A, S0, T0, stop_samples=10_000)))
    stays = present(problem)

    packed = made(problem, problem.present.tolist(), PlacementHints(movers=(0,)))

    assert {int(problem.node_of[place]) for place in packed.slots(0)} == {0}
    assert packed.fitness == pytest.approx(stays.fitness * (1.1 * problem.move_factor[0]) ** 0.8)
    assert (stays.moves, packed.moves) == (0, 1)


def test_a_job_moves_only_with_samples_for_both_places() -> None:
    """The controller would refuse it."""
    small, large = (warm_job(A, S0, S1, batch_size=2, batch_limit=limit) for limit in (3, 4))
    elsewhere = PlacementHints(movers=(0,), jitter=np.array([1.0, 0.0]))

    here, there = (
        laid_out(problem, present(problem), problem.present, elsewhere)
        for job in (small, large)
        for problem in [problem_of(view_of(row_of(2, 2), job), events=LINEAR)]
    )

    assert here is None
    assert there is not None
    assert there.slots(0) == (2, 3)


# --- whatever the problem


def naive(problem: Problem, levels: IntArray, owner: IntArray) -> list[float]:
    """Job by job, as the docstrings say it."""
    on = {row: np.flatnonzero(owner == row) for row in range(len(levels))}
    nodes = {row: set(problem.node_of[places].tolist()) for row, places in on.items()}
    found = []
    for row, level in enumerate(levels.tolist()):
        value = float(problem.value[row, level])
        if level:
            job_row, size = problem.job_rows[row], int(problem.sizes[row, level])
            local = np.array([job_row.table.batches[level - 1] / size] * 2)
            spans = np.array([job_row.table.nodes[level - 1], len(nodes[row])])
            meant, real = job_row.model.step_s(spans, np.array([size, size]), local)
            change_factor = float(meant / real)
            if level == problem.present[row] and set(on[row]) != set(job_row.now):
                change_factor *= job_row.move_factor
            if problem.slow is not None:
                change_factor /= max(
                    problem.slow[row, problem.cluster.type_of[place]] for place in on[row]
                )
            value *= change_factor**problem.speedup_exponent
        found.append(value)
    return found


@SIZE
@given(problem=problems(), seed=seeds)
def test_values_of_a_layout_equal_those_computed_job_by_job(problem: Problem, seed: int) -> None:
    """One after the other, with a third schedule to show that nothing wrong is remembered."""
    for number in range(3):
        levels = some_levels(problem, seed + number)
        movers = np.flatnonzero(
            problem.free_to_move & (default_rng(seed).random(len(levels)) < 0.5)
        )
        jitter = default_rng(seed).normal(0.0, 1.0, len(problem.slots_on))
        hints = PlacementHints(tuple(movers.tolist()), jitter=jitter)
        owner = lay_out(problem, problem.owner, problem.present, levels, hints)
        assert owner is not None

        candidate = score(problem, levels, owner)

        assert candidate.value.tolist() == pytest.approx(naive(problem, levels, owner))
        assert candidate.fitness == pytest.approx(sum(naive(problem, levels, owner)))


@SIZE
@given(problem=problems())
def test_the_schedule_in_force_has_the_values_of_the_table(problem: Problem) -> None:
    plain = replace(problem, slow=None, stretch={})

    candidate = present(plain)

    assert candidate.value.tolist() == plain.value[plain.rows, plain.present].tolist()
    assert candidate.moves == 0
    assert [candidate.slots(row) for row in range(len(plain.job_rows))] == [
        tuple(sorted(job_row.now)) for job_row in plain.job_rows
    ]


@SIZE
@given(problem=problems(), seed=seeds)
def test_keys_are_equal_only_for_equal_candidates(problem: Problem, seed: int) -> None:
    one, other = (made(problem, some_levels(problem, seed + n).tolist()) for n in (0, 1))

    same = (one.owner == other.owner).all() and (one.levels == other.levels).all()
    assert (one.key == other.key) == same


@SIZE
@given(problem=problems(), seed=seeds, number=st.integers(1, 4))
def test_a_gated_job_does_not_move_in_several_steps(
    problem: Problem, seed: int, number: int
) -> None:
    """Nor one that has fewer samples than slots in both places: the controller would refuse it."""
    rng = default_rng(seed)
    candidate = present(problem)
    for step in range(number):
        movers = np.flatnonzero(problem.free_to_move & (rng.random(len(problem.job_rows)) < 0.3))
        hints = PlacementHints(
            tuple(movers.tolist()), jitter=rng.normal(0.0, 1.0, len(problem.slots_on))
        )
        found = laid_out(problem, candidate, some_levels(problem, seed + step), hints)
        candidate = candidate if found is None else found

    for row, job_row in enumerate(problem.job_rows):
        old, new = set(job_row.now), set(candidate.slots(row))
        if old - new and new - old:
            assert problem.free_to_move[row]
            assert len(old | new) <= job_row.job.batch_limit


def test_a_gated_job_does_not_move_by_growing_and_shrinking() -> None:
    view = view_of(row_of(1, 3), warm_job(A, S0, moved_at=Seconds(99.0)))
    problem = problem_of(view, events=LINEAR)
    grown = laid_out(problem, present(problem), np.array([3]))
    assert grown is not None

    back = laid_out(problem, grown, np.array([1]))

    assert grown.slots(0) == (0, 1, 2)
    assert back is None


def test_a_crossover_without_room_cuts_random_jobs() -> None:
    problem = problem_of(view_of(row_of(4), warm_job(A), warm_job(B)), events=LINEAR)
    one, other = np.array([3, 1]), np.array([1, 3])

    children = {tuple(crossed(problem, one, other, default_rng(seed))) for seed in range(40)}

    assert children >= {(3, 1), (1, 3)}
    assert all(sum(child) == 4 for child in children)


@pytest.mark.parametrize(
    ("slots", "parent", "rate", "expected"),
    [(4, [4, 0], 0.5, None), (1, [1, 0], 0.0, {(1, 0), (0, 1)})],
    ids=["half of the jobs", "rate 0 changes one job"],
)
def test_a_mutation_gives_the_slots_of_some_jobs_to_others(
    slots: int, parent: list[int], rate: float, expected: set[tuple[int, ...]] | None
) -> None:
    problem = problem_of(view_of(row_of(slots), warm_job(A), warm_job(B)), events=LINEAR)

    children = {
        tuple(mutated(problem, np.array(parent), rate, default_rng(seed))) for seed in range(80)
    }

    assert len(children) > 1
    assert all(sum(child) == slots for child in children)
    assert expected is None or children == expected


def test_a_resize_reaches_every_allowed_size() -> None:
    problem = problem_of(view_of(row_of(4), warm_job(A), warm_job(B)), events=LINEAR)

    children = {tuple(resized(problem, np.array([2, 2]), default_rng(seed))) for seed in range(80)}

    assert children >= {(4, 0), (3, 1), (2, 2), (1, 3), (0, 4)}


# --- refresh


@pytest.mark.parametrize(("epoch", "levels"), [(0, [2, 1, 1]), (1, [2, 2, 0])])
def test_a_refresh_gives_a_job_that_never_ran_a_slot_of_the_job_that_ran_longest(
    epoch: int, levels: list[int]
) -> None:
    young, old = warm_job(A, S0, S1, ran_s=5.0), warm_job(B, T0, T1, ran_s=500.0)
    view = view_of(row_of(2, 2), young, old, warm_job(C, epoch=epoch))
    problem = problem_of(view, events=LINEAR)

    assert refreshed(problem, problem.present).tolist() == levels


def test_a_refresh_serves_new_jobs_in_order_of_arrival() -> None:
    late = warm_job(B, epoch=0, submitted_at=Seconds(9.0))
    early = warm_job(C, epoch=0, submitted_at=Seconds(3.0))
    problem = problem_of(view_of(row_of(2), warm_job(A, S0, S1), late, early), events=LINEAR)

    assert refreshed(problem, problem.present).tolist() == [1, 0, 1]


# --- moves


def test_a_scattered_job_is_chosen_to_move() -> None:
    is_scattered, whole = warm_job(A, S0, T0), warm_job(B, S1)
    problem = problem_of(view_of(row_of(2, 2), whole, is_scattered), events=LINEAR)

    found = [moved(problem, present(problem), default_rng(seed)) for seed in range(10)]

    assert [hints and (hints.movers, hints.jitter) for hints in found] == [((1,), None)] * 10


def test_no_job_moves_if_all_places_are_equal() -> None:
    problem = problem_of(view_of(row_of(2, 2), warm_job(A, S0), warm_job(B, T0)), events=LINEAR)

    assert moved(problem, present(problem), default_rng(0)) is None
    assert node_jitter(problem, default_rng(0)) is None


def test_any_movable_job_may_move_if_gpu_types_differ() -> None:
    late = warm_job(C, T1, moved_at=Seconds(99.0))
    view = view_of(row_of(2, 3), warm_job(A, S0), warm_job(B, T0), late, warm_job(JobId("d-4")))
    slow = [(1.0, 1.1)] * 4
    problem = surrounded(problem_of(view, events=LINEAR), types=(0, 1), slow=slow)

    found = [moved(problem, present(problem), default_rng(seed)) for seed in range(40)]

    assert {hints.movers for hints in found if hints} == {(0,), (1,)}
    assert all(hints and hints.jitter is not None for hints in found)


# --- whatever the problem


@SIZE
@given(problem=problems(), seed=seeds)
def test_every_child_fits_and_parents_stay_unchanged(problem: Problem, seed: int) -> None:
    rng = default_rng(seed)
    if not problem.job_rows:
        return
    one, other = (filled(problem, some_levels(problem, seed + n)) for n in (0, 1))
    copies = one.tolist(), other.tolist()
    children = (
        *(crossed(problem, one, other, rng) for _ in range(8)),
        mutated(problem, one, 0.3, rng),
        resized(problem, one, rng),
        refreshed(problem, any_levels(problem, seed)),
        refreshed(problem, one),
    )
    assert (one.tolist(), other.tolist()) == copies

    for child in children:
        assert problem.allowed[problem.rows, child].all()
        assert used(problem, child) <= problem.capacity
        assert laid_out(problem, present(problem), child) is not None


@SIZE
@given(problem=problems(), seed=seeds)
def test_only_running_movable_jobs_are_chosen_to_move(problem: Problem, seed: int) -> None:
    parent = laid_out(problem, present(problem), some_levels(problem, seed))
    assert parent is not None

    hints = moved(problem, parent, default_rng(seed))

    for row in hints.movers if hints else ():
        assert problem.free_to_move[row]
        assert parent.levels[row] > 0
