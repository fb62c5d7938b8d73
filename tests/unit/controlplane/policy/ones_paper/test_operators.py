"""Whatever the operators are given, what leaves them is a schedule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from controlplane.policy.ones_paper.candidate_scores import all_within, counts_of, local_batches
from controlplane.policy.ones_paper.evolution import (
    crossed,
    fill_costs,
    filled,
    mutated,
    preempted,
    random_schedules,
    refreshed,
    reordered,
    with_new_jobs,
    within_limits,
)
from controlplane.policy.ones_paper.problem import IDLE, Genes, PaperProblem
from tests.support.sizes import examples
from tests.unit.controlplane.policy.ones_paper.problems import (
    a_problem,
    any_problem,
    genes,
    idle,
    shown,
)

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
    struck = preempted(found, problem, 0.4, rng)
    return mutated(found, problem, struck, left(problem, len(found), rng))


def flat(found: Genes, _problem: PaperProblem, _rng: Generator) -> Genes:
    return reordered(found, "flat")


def aligned(found: Genes, _problem: PaperProblem, _rng: Generator) -> Genes:
    return reordered(found, "aligned")


STEPS: tuple[Step, ...] = (refresh, crossover, mutation, flat, aligned)


@pytest.mark.parametrize("step", STEPS)
@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_an_operator_makes_schedules_within_limits_with_one_job_on_each_slot(
    step: Step, problem: PaperProblem, seed: int
) -> None:
    rng = default_rng(seed)
    parents = refresh(random_schedules(problem, MANY, rng), problem, rng)

    children = step(parents, problem, rng)

    assert children.shape[1] == len(problem.slots)  # no slot is lost, and each has one gene
    assert len(children) == MANY * (2 if step is crossover else 1)
    assert (children >= IDLE).all()
    assert (children < len(problem.jobs)).all()
    assert all_within(children, problem).all()
    batches = local_batches(children, problem)
    assert ((batches > 0) == (children != IDLE)).all()
    for job, limit in enumerate(problem.limits):
        assert (np.where(children == job, batches, 0).sum(axis=1) <= limit).all()


@pytest.mark.parametrize("step", STEPS)
@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_no_slot_is_idle_that_any_job_can_use(step: Step, problem: PaperProblem, seed: int) -> None:
    rng = default_rng(seed)
    parents = refresh(random_schedules(problem, MANY, rng), problem, rng)

    children = step(parents, problem, rng)

    free = (children == IDLE).sum(axis=1)[:, None]
    counts = counts_of(children, len(problem.jobs))
    could_grow = (counts > 0) & (counts < problem.most) & (free > 0)
    could_start = (counts == 0) & (problem.least <= problem.most) & (free >= problem.least)
    assert not could_grow.any()
    assert not could_start.any()


@SIZE
@given(problem=any_problem(), seed=st.integers(0, 99))
def test_new_jobs_are_served_before_all_others(problem: PaperProblem, seed: int) -> None:
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


def test_without_any_job_every_slot_is_idle() -> None:
    problem = a_problem(present=[0, 0], most=[])
    rng = default_rng(0)

    found = refresh(random_schedules(problem, 3, rng), problem, rng)

    assert idle(found) == 6


def test_a_rate_of_zero_preempts_nobody_and_a_rate_of_one_everybody() -> None:
    problem = a_problem(present=[1, 2], most=[1, 1])
    schedule = genes([1, 2])

    assert not preempted(schedule, problem, 0.0, default_rng(0)).any()
    assert preempted(schedule, problem, 1.0, default_rng(0)).all()


def test_draws_of_progress_fill_equal_candidates_in_different_ways() -> None:
    problem = a_problem(present=[1, 2, 0, 0], most=[3, 3], left=[float("nan")] * 2,
                        rates=[[1.0, 1.5, 1.8]] * 2)  # fmt: skip
    schedules = genes(*[[1, 2, 0, 0]] * 30)

    drawn = fill_costs(problem, 30, default_rng(0))

    assert len({tuple(row) for row in shown(filled(schedules, problem, drawn))}) == 2


def test_a_job_whose_remaining_work_is_infinite_still_fills_the_cluster() -> None:
    problem = a_problem(present=[0, 0], most=[2], left=[float("inf")])

    found = filled(genes([0, 0]), problem, np.array([[np.inf]]))

    assert shown(found) == [[1, 1]]
