"""The policy as a whole: what it learns when, and what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, EpochSeen, JobEnded, JobView, StepsSeen
from controlplane.policy.ones_paper.policy import EvolutionarySearch, OnesPaper
from controlplane.policy.options import OnesPaperOptions
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B, job_view
from tests.support.views import NOW, planned, view_of
from tests.unit.controlplane.policy.ones_paper.problems import (
    SLOTS,
    genes,
    problem_of,
    seen,
    warm_job,
)


def a_job(job: JobId = A) -> JobView:
    view = job_view(job, slots=(1, 8), family="f", batch_size=64, batch_limit=1024, local_limit=256)
    return msgspec.structs.replace(view, epoch_samples=1000)


def lived(policy: OnesPaper, job: JobId, epochs: int) -> None:
    """The policy hears of a job that finishes after so many epochs."""
    policy.plan(view_of(SLOTS, a_job(job)), Seconds(0.0))
    for epoch in range(1, epochs + 1):
        policy.observe(
            EpochSeen(job=job, family="f", slots=1, nodes=1, global_batch=64, samples_per_s=100.0,
                      whole=True, epoch=epoch, train_loss=2.0 / epoch),
            Seconds(epoch),
        )  # fmt: skip
    policy.observe(
        JobEnded(job=job, family="f", samples_done=1000 * epochs, succeeded=True), Seconds(epochs)
    )


def test_the_progress_model_is_fitted_while_it_thinks_and_never_while_it_answers() -> None:
    policy = OnesPaper()
    view = view_of(SLOTS, a_job(B))
    before = policy._estimates.progress
    lived(policy, A, 12)

    policy.plan(view, NOW)
    assert policy._estimates.progress is before
    policy.improve(view, Budget(steps=1), default_rng(0), NOW)

    assert policy._estimates.progress is not before


def test_an_epoch_counts_the_samples_that_it_trained() -> None:
    policy = OnesPaper()
    policy.plan(view_of(SLOTS, a_job()), Seconds(0.0))
    for epoch, done in [(1, 1000), (2, 1512)]:  # the script left the second one
        policy.observe(
            EpochSeen(job=A, family="f", slots=1, nodes=1, global_batch=64, samples_per_s=1.0,
                      whole=True, epoch=epoch, train_loss=1.0, samples_done=done),
            NOW,
        )  # fmt: skip

    log = policy._estimates.history(A).log
    assert [(epoch, row[2]) for epoch, row in log] == [(1, 1000.0), (2, 1512.0)]


def test_a_job_that_failed_teaches_nothing_about_progress() -> None:
    policy = OnesPaper()
    view = view_of(SLOTS, a_job(B))
    before = policy._estimates.progress
    for epoch in range(1, 5):
        policy.observe(
            EpochSeen(job=A, family="f", slots=1, nodes=1, global_batch=64, samples_per_s=1.0,
                      whole=True, epoch=epoch, train_loss=1.0),
            NOW,
        )  # fmt: skip
    policy.observe(JobEnded(job=A, family="f", samples_done=4000, succeeded=False), NOW)
    policy.improve(view, Budget(generations=1), default_rng(0), NOW)

    assert policy._estimates.progress is before


def test_all_waiting_jobs_start_at_once_when_there_is_room() -> None:
    jobs = [a_job(JobId(f"j-{number}")) for number in range(6)]

    plan = planned("ones-paper", view_of(SLOTS, *jobs))

    assert sorted(plan.local_batch) == sorted(job.job for job in jobs)
    assert {reason.code for reason in plan.reasons.values()} == {"start"}


def test_a_reason_shows_batch_limit_progress_and_utilization() -> None:
    plan = planned("ones-paper", view_of(SLOTS, a_job()))

    reason = plan.reasons[A]
    assert reason.text == "starts on 1 slot: batch 64 of at most 64, 9% done on 1 slot"
    assert reason.numbers.keys() >= {
        "slots_now", "slots_then", "batch_then", "batch_limit", "progress", "samples_left",
        "utilization_s",
    }  # fmt: skip


def test_a_job_that_gets_nothing_is_told_that_others_are_served() -> None:
    jobs = [a_job(JobId(f"j-{number}")) for number in range(9)]

    plan = planned("ones-paper", view_of(SLOTS, *jobs))

    waits = [reason for reason in plan.reasons.values() if reason.code == "waits"]
    assert [reason.text for reason in waits] == [
        "waits: the best schedule that was found gives all slots to other jobs"
    ]


def test_a_search_that_finds_nothing_better_comes_to_rest_and_news_wake_it() -> None:
    policy = OnesPaper(OnesPaperOptions(patience=3))
    view = view_of(SLOTS, a_job())
    rng = default_rng(0)

    asked = 1
    while policy.improve(view, Budget(generations=1), rng, NOW):
        asked += 1
    assert asked <= 10
    steps = StepsSeen(job=A, family="f", group=1, slots=1, nodes=1, global_batch=64, step=1,
                      samples_done=64)  # fmt: skip
    policy.observe(steps, NOW)

    assert policy.improve(view, Budget(steps=1), rng, NOW)


def test_a_generation_is_three_steps() -> None:
    policy = OnesPaper()
    view = view_of(SLOTS, a_job(A), a_job(B))
    rng = default_rng(0)

    generations = []
    for _ in range(6):
        policy.improve(view, Budget(steps=1), rng, NOW)
        generations.append(policy.stats().generations)

    assert generations == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("jobs", [0, 1, 9])
def test_statistics_are_numbers_whatever_there_is(jobs: int) -> None:
    policy = OnesPaper()
    view = view_of(SLOTS, *(a_job(JobId(f"j-{number}")) for number in range(jobs)))

    policy.improve(view, Budget(generations=2), default_rng(0), NOW)
    stats = policy.stats()

    assert stats.best_fitness >= stats.mean_fitness
    assert stats.best_fitness >= stats.incumbent_fitness


def state_of(search: EvolutionarySearch) -> Any:
    return search._now


def test_there_are_as_many_candidates_as_slots_and_none_twice() -> None:
    problem = problem_of(*(warm_job(JobId(f"j-{number}")) for number in range(8)))
    search = EvolutionarySearch(OnesPaperOptions())
    rng = np.random.default_rng(0)

    search.update(problem, rng)
    for _ in range(3):
        search.evolve(rng)

    state = state_of(search)
    assert state.genes.shape == (8, 8)
    assert len({row.tobytes() for row in state.genes}) == 8
    assert list(state.scores) == sorted(state.scores, reverse=True)


def test_diversity_is_the_share_of_jobs_in_which_two_candidates_differ() -> None:
    problem = problem_of(warm_job(A), warm_job(B), events=(seen(),))
    search = EvolutionarySearch(OnesPaperOptions(population=2))
    search.update(problem, np.random.default_rng(0))
    standing = state_of(search)

    def among(*candidates: list[int]) -> float:
        found = genes(*candidates)
        search._now = dataclasses.replace(standing, genes=found)
        return search.diversity()

    assert among([1, 1, 2], [2, 1, 1]) == 0.0  # the same numbers of slots
    assert among([1, 1, 2], [1, 1, 0]) == 0.5
    assert among([1, 1, 2], [1, 2, 2]) == 1.0


def test_the_schedule_in_force_is_in_the_population() -> None:
    jobs = [warm_job(JobId(f"j-{place}"), on=1, first=place) for place in range(8)]
    problem = problem_of(*jobs)
    search = EvolutionarySearch(OnesPaperOptions())
    search.update(problem, np.random.default_rng(0))

    assert any((row == problem.present).all() for row in state_of(search).genes)


def test_a_generation_is_never_worse_than_the_one_before() -> None:
    jobs = [warm_job(JobId(f"j-{place}"), on=1, first=place) for place in range(5)]
    search, rng = EvolutionarySearch(OnesPaperOptions()), np.random.default_rng(0)
    search.update(problem_of(*jobs, events=(seen(),)), rng)

    best = [float(state_of(search).scores[0])]
    for _ in range(5):
        search.evolve(rng)
        best.append(float(state_of(search).scores[0]))

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
