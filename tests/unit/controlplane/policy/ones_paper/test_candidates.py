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
from controlplane.policy.options import IMPROVED, OnesPaperOptions
from tests.support.sizes import examples
from tests.unit.controlplane.policy.ones_paper.problems import (
    a_problem,
    any_problem,
    genes,
    idle,
    shown,
)

NAN = float("nan")
EIGHT_8 = OnesPaperOptions()


# --- equations 2 and 5 to 8, Algorithm 1


def test_equations_by_hand() -> None:
    unknown = a_problem(present=[1], most=[1], left=[NAN])
    problem = a_problem(
        present=[1, 1, 2, 0],
        most=[2, 2, 2],
        rates=[[10.0, 16.0], [5.0, 8.0], [1.0, 2.0]],
        left=[1600.0, 500.0, 1e9],  # the third job waits, and costs nothing
    )
    scorer = scorer_for(problem, EIGHT_8)

    score = scorer.matrix(genes([1, 1, 2, 0])) @ scorer.weights(mean_draw(problem))

    assert counts_of(genes([1, 1, 2, 0, 1]), 2).tolist() == [[3, 1]]  # c_j of eq. 2
    assert ranks(genes([2, 1, 2, 0, 2, 1, 0])).tolist() == [[0, 0, 1, 0, 2, 1, 1]]
    assert work_left(unknown, np.array([[0.25]])).tolist() == [[3000.0]]  # 1000 (1 / 0.25 - 1)
    assert score.tolist() == [[-(100.0 * 2 + 100.0 * 1)]]  # eq. 8: T c of both; smaller is better


def test_algorithm_1_selects_the_smallest_sum() -> None:
    problem = a_problem(present=[1, 2], most=[2, 2], rates=[[10.0, 10.0], [10.0, 20.0]])
    candidates = genes([1, 1], [1, 2], [2, 2])  # sums: 200, 200, 100

    best, scores = selected(scorer_for(problem, EIGHT_8), candidates, 2, default_rng(0))

    assert scores.tolist() == [-200.0, -200.0, -100.0]
    assert best.tolist() == [2, 0]


# --- figures 7 to 10


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
    limited = a_problem(present=[1, 1, 1, 2], most=[2, 1])
    assert shown(within_limits(limited.present[None, :], limited)) == [[1, 1, 0, 2]]  # (2)


def test_new_jobs_get_idle_slots_and_those_of_the_longest_served() -> None:
    problem = a_problem(
        present=[1, 1, 2, 2, 3, 0],
        most=[2, 2, 2, 2, 2, 2],
        new=[4, 5, 6],
        served_s=[50.0, 900.0, 10.0, 0.0, 0.0, 0.0],
    )

    found = with_new_jobs(problem.present[None, :], problem)

    assert shown(found) == [[1, 1, 5, 6, 3, 4]]  # the idle one first, then those of job 2


def test_crossover_mutation_and_reorder_agree_with_figures_8_to_10() -> None:
    one, other = genes([1, 1, 2, 3]), genes([2, 1, 3, 4])
    # Job 2 has two workers and is pre-empted; job 4 waits, and its gain is the smallest.
    problem = a_problem(present=[1, 2, 2, 3], most=[1, 2, 1, 2], left=[9e3, 9e3, 9e3, 10.0])
    struck = np.array([[False, True, False, False]])
    two = a_problem(present=[1, 2, 2], most=[1, 2])  # no other job can use the slots of job 2

    children = swapped(one, other, np.array([[True, False, False, True]]))
    found = mutated(problem.present[None, :], problem, struck, problem.exact[None, :])
    again = mutated(two.present[None, :], two, struck[:, :2], two.exact[None, :])

    assert shown(children) == [[1, 1, 3, 3], [2, 1, 2, 4]]
    assert (shown(found), shown(again)) == ([[1, 4, 4, 3]], [[1, 2, 2]])
    assert shown(reordered(genes([3, 1, 3, 2, 1, 3, 0, 2]), "flat")) == [[3, 3, 3, 1, 1, 2, 2, 0]]
    assert shown(reordered(genes([3, 1, 3, 2], [1, 3, 2, 3]), "aligned")) == [[1, 2, 3, 3]] * 2


