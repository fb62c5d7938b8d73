"""Operations on candidates, figures 7 to 10, and their scores by Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from controlplane.policy.ones_paper.candidates import (
    carried_over,
    counts_of,
    crossed,
    draws,
    fill_costs,
    filled,
    mean_draw,
    mutated,
    random_schedules,
    ranks,
    refreshed,
    reordered,
    scorer_for,
    selected,
    swapped,
    with_new_jobs,
    within_limits,
    work_left,
)
from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem
from controlplane.policy.options import OnesPaperOptions
from tests.support.paper_problems import a_problem, any_problem, genes, idle, shown
from tests.support.sizes import examples

EIGHT_8 = OnesPaperOptions(score="running", charge=False, reorder="flat")
ANY_LEFT = np.full((1, 4), 1000.0)


# --- Table 1, equations 1 and 2


def test_the_slots_of_a_job_follow_from_the_genome() -> None:
    assert counts_of(genes([1, 1, 2, 0, 1]), 2).tolist() == [[3, 1]]  # c_j of eq. 2


# --- equations 5 to 8, Algorithm 1


def test_remaining_work_is_equation_7() -> None:
    problem = a_problem(present=[1], most=[1], left=[float("nan")])

    left = work_left(problem, np.array([[0.25]]))

    assert left.tolist() == [[3000.0]]  # Y = 1000 (1 / 0.25 - 1)


def test_the_score_is_equation_8() -> None:
    problem = a_problem(
        present=[1, 1, 2, 0],
        most=[2, 2, 2],
        rates=[[10.0, 16.0], [5.0, 8.0], [1.0, 2.0]],
        left=[1600.0, 500.0, 1e9],  # the third job waits, and costs nothing
    )
    scorer = scorer_for(problem, EIGHT_8)

    score = scorer.matrix(genes([1, 1, 2, 0])) @ scorer.weights(mean_draw(problem))

    assert score.tolist() == [[-(100.0 * 2 + 100.0 * 1)]]  # T c of both; smaller is better


def test_algorithm_1_selects_the_smallest_sum() -> None:
    problem = a_problem(present=[1, 2], most=[2, 2], rates=[[10.0, 10.0], [10.0, 20.0]])
    candidates = genes([1, 1], [1, 2], [2, 2])  # sums: 200, 200, 100

    best, scores = selected(scorer_for(problem, EIGHT_8), candidates, 2, np.random.default_rng(0))

    assert scores.tolist() == [-200.0, -200.0, -100.0]
    assert best.tolist() == [2, 0]


# --- figure 7: refresh


def test_refresh_agrees_with_figure_7() -> None:
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


def test_refresh_scales_down_to_the_limit() -> None:
    problem = a_problem(present=[1, 1, 1, 2], most=[2, 1])

    assert shown(within_limits(problem.present[None, :], problem)) == [[1, 1, 0, 2]]


def test_new_jobs_get_slots_of_the_longest_served() -> None:
    problem = a_problem(
        present=[1, 1, 2, 2, 3, 0],
        most=[2, 2, 2, 2, 2, 2],
        new=[4, 5, 6],
        served_s=[50.0, 900.0, 10.0, 0.0, 0.0, 0.0],
    )

    found = with_new_jobs(problem.present[None, :], problem)

    assert shown(found) == [[1, 1, 5, 6, 3, 4]]  # the idle one first, then those of job 2


# --- figure 8: uniform crossover


def test_crossover_agrees_with_figure_8() -> None:
    one, other = genes([1, 1, 2, 3]), genes([2, 1, 3, 4])

    children = swapped(one, other, np.array([[True, False, False, True]]))

    assert shown(children) == [[1, 1, 3, 3], [2, 1, 2, 4]]


# --- figure 9: uniform mutation


def test_mutation_agrees_with_figure_9() -> None:
    # Job 2 has two workers and is pre-empted; job 4 waits, and its gain is the smallest.
    problem = a_problem(present=[1, 2, 2, 3], most=[1, 2, 1, 2], left=[9e3, 9e3, 9e3, 10.0])
    struck = np.array([[False, True, False, False]])

    found = mutated(problem.present[None, :], problem, struck, problem.exact[None, :])

    assert shown(found) == [[1, 4, 4, 3]]
    # Slots that no other job can use return to the pre-empted job.
    two = a_problem(present=[1, 2, 2], most=[1, 2])
    again = mutated(two.present[None, :], two, np.array([[False, True]]), two.exact[None, :])
    assert shown(again) == [[1, 2, 2]]


# --- figure 10: reorder


def test_reorder_agrees_with_figure_10() -> None:
    assert shown(reordered(genes([3, 1, 3, 2, 1, 3, 0, 2]), "flat")) == [[3, 3, 3, 1, 1, 2, 2, 0]]
    assert shown(reordered(genes([3, 1, 3, 2], [1, 3, 2, 3]), "aligned")) == [[1, 2, 3, 3]] * 2


# --- equation 4


def test_a_waiting_job_gets_its_minimum_then_what_its_limit_allows() -> None:
    for slots in (1, 2, 3, 4):
        problem = a_problem(present=[0] * slots, most=[4])
        found = filled(problem.present[None, :], problem, ANY_LEFT[:, :1])
        assert shown(found) == [[1] * slots]


MANY = 5
SIZE = settings(max_examples=examples(60), deadline=None)
Step = Callable[[Genes, PaperProblem, Generator], Genes]


def left(problem: PaperProblem, many: int, rng: Generator) -> np.ndarray:
    return fill_costs(problem, many, rng)


def refresh(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    return refreshed(found, problem, left(problem, len(found), rng))


def crossover(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    children = within_limits(crossed(found, len(found), rng), problem)
    return filled(children, problem, left(problem, len(children), rng))


def mutation(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    struck = rng.random((len(found), len(problem.jobs))) < 0.4
    return mutated(found, problem, struck, left(problem, len(found), rng))


def flat(found: Genes, _problem: PaperProblem, _rng: Generator) -> Genes:
    return reordered(found, "flat")


def aligned(found: Genes, _problem: PaperProblem, _rng: Generator) -> Genes:
    return reordered(found, "aligned")


STEPS: tuple[Step, ...] = (refresh, crossover, mutation, flat, aligned)


@pytest.mark.parametrize("step", STEPS)
@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_an_operator_makes_full_schedules_within_limits(
    step: Step, problem: PaperProblem, seed: int
) -> None:
    rng = default_rng(seed)
    parents = refresh(random_schedules(problem, MANY, rng), problem, rng)

    children = step(parents, problem, rng)

    assert children.shape[1] == len(problem.slots)  # no slot is lost, and each has one gene
    assert len(children) == MANY * (2 if step is crossover else 1)
    assert (children >= IDLE).all()
    assert (children < len(problem.jobs)).all()
    counts = counts_of(children, len(problem.jobs))
    free = (children == IDLE).sum(axis=1)[:, None]
    could_grow = (counts > 0) & (counts < problem.most) & (free > 0)
    could_start = (counts == 0) & (problem.least <= problem.most) & (free >= problem.least)
    assert not (could_grow | could_start).any()  # no slot is idle that a job can use
    assert ((counts == 0) | ((counts >= problem.least) & (counts <= problem.most))).all()


@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_new_jobs_are_served_first(problem: PaperProblem, seed: int) -> None:
    rng = default_rng(seed)
    schedules = with_new_jobs(within_limits(random_schedules(problem, MANY, rng), problem), problem)

    counts = counts_of(schedules, len(problem.jobs))
    room = len(problem.slots)
    for row in np.flatnonzero(problem.new & (problem.most >= problem.least)):
        if problem.least[row] > room:
            break
        room -= problem.least[row]
        assert (counts[:, row] >= problem.least[row]).all()


@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_crossover_takes_every_gene_from_its_parents(problem: PaperProblem, seed: int) -> None:
    rng = default_rng(seed)
    parents = random_schedules(problem, MANY, rng)

    children = crossed(parents, MANY, default_rng(seed))

    for one, other in zip(children[:MANY], children[MANY:], strict=True):
        pairs = np.sort(np.stack([one, other]), axis=0)
        assert any(
            (pairs == np.sort(np.stack([a, b]), axis=0)).all() for a in parents for b in parents
        )


@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_reorder_only_moves(problem: PaperProblem, seed: int) -> None:
    schedules = random_schedules(problem, MANY, default_rng(seed))

    for how in ("flat", "aligned"):
        moved = reordered(schedules, how)
        jobs = len(problem.jobs)
        assert (counts_of(moved, jobs) == counts_of(schedules, jobs)).all()
        changes = (moved[:, 1:] != moved[:, :-1]).sum(axis=1)
        kinds = [len(set(row)) for row in moved.tolist()]
        assert changes.tolist() == [many - 1 for many in kinds]


def test_without_jobs_every_slot_is_idle() -> None:
    problem = a_problem(present=[0, 0], most=[])
    rng = default_rng(0)

    found = refresh(random_schedules(problem, 3, rng), problem, rng)

    assert idle(found) == 6


def test_draws_fill_equal_candidates_differently() -> None:
    problem = a_problem(present=[1, 2, 0, 0], most=[3, 3], left=[float("nan")] * 2,
                        rates=[[1.0, 1.5, 1.8]] * 2)  # fmt: skip
    schedules = genes(*[[1, 2, 0, 0]] * 30)

    drawn = fill_costs(problem, 30, default_rng(0))

    assert len({tuple(row) for row in shown(filled(schedules, problem, drawn))}) == 2


def test_a_job_of_infinite_work_fills_the_cluster() -> None:
    problem = a_problem(present=[0, 0], most=[2], left=[float("inf")])

    found = filled(genes([0, 0]), problem, np.array([[np.inf]]))

    assert shown(found) == [[1, 1]]


NAN = float("nan")
THREE = [[1.0, 1.8, 2.4]] * 3


def scores(problem: PaperProblem, candidates: Genes, options: OnesPaperOptions) -> list[float]:
    scorer = scorer_for(problem, options)
    found = scorer.matrix(candidates) @ scorer.weights(mean_draw(problem))
    return [float(value) for value in found[:, 0]]


def test_read_literally_leaving_a_job_out_is_a_gain() -> None:
    problem = a_problem(present=[0, 0, 0], most=[3, 3, 3], rates=THREE, left=[100.0, 100.0, 300.0])
    candidates = genes([1, 1, 2], [1, 2, 3])

    running = scores(problem, candidates, OnesPaperOptions(score="running"))
    all_jobs = scores(problem, candidates, OnesPaperOptions(score="all"))

    assert running[0] > running[1]
    assert all_jobs[0] < all_jobs[1]


def test_a_change_is_charged_for_its_stall() -> None:
    problem = a_problem(present=[1, 2, 2], most=[2, 2], rates=[[1.0, 1.05]] * 2)
    stays, changes = genes([1, 2, 2]), genes([1, 1, 2])

    charged = scores(problem, np.concatenate([stays, changes]), OnesPaperOptions())
    free = scores(problem, np.concatenate([stays, changes]), OnesPaperOptions(charge=False))

    assert charged[0] > charged[1]
    assert free[0] == pytest.approx(free[1])


def test_stopping_a_job_costs_more_than_letting_it_wait() -> None:
    runs = a_problem(present=[1], most=[1, 1])
    waits = a_problem(present=[0], most=[1, 1])
    nobody = genes([0])

    assert scores(runs, nobody, OnesPaperOptions())[0] < 0.0
    assert scores(waits, nobody, OnesPaperOptions()) == [0.0]


def test_only_the_flat_reading_scores_nodes_and_moves() -> None:
    problem = a_problem(present=[1, 1, 0, 0, 0, 0], most=[2], spread=0.5)
    candidates = genes([1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0])

    flat = scores(problem, candidates, OnesPaperOptions(reorder="flat"))
    aligned = scores(problem, candidates, OnesPaperOptions(reorder="aligned"))

    assert flat[0] > flat[1] > flat[2]  # as it is, moved, moved and over two nodes
    assert len(set(aligned)) == 1


def test_short_jobs_are_worth_more() -> None:
    problem = a_problem(present=[0], most=[1, 1], left=[100.0, 10_000.0])

    short, long = scores(problem, genes([1], [2]), OnesPaperOptions())

    assert short > 2.0 * long


# --- progress


def test_draws_have_the_mean_progress() -> None:
    problem = a_problem(present=[1, 2], most=[1, 1])

    drawn = draws(problem, default_rng(0), 20_000)

    assert drawn.mean(axis=1) == pytest.approx(mean_draw(problem)[:, 0], abs=0.01)
    assert ((drawn > 0) & (drawn < 1)).all()


def test_known_work_is_not_drawn() -> None:
    problem = a_problem(present=[1, 2], most=[1, 1], left=[123.0, NAN])

    left = work_left(problem, draws(problem, default_rng(0), 50))

    assert set(left[0]) == {123.0}
    assert len(set(left[1])) == 50


def many_candidates() -> tuple[PaperProblem, Genes]:
    problem = a_problem(present=[0] * 4, most=[4, 4, 4], left=[NAN] * 3,
                        rates=[[1.0, 1.6, 2.0, 2.2]] * 3)  # fmt: skip
    rng = default_rng(1)
    return problem, rng.integers(-1, 3, (40, 4)).astype(np.int16)


@pytest.mark.parametrize("rho", ["mean", "generation", "candidate"])
@pytest.mark.parametrize("selection", ["best", "sampled"])
def test_k_different_candidates_survive(rho: str, selection: str) -> None:
    problem, candidates = many_candidates()
    options = OnesPaperOptions(rho=rho, selection=selection)  # type: ignore[arg-type]  # both listed

    rows, _ = selected(scorer_for(problem, options), candidates, 10, default_rng(0))

    assert len(rows) == len(set(rows.tolist())) == 10


def test_only_draws_make_selections_differ() -> None:
    problem, candidates = many_candidates()

    def winners(**readings: str) -> int:
        scorer = scorer_for(problem, OnesPaperOptions(**readings))  # type: ignore[arg-type]
        found = {
            tuple(selected(scorer, candidates, 5, default_rng(seed))[0].tolist())
            for seed in range(20)
        }
        return len(found)

    assert winners(rho="mean") == winners(rho="mean", selection="sampled") == 1
    assert winners(rho="generation") > 1
    assert winners(rho="candidate") > winners(rho="mean")


def test_rounds_of_algorithm_1_differ_from_one_draw() -> None:
    problem, candidates = many_candidates()
    best = scorer_for(problem, OnesPaperOptions(rho="generation"))
    rounds = scorer_for(problem, OnesPaperOptions(rho="generation", selection="sampled"))

    one, _ = selected(best, candidates, 8, default_rng(3))
    other, _ = selected(rounds, candidates, 8, default_rng(3))

    assert one.tolist() != other.tolist()


def test_slots_of_a_job_have_ranks() -> None:
    assert ranks(genes([2, 1, 2, 0, 2, 1, 0])).tolist() == [[0, 0, 1, 0, 2, 1, 1]]
