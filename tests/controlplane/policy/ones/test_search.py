"""The population: never worse than what anybody could have said at once."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, default_rng

from controlplane.policy.api import EpochSeen, JobView
from controlplane.policy.ones.genome import Candidate, filled, lowest, score
from controlplane.policy.ones.options import OnesOptions
from controlplane.policy.ones.problem import Problem
from controlplane.policy.ones.search import Search
from schemas.ids import JobId, Seconds, SlotId
from tests.support.builders import S0, S1, T0, T1, A, B, job_view
from tests.support.views import problem_of, problems, row_of, view_of

OPTIONS = OnesOptions(patience=3)


def unpacked(problem: Problem, levels: np.ndarray) -> Candidate | None:
    return score(problem, levels, np.zeros(len(levels), dtype=np.bool_))


def facing(problem: Problem, options: OnesOptions = OPTIONS) -> Search:
    search = Search(options)
    search.face(problem)
    return search


def fitness(search: Search) -> float:
    assert search.best is not None
    return search.best.fitness


def a_job(job: JobId, *on: SlotId, epoch: int = 1) -> JobView:
    """1 to 4 slots."""
    view = job_view(job, slots=(1, 4), epoch=epoch)
    return msgspec.structs.replace(view, running_on=dict.fromkeys(on, 16))


# --- whatever the problem


@settings(max_examples=40, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000), generations=st.integers(0, 3))
def test_the_best_is_never_worse_than_the_schedule_in_force_or_than_greedy(
    problem: Problem, seed: int, generations: int
) -> None:
    search, rng = facing(problem), default_rng(seed)
    for _ in range(generations):
        search.evolve(rng)

    greedy = unpacked(problem, filled(problem, lowest(problem)))
    assert search.incumbent is not None
    assert fitness(search) >= search.incumbent.fitness - 1e-9
    assert greedy is not None
    assert fitness(search) >= greedy.fitness - 1e-9


@settings(max_examples=25, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_generations_never_lose_the_best_and_hold_different_candidates_in_order(
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
        before = fitness(search)


# --- by example


def crowded(version: int = 1, *more: JobView) -> Problem:
    view = view_of(row_of(2, 2), a_job(A, S0, T0), a_job(B, S1), *more, version=version)
    return problem_of(view)


def test_a_schedule_in_force_that_nothing_beats_stays() -> None:
    """Its job would grow onto another node, where it was measured to be slow."""
    near, far = (
        (1.0, EpochSeen(job=B, family="", slots=2, nodes=nodes, global_batch=64,
                        samples_per_s=speed, whole=True))
        for nodes, speed in [(1, 1800.0), (2, 10.0)]
    )  # fmt: skip
    alone = (1.0, EpochSeen(job=B, family="", slots=1, nodes=1, global_batch=64,
                            samples_per_s=1000.0, whole=True))  # fmt: skip
    kept = msgspec.structs.replace(a_job(B, T1), movable=False)
    problem = problem_of(view_of(row_of(1, 2), a_job(A, S0), kept), news=[near, far, alone])

    search = facing(problem)

    assert filled(problem, problem.present).tolist() == [2]
    assert search.best is not None
    assert search.best.levels.tolist() == [1]


def test_nobody_is_stopped_before_a_little_thought_was_given() -> None:
    """A short job arrives where a long one has the only slot."""
    long = msgspec.structs.replace(a_job(A, S0), stop_samples=10**9)
    short = msgspec.structs.replace(a_job(B), stop_samples=64, epoch=0)
    measured = (1.0, EpochSeen(job=B, family="", slots=1, nodes=1, global_batch=64,
                               samples_per_s=640.0, whole=True))  # fmt: skip
    search = facing(problem_of(view_of(row_of(1), long, short), news=[measured]))
    at_once = search.chosen

    search.evolve(default_rng(0))
    search.evolve(default_rng(1))

    assert at_once is not None
    assert search.chosen is not None
    assert (at_once.levels.tolist(), search.chosen.levels.tolist()) == ([1, 0], [0, 1])


def test_a_search_rests_after_so_many_generations_without_progress() -> None:
    search, rng = facing(crowded()), default_rng(0)
    while not search.resting:
        better = search.evolve(rng)
        last = search.generations if better else 0
    rested_at = search.generations

    assert rested_at >= last + OPTIONS.patience
    assert not search.evolve(rng)
    assert search.generations == rested_at


def test_a_search_with_nothing_to_decide_rests_at_once() -> None:
    search = facing(problem_of(view_of(row_of(2))))

    assert not search.evolve(default_rng(0))
    assert search.resting
    assert search.best is not None
    assert search.best.placed == ()


def test_a_view_with_something_new_wakes_a_search_and_another_does_not() -> None:
    search, rng = facing(crowded()), default_rng(0)
    while not search.resting:
        search.evolve(rng)

    search.face(crowded(2))
    assert search.resting
    search.face(crowded(3, a_job(JobId("late-9"), epoch=0)))
    assert not search.resting


def test_a_job_that_ended_leaves_its_slots_to_others() -> None:
    search = facing(crowded())
    search.evolve(default_rng(0))

    search.face(problem_of(view_of(row_of(2, 2), a_job(B, S1), version=2)))

    assert search.best is not None
    assert len(search.best.placed[0]) == 2  # growth is at most twofold


def test_a_small_budget_is_part_of_a_larger_one() -> None:
    problem = crowded()
    whole, parts = facing(problem), facing(problem)
    one, other = default_rng(7), default_rng(7)
    whole.evolve(one)

    while parts.generations == 0:
        parts.breed(other)

    assert [c.key for c in parts.population] == [c.key for c in whole.population]


# --- against every schedule that there is


def tiny(rng: Generator) -> Problem:
    """Up to 4 jobs that waited or ran on up to 5 slots of 1 to 3 nodes, of measured families."""
    nodes = [(5,), (2, 3), (4,), (2, 2), (1, 2, 2), (3,)][rng.integers(6)]
    slots = [slot.slot for slot in row_of(*nodes)]
    free = [slots[place] for place in rng.permutation(len(slots))]
    jobs = []
    for number in range(1, 2 + int(rng.integers(4))):
        size = int(rng.integers(0, 1 + min(3, len(free))))
        held, free = free[:size], free[size:]
        jobs.append(
            msgspec.structs.replace(
                job_view(JobId(f"j-{number}"), at=float(rng.integers(9)), slots=(1, 5)),
                family="fg"[rng.integers(2)],
                running_on=dict.fromkeys(held, 64 // max(1, size)),
                epoch=int(rng.integers(2)) or int(bool(size)),
                epoch_at=Seconds(60.0),
                moved_at=Seconds([0.0, 99.0][int(rng.random() < 0.2)]),
                batch_limit=256,
                local_limit=256,
                stop_samples=int(10 ** rng.uniform(3, 6)),
                noise_scale=float(10 ** rng.uniform(1, 4)),
                ran_s=float(rng.uniform(0, 500)),
                start_s=float(rng.uniform(1, 15)),
            )
        )
    news = [
        (1.0, EpochSeen(job=JobId("old-9"), family=family, slots=many, nodes=1, global_batch=64,
                        samples_per_s=float(pace * many**power), whole=True))
        for family in "fg"
        for pace, power in [(10 ** rng.uniform(1, 3), rng.uniform(-0.3, 1.0))]
        for many in (1, 2, 3)
    ]  # fmt: skip
    return problem_of(view_of(row_of(*nodes), *jobs), news=news)


def optimum(problem: Problem) -> float:
    """The best fitness of all levels of all jobs, with every choice of who is brought together."""
    allowed = [np.flatnonzero(np.isfinite(row)) for row in problem.worth]
    spread = [
        bool(c.now) and not c.gated
        and len({int(problem.node_of[s]) for s in c.now}) > -(-len(c.now) // problem.widest)
        for c in problem.cases
    ]  # fmt: skip
    best = -np.inf
    for chosen in itertools.product(*allowed):
        levels = np.array(chosen, dtype=np.int64)
        if problem.sizes[np.arange(len(levels)), levels].sum() > problem.capacity:
            continue
        may = [
            (False, True) if apart and level == now else (False,)
            for apart, level, now in zip(spread, levels, problem.present, strict=True)
        ]
        for packed in itertools.product(*may):
            found = score(problem, levels, np.array(packed, dtype=np.bool_))
            best = max(best, found.fitness if found else -np.inf)
    return best


def shares(instances: int) -> list[tuple[float, float]]:
    """Of the optimum, what the search and greedy reach; one entry for each instance."""
    found = []
    for seed in range(instances):
        problem = tiny(default_rng(seed))
        search, rng = facing(problem, OnesOptions()), default_rng(seed)
        for _ in range(40):
            before = fitness(search)
            search.evolve(rng)
            assert fitness(search) >= before - 1e-9
        greedy = unpacked(problem, filled(problem, lowest(problem)))
        best = optimum(problem)
        assert greedy is not None
        assert best >= fitness(search) - 1e-9
        found.append((fitness(search) / best, greedy.fitness / best))
    return found


def test_on_tiny_clusters_the_search_finds_nearly_the_best_of_all_schedules() -> None:
    found = shares(150)

    good = [share >= 0.97 for share, _ in found]
    assert sum(good) >= 0.95 * len(good)
    assert all(share >= greedy - 1e-9 for share, greedy in found)


def test_the_sizes_that_were_found_for_one_view_are_carried_to_the_next() -> None:
    found = 0
    for seed in range(120):
        problem = tiny(default_rng(seed))
        search, rng, at_once = facing(problem), default_rng(seed), fitness(facing(problem))
        for _ in range(5):
            search.evolve(rng)
        best = search.best
        assert best is not None
        if best.fitness > at_once + 1e-9:
            found += 1
            search.face(tiny(default_rng(seed)))
            assert fitness(search) >= best.fitness - 1e-9
    assert found
