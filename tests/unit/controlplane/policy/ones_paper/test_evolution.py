"""The population over the generations, and where its best candidate puts jobs."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from controlplane.policy.ones_paper.evolution import EvolutionarySearch
from controlplane.policy.options import OnesPaperOptions
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B
from tests.support.views import planned, view_of
from tests.unit.controlplane.policy.ones_paper.problems import (
    SLOTS,
    genes,
    problem_of,
    seen,
    warm_job,
)


def test_there_are_as_many_candidates_as_slots_and_none_twice() -> None:
    problem = problem_of(*(warm_job(JobId(f"j-{number}")) for number in range(8)))
    search = EvolutionarySearch(OnesPaperOptions())
    rng = np.random.default_rng(0)

    search.update(problem, rng)
    for _ in range(3):
        search.evolve(rng)

    assert search.population.shape == (8, 8)
    assert len({row.tobytes() for row in search.population}) == 8
    assert list(search.scores) == sorted(search.scores, reverse=True)


def test_diversity_is_the_share_of_jobs_in_which_two_candidates_differ() -> None:
    problem = problem_of(warm_job(A), warm_job(B), events=(seen(),))
    search = EvolutionarySearch(OnesPaperOptions(population=2))
    search.update(problem, np.random.default_rng(0))
    standing = search._now
    assert standing is not None

    def among(*candidates: list[int]) -> float:
        found = genes(*candidates)
        search._now = dataclasses.replace(standing, genes=found)
        return search.diversity()

    assert among([1, 1, 2], [2, 1, 1]) == 0.0  # the same numbers of slots
    assert among([1, 1, 2], [1, 1, 0]) == 0.5
    assert among([1, 1, 2], [1, 2, 2]) == 1.0


def test_the_schedule_in_force_is_in_the_population_or_not() -> None:
    jobs = [warm_job(JobId(f"j-{place}"), on=1, first=place) for place in range(8)]
    problem = problem_of(*jobs)

    def holds(*, incumbent: bool) -> bool:
        search = EvolutionarySearch(OnesPaperOptions(incumbent=incumbent, charge=False))
        search.update(problem, np.random.default_rng(0))
        return any((row == problem.present).all() for row in search.population)

    assert holds(incumbent=True)
    assert not holds(incumbent=False)


def test_a_generation_is_never_worse_than_the_one_before() -> None:
    jobs = [warm_job(JobId(f"j-{place}"), on=1, first=place) for place in range(5)]
    search, rng = EvolutionarySearch(OnesPaperOptions()), np.random.default_rng(0)
    search.update(problem_of(*jobs, events=(seen(),)), rng)

    best = [float(search.scores[0])]
    for _ in range(5):
        search.evolve(rng)
        best.append(float(search.scores[0]))

    assert best == sorted(best)
    assert best[0] >= search.incumbent()


def test_flat_reorder_puts_jobs_where_the_genome_says_and_the_aligned_one_on_whole_nodes() -> None:
    held = warm_job(A, on=3, moved_at=Seconds(90.0))  # gated
    waits = warm_job(B, epoch=0, samples_done=0)
    wide = msgspec.structs.replace(waits, least=4)
    view = view_of(SLOTS, held, wide)

    def nodes(reorder: str) -> int:
        options = {"reorder": reorder, "gate": "job"}
        plan = planned("ones-paper", view, options=options)
        return len({slot.split("/")[0] for slot in plan.local_batch[B]})

    assert nodes("aligned") == 1
    assert nodes("flat") == 2
