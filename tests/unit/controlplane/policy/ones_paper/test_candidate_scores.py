"""What candidates are worth under each reading, and which of them go on."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import default_rng

from controlplane.policy.ones_paper.candidate_scores import (
    draws,
    mean_draw,
    ranks,
    scorer_for,
    selected,
    work_left,
)
from controlplane.policy.ones_paper.problem import Genes, PaperProblem
from controlplane.policy.options import OnesPaperOptions
from tests.unit.controlplane.policy.ones_paper.problems import a_problem, genes

NAN = float("nan")
THREE = [[1.0, 1.8, 2.4]] * 3


def scores(problem: PaperProblem, candidates: Genes, options: OnesPaperOptions) -> list[float]:
    scorer = scorer_for(problem, options)
    found = scorer.matrix(candidates) @ scorer.weights(mean_draw(problem))
    return [float(value) for value in found[:, 0]]


def test_read_literally_a_schedule_gains_by_leaving_a_job_out() -> None:
    problem = a_problem(present=[0, 0, 0], most=[3, 3, 3], rates=THREE, left=[100.0, 100.0, 300.0])
    candidates = genes([1, 1, 2], [1, 2, 3])

    running = scores(problem, candidates, OnesPaperOptions(score="running"))
    all_jobs = scores(problem, candidates, OnesPaperOptions(score="all"))

    assert running[0] > running[1]
    assert all_jobs[0] < all_jobs[1]


def test_a_change_must_pay_for_its_stall_unless_changes_are_taken_to_cost_nothing() -> None:
    problem = a_problem(present=[1, 2, 2], most=[2, 2], rates=[[1.0, 1.05]] * 2)
    stays, changes = genes([1, 2, 2]), genes([1, 1, 2])

    charged = scores(problem, np.concatenate([stays, changes]), OnesPaperOptions())
    free = scores(problem, np.concatenate([stays, changes]), OnesPaperOptions(charge=False))

    assert charged[0] > charged[1]
    assert free[0] == pytest.approx(free[1])


def test_to_stop_a_running_job_is_worth_less_than_to_let_one_wait() -> None:
    runs = a_problem(present=[1], most=[1, 1])
    waits = a_problem(present=[0], most=[1, 1])
    nobody = genes([0])

    assert scores(runs, nobody, OnesPaperOptions())[0] < 0.0
    assert scores(waits, nobody, OnesPaperOptions()) == [0.0]


def test_only_the_flat_reading_looks_at_nodes_and_at_which_slots_they_are() -> None:
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


def test_the_mean_of_draws_is_the_mean_progress() -> None:
    problem = a_problem(present=[1, 2], most=[1, 1])

    drawn = draws(problem, default_rng(0), 20_000)

    assert drawn.mean(axis=1) == pytest.approx(mean_draw(problem)[:, 0], abs=0.01)
    assert ((drawn > 0) & (drawn < 1)).all()


def test_what_is_known_otherwise_is_not_drawn() -> None:
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
def test_k_different_candidates_go_on_whatever_is_drawn(rho: str, selection: str) -> None:
    problem, candidates = many_candidates()
    options = OnesPaperOptions(rho=rho, selection=selection)  # type: ignore[arg-type]  # both listed

    rows, _ = selected(scorer_for(problem, options), candidates, 10, default_rng(0))

    assert len(rows) == len(set(rows.tolist())) == 10


def test_by_the_mean_every_search_selects_the_same_and_by_draws_it_does_not() -> None:
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


def test_the_rounds_of_algorithm_1_are_not_the_best_of_one_draw() -> None:
    problem, candidates = many_candidates()
    best = scorer_for(problem, OnesPaperOptions(rho="generation"))
    rounds = scorer_for(problem, OnesPaperOptions(rho="generation", selection="sampled"))

    one, _ = selected(best, candidates, 8, default_rng(3))
    other, _ = selected(rounds, candidates, 8, default_rng(3))

    assert one.tolist() != other.tolist()


def test_slots_of_a_job_are_numbered() -> None:
    assert ranks(genes([2, 1, 2, 0, 2, 1, 0])).tolist() == [[0, 0, 1, 0, 2, 1, 1]]