def test_a_waiting_job_gets_its_minimum_then_what_its_limit_allows() -> None:
    for slots in (1, 2, 3, 4):
        problem = a_problem(present=[0] * slots, most=[4])
        found = filled(problem.present[None, :], problem, np.full((1, 1), 1000.0))
        assert shown(found) == [[1] * slots]
    endless = a_problem(present=[0, 0], most=[2], left=[float("inf")])
    assert shown(filled(genes([0, 0]), endless, np.array([[np.inf]]))) == [[1, 1]]


# --- properties of the operators

MANY = 5
SIZE = settings(max_examples=examples(60), deadline=None)
Step = Callable[[Genes, PaperProblem, Generator], Genes]


def refresh(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    return refreshed(found, problem, fill_costs(problem, len(found), rng))


def crossover(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    children = within_limits(crossed(found, len(found), rng), problem)
    return filled(children, problem, fill_costs(problem, len(children), rng))


def mutation(found: Genes, problem: PaperProblem, rng: Generator) -> Genes:
    struck = rng.random((len(found), len(problem.jobs))) < 0.4
    return mutated(found, problem, struck, fill_costs(problem, len(found), rng))


STEPS: dict[str, Step] = {
    "refresh": refresh,
    "crossover": crossover,
    "mutation": mutation,
    "flat": lambda found, _problem, _rng: reordered(found, "flat"),
    "aligned": lambda found, _problem, _rng: reordered(found, "aligned"),
}


@pytest.mark.parametrize("step", STEPS)
@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_an_operator_makes_full_schedules_within_limits(
    step: str, problem: PaperProblem, seed: int
) -> None:
    rng = default_rng(seed)
    parents = refresh(random_schedules(problem, MANY, rng), problem, rng)

    children = STEPS[step](parents, problem, rng)

    # No slot is lost, and each has one gene.
    assert children.shape == (MANY * (2 if step == "crossover" else 1), len(problem.slots))
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
def test_crossover_takes_every_gene_from_its_parents_and_reorder_only_moves(
    problem: PaperProblem, seed: int
) -> None:
    parents, jobs = random_schedules(problem, MANY, default_rng(seed)), len(problem.jobs)

    children = crossed(parents, MANY, default_rng(seed))

    for one, other in zip(children[:MANY], children[MANY:], strict=True):
        pairs = np.sort(np.stack([one, other]), axis=0)
        assert any(
            (pairs == np.sort(np.stack([a, b]), axis=0)).all() for a in parents for b in parents
        )
    for how in ("flat", "aligned"):
        moved = reordered(parents, how)
        assert (counts_of(moved, jobs) == counts_of(parents, jobs)).all()
        changes = (moved[:, 1:] != moved[:, :-1]).sum(axis=1)
        assert changes.tolist() == [len(set(row)) - 1 for row in moved.tolist()]


def test_without_jobs_every_slot_is_idle() -> None:
    problem, rng = a_problem(present=[0, 0], most=[]), default_rng(0)

    assert idle(refresh(random_schedules(problem, 3, rng), problem, rng)) == 6


# --- scores


def scores(problem: PaperProblem, candidates: Genes, **options: object) -> list[float]:
    scorer = scorer_for(problem, OnesPaperOptions(**{**IMPROVED, **options}))  # type: ignore[arg-type]  # any
    found = scorer.matrix(candidates) @ scorer.weights(mean_draw(problem))
    return [float(value) for value in found[:, 0]]


def test_read_literally_leaving_a_job_out_is_a_gain() -> None:
    rates = [[1.0, 1.8, 2.4]] * 3
    problem = a_problem(present=[0, 0, 0], most=[3, 3, 3], rates=rates, left=[100.0, 100.0, 300.0])
    candidates = genes([1, 1, 2], [1, 2, 3])

    running, all_jobs = (scores(problem, candidates, score=how) for how in ("running", "all"))

    assert running[0] > running[1]
    assert all_jobs[0] < all_jobs[1]


def test_changes_and_stops_of_running_jobs_cost() -> None:
    problem = a_problem(present=[1, 2, 2], most=[2, 2], rates=[[1.0, 1.05]] * 2)
    candidates = genes([1, 2, 2], [1, 1, 2])
    runs, waits = (a_problem(present=[job], most=[1, 1]) for job in (1, 0))

    charged, free = (scores(problem, candidates, charge=charge) for charge in (True, False))

    assert charged[0] > charged[1]
    assert free[0] == pytest.approx(free[1])
    assert scores(runs, genes([0]))[0] < 0.0
    assert scores(waits, genes([0])) == [0.0]


def test_only_the_flat_reading_scores_nodes_and_moves() -> None:
    problem = a_problem(present=[1, 1, 0, 0, 0, 0], most=[2], spread=0.5)
    candidates = genes([1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0])

    flat, aligned = (scores(problem, candidates, reorder=how) for how in ("flat", "aligned"))

    assert flat[0] > flat[1] > flat[2]  # unchanged, moved, moved and over two nodes
    assert len(set(aligned)) == 1


def test_short_jobs_are_worth_more() -> None:
    problem = a_problem(present=[0], most=[1, 1], left=[100.0, 10_000.0])

    short, long = scores(problem, genes([1], [2]))

    assert short > 2.0 * long


# --- progress and selection


def test_draws_have_the_mean_progress_and_known_work_is_not_drawn() -> None:
    problem = a_problem(present=[1, 2], most=[1, 1], left=[123.0, NAN])

    drawn = draws(problem, default_rng(0), 20_000)
    left = work_left(problem, drawn[:, :50])

    assert drawn.mean(axis=1) == pytest.approx(mean_draw(problem)[:, 0], abs=0.01)
    assert ((drawn > 0) & (drawn < 1)).all()
    assert (set(left[0]), len(set(left[1]))) == ({123.0}, 50)


def test_draws_fill_equal_candidates_differently() -> None:
    problem = a_problem(present=[1, 2, 0, 0], most=[3, 3], left=[NAN] * 2,
                        rates=[[1.0, 1.5, 1.8]] * 2)  # fmt: skip
    schedules = genes(*[[1, 2, 0, 0]] * 30)

    drawn = fill_costs(problem, 30, default_rng(0))

    assert len({tuple(row) for row in shown(filled(schedules, problem, drawn))}) == 2


def winners(many: int, rho: str, selection: str) -> list[tuple[int, ...]]:
    """Return the survivors of 40 candidates for 20 seeds."""
    problem = a_problem(present=[0] * 4, most=[4, 4, 4], left=[NAN] * 3,
                        rates=[[1.0, 1.6, 2.0, 2.2]] * 3)  # fmt: skip
    candidates = default_rng(1).integers(-1, 3, (40, 4)).astype(np.int16)
    options = OnesPaperOptions(**{**IMPROVED, "rho": rho, "selection": selection})
    scorer = scorer_for(problem, options)
    return [
        tuple(selected(scorer, candidates, many, default_rng(seed))[0].tolist())
        for seed in range(20)
    ]


@pytest.mark.parametrize("rho", ["mean", "drawn"])
@pytest.mark.parametrize("selection", ["best", "sampled"])
def test_k_different_candidates_survive_and_only_draws_make_selections_differ(
    rho: str, selection: str
) -> None:
    found = winners(8, rho, selection)

    assert all(len(rows) == len(set(rows)) == 8 for rows in found)
    assert (len(set(found)) > 1) == (rho != "mean")


def test_rounds_of_algorithm_1_differ_from_one_draw() -> None:
    assert winners(8, "drawn", "best")[3] != winners(8, "drawn", "sampled")[3]
    assert winners(8, "mean", "best") == winners(8, "mean", "sampled")
