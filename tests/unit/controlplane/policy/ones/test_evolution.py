"""Population of the search: never worse than greedy schedules, and near the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.ones.evolution import (
    Candidate,
    EvolutionarySearch,
    laid_out,
    present,
    refreshed,
    score,
)
from controlplane.policy.ones.greedy import baselines, exchanged, filled
from controlplane.policy.ones.problem import FREE, Problem
from controlplane.policy.options import OnesOptions
from controlplane.prediction import IntArray
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, job_view
from tests.support.sizes import examples
from tests.support.views import pace, problem_of, problems, row_of, surrounded, view_of

OPTIONS = OnesOptions(patience=3, search="evolution")
GREEDY = OnesOptions(search="greedy")
seeds = st.integers(0, 1000)


def facing(problem: Problem, options: OnesOptions = OPTIONS) -> EvolutionarySearch:
    search = EvolutionarySearch(options)
    search.update(problem)
    return search


def fitness(search: EvolutionarySearch) -> float:
    return search.best.fitness


def at_once(problem: Problem, levels: IntArray) -> float:
    """What these levels are worth, laid out from the schedule in force."""
    found = laid_out(problem, present(problem), levels)
    assert found is not None
    return found.fitness


def a_job(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """1 to 4 slots."""
    held = dict.fromkeys(on, 16)
    return job_view(job, slots=(1, 4), **{"epoch": 1, "running_on": held, **changes})


# --- whatever the problem


@settings(max_examples=examples(40), deadline=None)
@given(
    problem=problems(),
    seed=seeds,
    generations=st.integers(0, 3),
    options=st.sampled_from([OPTIONS, GREEDY]),
)
def test_the_best_is_never_worse_than_greedy_or_no_change(
    problem: Problem, seed: int, generations: int, options: OnesOptions
) -> None:
    search, rng = facing(problem, options), default_rng(seed)
    for _ in range(generations):
        search.evolve(rng)

    greedy = filled(problem, problem.lowest)
    assert fitness(search) >= present(problem).fitness - 1e-9
    assert fitness(search) >= at_once(problem, filled(problem, problem.present)) - 1e-9
    assert fitness(search) >= at_once(problem, greedy) - 1e-9
    assert fitness(search) >= at_once(problem, exchanged(problem, greedy)) - 1e-9


@settings(max_examples=examples(40), deadline=None)
@given(problem=problems(), seed=seeds)
def test_after_a_generation_the_best_beats_the_baselines(problem: Problem, seed: int) -> None:
    search = facing(problem)

    search.evolve(default_rng(seed))

    for levels in baselines(problem):
        assert fitness(search) >= at_once(problem, levels) - 1e-9


@settings(max_examples=examples(25), deadline=None)
@given(problem=problems(), seed=seeds)
def test_generations_keep_the_best_and_rank_distinct_candidates(
    problem: Problem, seed: int
) -> None:
    search, rng, before = facing(problem), default_rng(seed), -np.inf
    for _ in range(4):
        search.evolve(rng)

        ranks = [round(candidate.fitness, 9) for candidate in search.population]
        assert fitness(search) >= before - 1e-9
        assert ranks == sorted(ranks, reverse=True)
        assert len({candidate.key for candidate in search.population}) == len(ranks)
        assert len(ranks) <= OPTIONS.population
        assert 0.0 <= search.diversity <= 1.0
        before = fitness(search)


# --- by example


def crowded(version: int = 1, *more: JobView) -> Problem:
    view = view_of(row_of(2, 2), a_job(A, S0, T0), a_job(B, S1), *more, version=version)
    return problem_of(view)


def test_the_best_schedule_in_force_stays() -> None:
    """Its job would grow onto another node, where it was measured to be slow."""
    near, far = (
        (1.0, EpochSeen(job=B, family="", slots=2, nodes=nodes, global_batch=64,
                        samples_per_s=speed, whole=True))
        for nodes, speed in [(1, 1800.0), (2, 10.0)]
    )  # fmt: skip
    kept = a_job(B, T1, movable=False)
    view = view_of(row_of(1, 2), a_job(A, S0), kept)
    problem = problem_of(view, events=[near, far, *pace("", 1000.0)])

    search = facing(problem)

    assert filled(problem, problem.present).tolist() == [2]
    assert search.best.levels.tolist() == [1]


def test_a_search_converges_after_generations_without_progress() -> None:
    search, rng = facing(crowded()), default_rng(0)
    while not search.converged:
        better = search.evolve(rng)
        last = search.generations if better else 0
    rested_at = search.generations

    assert rested_at >= last + OPTIONS.patience
    assert not search.evolve(rng)
    assert search.generations == rested_at


def test_a_search_without_jobs_converges_at_once() -> None:
    search = facing(problem_of(view_of(row_of(2))))

    assert not search.evolve(default_rng(0))
    assert search.converged
    assert search.best.owner.tolist() == [FREE, FREE]


def test_a_changed_problem_restarts_the_search() -> None:
    search, rng = facing(crowded()), default_rng(0)
    while not search.converged:
        search.evolve(rng)

    search.update(crowded(2))
    assert search.converged
    search.update(crowded(3, a_job(JobId("late-9"), epoch=0)))
    assert not search.converged


def test_other_jobs_get_the_slots_of_an_ended_job() -> None:
    search = facing(crowded())
    search.evolve(default_rng(0))

    search.update(problem_of(view_of(row_of(2, 2), a_job(B, S1), version=2)))

    assert len(search.best.slots(0)) == 2  # growth is at most twofold


def test_single_steps_give_the_same_generation() -> None:
    problem = crowded()
    whole, parts = facing(problem), facing(problem)
    one, other = default_rng(7), default_rng(7)
    whole.evolve(one)

    while parts.generations == 0:
        parts.advance(other)

    assert [c.key for c in parts.population] == [c.key for c in whole.population]


# --- greedy


def test_greedy_converges_at_once_without_chance() -> None:
    problem = typed()
    search = facing(problem, GREEDY)
    before = [candidate.key for candidate in search.population]

    better = search.evolve(default_rng(0))

    assert (better, search.converged, search.generations) == (False, True, 0)
    assert [candidate.key for candidate in search.population] == before


# --- diversity


def of_levels(*levels: list[int]) -> list[Candidate]:
    """Candidates of these levels, on no slots."""
    nothing = np.zeros(0)
    return [
        Candidate(np.array(row, dtype=np.int64), nothing.astype(np.int64), nothing, 0.0, 0)
        for row in levels
    ]


@pytest.mark.parametrize(
    ("levels", "diversity"),
    [
        ([[1, 2], [1, 2], [1, 2]], 0.0),
        ([[1, 2], [2, 3], [3, 4]], 1.0),
        ([[1, 2], [1, 3]], 0.5),
        ([[1, 2], [1, 2], [3, 4]], 2 / 3),
        ([[1, 2]], 0.0),
        ([[], []], 0.0),
        ([], 0.0),
    ],
    ids=["identical", "all different", "half", "one of three", "one", "no jobs", "none"],
)
def test_diversity_is_the_mean_share_of_jobs_in_which_two_candidates_differ(
    levels: list[list[int]], diversity: float
) -> None:
    search = EvolutionarySearch(OPTIONS)
    search.population = of_levels(*levels)

    assert search.diversity == pytest.approx(diversity)


# --- places, which greedy does not see


def single(job: JobId, *on: SlotId, **changes: Any) -> JobView:
    """One slot, a batch of 64, ten thousand seconds to go."""
    given = {"epoch": 1, "family": "f", "stop_samples": 1_000_000}
    return job_view(job, **{**given, "running_on": dict.fromkeys(on, 64), **changes})


def posed(*jobs: JobView, nodes: tuple[int, ...], speeds: tuple[float, ...] = (100.0,),
          options: OnesOptions | None = None, **places: Any) -> Problem:  # fmt: skip
    view = view_of(row_of(*nodes), *jobs)
    return surrounded(problem_of(view, events=pace("f", *speeds), options=options), **places)


def typed() -> Problem:
    """A job on the slower of two GPUs."""
    return posed(single(A, T0), nodes=(1, 1), types=(0, 1), slow=[(1.0, 3.0)])


def nodes_by_job(problem: Problem, search: EvolutionarySearch) -> list[list[int]]:
    """Return the node of each slot of each job in the best schedule."""
    return [problem.node_of[list(search.best.slots(row))].tolist() for row in problem.rows]


@pytest.mark.parametrize(
    ("problem", "greedy", "best", "gain"),
    [
        (typed(), [[1]], ([[0]],), lambda p: (3.0 * p.move_factor[0]) ** 0.8),
        (  # greedy gives the fast GPU to the first job
            posed(single(A), single(B), nodes=(1, 1), types=(0, 1), slow=[(1, 1), (1, 3)]),
            [[0], [1]], ([[1], [0]],), lambda _: 2.0 / (1.0 + 3.0**-0.8),
        ),
        (
            posed(
                single(A, S0), single(B, T0), nodes=(1, 1, 1),
                types=(0, 1, 1), slow=[(1.0, 1.0), (1.0, 3.0)],
            ),
            [[0], [1]], ([[1], [0]], [[2], [0]]), None,
        ),
        (
            posed(
                single(A, slots=(1, 2), running_on={S0: 32, T0: 32}), single(B, S1),
                nodes=(2, 2), speeds=(100.0, 200.0),
            ),
            [[0, 1], [0]], ([[1, 1], [0]],), None,
        ),
    ],
    ids=[
        "moves a job to faster GPUs",
        "gives the fast GPU to the job that gains", "exchanges places over a free slot",
        "brings a scattered job together",
    ],
)  # fmt: skip
def test_evolution_finds_better_places_than_greedy(
    problem: Problem,
    greedy: list[list[int]],
    best: tuple[list[list[int]], ...],
    gain: Callable[[Problem], float] | None,
) -> None:
    plain, search = facing(problem, GREEDY), facing(problem, OnesOptions(search="evolution"))
    rng = default_rng(0)
    for _ in range(20):
        search.evolve(rng)

    assert nodes_by_job(problem, plain) == greedy
    assert nodes_by_job(problem, search) in best
    assert fitness(search) > fitness(plain)
    if gain is not None:
        assert fitness(search) == pytest.approx(fitness(plain) * gain(problem))


# --- against every schedule that there is


def tiny(rng: Generator, *nodes: int) -> Problem:
    """Up to 4 jobs that wait or run on these nodes, of measured families; some moved just now."""
    free = [slot.slot for slot in row_of(*nodes)]
    free = [free[place] for place in rng.permutation(len(free))]
    jobs = []
    for number in range(1, 2 + int(rng.integers(4))):
        size = int(rng.integers(0, 1 + min(3, len(free))))
        held, free = free[:size], free[size:]
        jobs.append(
            job_view(
                JobId(f"j-{number}"), at=float(rng.integers(9)), slots=(1, 5),
                family="fg"[rng.integers(2)], running_on=dict.fromkeys(held, 64 // max(1, size)),
                epoch=int(rng.integers(2)) or int(bool(size)), epoch_at=Seconds(60.0),
                moved_at=Seconds([0.0, 99.0][int(rng.random() < 0.2)]), batch_size=64,
                batch_limit=256, local_limit=256, stop_samples=int(10 ** rng.uniform(3, 6)),
                noise_scale=float(10 ** rng.uniform(1, 4)), ran_s=float(rng.uniform(0, 500)),
                start_s=float(rng.uniform(1, 15)),
            )
        )  # fmt: skip
    events = [
        event
        for family in "fg"
        for speed, power in [(10 ** rng.uniform(1, 3), rng.uniform(-0.3, 1.0))]
        for event in pace(family, *(float(speed * many**power) for many in (1, 2, 3)))
    ]
    options = OnesOptions(search="evolution")
    return problem_of(view_of(row_of(*nodes), *jobs), events=events, options=options)


def optimum(problem: Problem) -> float:
    """The best fitness of all levels of all jobs, where one place is as good as another."""
    allowed = [np.flatnonzero(row) for row in problem.allowed]
    best = -np.inf
    for chosen in itertools.product(*allowed):
        levels = np.array(chosen, dtype=np.int64)
        if problem.sizes[problem.rows, levels].sum() <= problem.capacity:
            best = max(best, float(problem.value[problem.rows, levels].sum()))
    return best


def best_place(problem: Problem) -> float:
    """The best fitness of all levels of all jobs on all nodes, of those that lay-out may choose."""
    best = -np.inf
    for chosen in itertools.product(*(_options(problem, row) for row in problem.rows.tolist())):
        owner = _dealt(problem, [counts for _, counts in chosen])
        if owner is not None and not problem.has_barred_move(owner):
            levels = np.array([level for level, _ in chosen], dtype=np.int64)
            best = max(best, score(problem, levels, owner).fitness)
    return best


def _options(problem: Problem, row: int) -> list[tuple[int, tuple[int, ...]]]:
    """Levels, and slots on each node; who may not move keeps its slots, or a part of them."""
    rooms = [range(1 + len(slots)) for slots in problem.slots_on]
    own = [int((problem.owner[slots] == row).sum()) for slots in problem.slots_on]
    found = []
    for level in np.flatnonzero(problem.allowed[row]).tolist():
        for counts in itertools.product(*rooms):
            pairs = list(zip(counts, own, strict=True))
            inside = all(m <= h for m, h in pairs) or all(m >= h for m, h in pairs)
            free = problem.free_to_move[row] or not any(own) or inside
            if free and sum(counts) == problem.sizes[row, level]:
                found.append((level, counts))
    return found


def _dealt(problem: Problem, chosen: list[tuple[int, ...]]) -> IntArray | None:
    """Slots for so many on each node, their own first; None if there are not enough."""
    owner = np.minimum(problem.owner, FREE)
    for change_factor in (True, False):
        for row, counts in enumerate(chosen):
            for slots, many in zip(problem.slots_on, counts, strict=True):
                more = many - int((owner[slots] == row).sum())
                free = slots[owner[slots] == FREE]
                if change_factor:
                    free = free[problem.owner[free] == row]
                elif more > len(free):
                    return None
                owner[free[:more]] = row
    return owner


def reached(problem: Problem, best: float, seed: int) -> tuple[float, float]:
    """Return the shares of the best known fitness that forty generations and greedy reach.

    The enumeration deals slots of a node in one order, so the search may find a better schedule.
    """
    search, rng = facing(problem, OnesOptions(search="evolution")), default_rng(seed)
    for _ in range(40):
        search.evolve(rng)
    greedy = at_once(problem, filled(problem, problem.lowest))
    best = max(best, fitness(search))
    return fitness(search) / best, greedy / best


def worse_places(problem: Problem, rng: Generator) -> Problem:
    """`problem` if the types of two nodes matter."""
    jobs = len(problem.job_rows)
    return surrounded(
        problem,
        types=(0, 1),
        slow=np.column_stack([np.ones(jobs), rng.choice([1.0, 1.5, 3.0], jobs)]).tolist(),
    )


@pytest.mark.slow
def test_the_search_finds_the_optimum_of_small_problems() -> None:
    found = []
    for seed in range(60):
        rng = default_rng(seed)
        problem = tiny(rng, int(rng.integers(3, 7)))
        found.append(reached(problem, optimum(problem), seed))

    assert min(share for share, _ in found) >= 0.999
    assert all(share >= greedy - 1e-9 for share, greedy in found)


@pytest.mark.slow
def test_the_search_beats_greedy_where_places_matter() -> None:
    found = []
    for seed in range(40):
        rng = default_rng(1000 + seed)
        problem = tiny(rng, 2, 2)
        if len(problem.job_rows) <= 3:
            problem = worse_places(problem, rng)
            found.append(reached(problem, best_place(problem), seed))

    shares, greedy = np.array(found).T
    assert shares.mean() >= 0.93
    assert greedy.mean() <= 0.9
    assert (shares > greedy + 0.01).mean() >= 0.3


def test_the_best_sizes_are_refreshed_for_the_next_view() -> None:
    found = 0
    for seed in range(60):
        problem, rng = tiny(default_rng(seed), 2, 3), default_rng(seed)
        search, before = facing(problem), fitness(facing(problem))
        for _ in range(5):
            search.evolve(rng)
        best = search.best
        by_sizes = at_once(problem, refreshed(problem, best.levels))  # places are found anew
        if by_sizes > before + 1e-9:
            found += 1
            search.update(replace(problem))
            assert fitness(search) >= by_sizes - 1e-9
    assert found
