"""Figures 7 to 10, Table 1 and Algorithm 1 of the ONES paper, as far as its text describes them."""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.policy.ones_paper.candidate_scores import (
    counts_of,
    local_batches,
    mean_draw,
    scorer_for,
    selected,
    work_left,
)
from controlplane.policy.ones_paper.evolution import (
    carried_over,
    filled,
    mutated,
    refreshed,
    reordered,
    swapped,
    with_new_jobs,
    within_limits,
)
from controlplane.policy.options import OnesPaperOptions
from tests.unit.controlplane.policy.ones_paper.problems import a_problem, genes, shown

EIGHT_8 = OnesPaperOptions(score="running", charge=False, reorder="flat")
ANY_LEFT = np.full((1, 4), 1000.0)


# --- Table 1, equations 1 and 2


def test_slots_and_batches_of_a_job_follow_from_the_genome() -> None:
    problem = a_problem(present=[1, 1, 2, 0, 1], most=[3, 2], local=8)
    schedule = genes([1, 1, 2, 0, 1])

    c = counts_of(schedule, 2)
    b = local_batches(schedule, problem)

    assert c.tolist() == [[3, 1]]  # c_j = sum over slots of min(1, b)
    assert b.tolist() == [[8, 8, 8, 0, 8]]
    assert [int(b[schedule == job].sum()) for job in (0, 1)] == [24, 8]  # B_j = sum of b


def test_a_batch_that_cannot_be_divided_is_dealt_with_differences_of_one() -> None:
    problem = a_problem(present=[1, 1, 1], most=[3])
    problem.batches[0, 3] = 10

    assert local_batches(genes([1, 1, 1]), problem).tolist() == [[4, 3, 3]]


# --- equations 5 to 8, Algorithm 1


def test_remaining_work_is_what_was_done_times_one_over_progress_less_one() -> None:
    problem = a_problem(present=[1], most=[1], left=[float("nan")])

    left = work_left(problem, np.array([[0.25]]))

    assert left.tolist() == [[3000.0]]  # Y = 1000 (1 / 0.25 - 1)


def test_the_score_of_equation_8_is_the_sum_of_remaining_time_times_slots() -> None:
    problem = a_problem(
        present=[1, 1, 2, 0],
        most=[2, 2, 2],
        rates=[[10.0, 16.0], [5.0, 8.0], [1.0, 2.0]],
        left=[1600.0, 500.0, 1e9],  # the third job waits, and costs nothing
    )
    scorer = scorer_for(problem, EIGHT_8)

    score = scorer.matrix(genes([1, 1, 2, 0])) @ scorer.weights(mean_draw(problem))

    assert score.tolist() == [[-(100.0 * 2 + 100.0 * 1)]]  # T c of both; smaller is better


def test_algorithm_1_takes_the_candidate_with_the_smallest_sum() -> None:
    problem = a_problem(present=[1, 2], most=[2, 2], rates=[[10.0, 10.0], [10.0, 20.0]])
    candidates = genes([1, 1], [1, 2], [2, 2])  # sums: 200, 200, 100

    best, scores = selected(scorer_for(problem, EIGHT_8), candidates, 2, np.random.default_rng(0))

    assert scores.tolist() == [-200.0, -200.0, -100.0]
    assert best.tolist() == [2, 0]


# --- figure 7: refresh


def test_figure_7_job_1_is_selected_first_and_job_2_fills_the_last_idle_slot() -> None:
    # Two slots for each of three jobs; the third has completed. R allows job 1 one slot more, and
    # job 2 two. The gain of job 1, (2/2 - 1/1) Y, is smaller than that of job 2.
    before = a_problem(present=[1, 3, 2, 2, 3, 0], most=[2, 4, 2])
    after = a_problem(
        present=[1, 0, 2, 2, 0, 0],
        most=[2, 4],
        rates=[[1.0, 1.9], [1.0, 1.9, 2.0, 2.1]],
        left=[100.0, 1000.0],
    )

    candidate = carried_over(before.present[None, :], before, after)
    found = refreshed(candidate, after, after.exact[None, :])

    assert shown(candidate) == [[1, 0, 2, 2, 0, 0]]  # (1) its slots are cleaned up
    assert shown(found) == [[1, 1, 2, 2, 2, 2]]


def test_refresh_scales_down_what_is_beyond_its_limit() -> None:
    problem = a_problem(present=[1, 1, 1, 2], most=[2, 1])

    assert shown(within_limits(problem.present[None, :], problem)) == [[1, 1, 0, 2]]


def test_refresh_takes_slots_for_new_jobs_from_the_largest_time_processed() -> None:
    problem = a_problem(
        present=[1, 1, 2, 2, 3, 0],
        most=[2, 2, 2, 2, 2, 2],
        new=[4, 5, 6],
        served_s=[50.0, 900.0, 10.0, 0.0, 0.0, 0.0],
    )

    found = with_new_jobs(problem.present[None, :], problem)

    assert shown(found) == [[1, 1, 5, 6, 3, 4]]  # the idle one first, then those of job 2


# --- figure 8: uniform crossover


def test_figure_8_each_slot_goes_from_one_parent_to_one_child_and_from_the_other_to_the_other() -> (
    None
):
    one, other = genes([1, 1, 2, 3]), genes([2, 1, 3, 4])

    children = swapped(one, other, np.array([[True, False, False, True]]))

    assert shown(children) == [[1, 1, 3, 3], [2, 1, 2, 4]]


# --- figure 9: uniform mutation


def test_figure_9_two_workers_are_replaced_by_job_4() -> None:
    # Job 2 has two workers and is pre-empted; job 4 waits, and its gain is the smallest.
    problem = a_problem(present=[1, 2, 2, 3], most=[1, 2, 1, 2], left=[9e3, 9e3, 9e3, 10.0])
    struck = np.array([[False, True, False, False]])

    found = mutated(problem.present[None, :], problem, struck, problem.exact[None, :])

    assert shown(found) == [[1, 4, 4, 3]]


def test_what_others_cannot_use_goes_back_to_the_job_that_was_preempted() -> None:
    problem = a_problem(present=[1, 2, 2], most=[1, 2])
    struck = np.array([[False, True]])

    found = mutated(problem.present[None, :], problem, struck, problem.exact[None, :])

    assert shown(found) == [[1, 2, 2]]


# --- figure 10: reorder


def test_figure_10_workers_are_packed_in_the_order_of_occurrence_of_each_job() -> None:
    assert shown(reordered(genes([3, 1, 3, 2, 1, 3, 0, 2]), "flat")) == [[3, 3, 3, 1, 1, 2, 2, 0]]


def test_reorder_in_the_order_of_arrival_gives_a_slot_the_same_job_in_most_candidates() -> None:
    assert shown(reordered(genes([3, 1, 3, 2], [1, 3, 2, 3]), "aligned")) == [[1, 2, 3, 3]] * 2


# --- equation 4


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_a_waiting_job_asks_for_its_least_and_a_running_one_for_what_its_limit_allows(
    slots: int,
) -> None:
    problem = a_problem(present=[0] * slots, most=[4])

    found = filled(problem.present[None, :], problem, ANY_LEFT[:, :1])

    assert shown(found) == [[1] * slots]
