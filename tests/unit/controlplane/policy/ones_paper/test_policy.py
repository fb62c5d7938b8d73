"""Policy `ones-paper`: its search, what it learns, and reasons."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from numpy.random import default_rng

from controlplane.policy.api import Budget, EpochSeen, JobEnded, JobView
from controlplane.policy.ones_paper.policy import EvolutionarySearch, OnesPaper
from controlplane.policy.options import IMPROVED, OnesPaperOptions
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B, job_view
from tests.support.views import NOW, epoch_seen, planned, steps_seen, view_of
from tests.unit.controlplane.policy.ones_paper.problems import (
    SLOTS,
    genes,
    problem_of,
    seen,
    warm_job,
)

PRESET = {"preset": "improved"}


def a_job(job: JobId = A) -> JobView:
    view = job_view(job, slots=(1, 8), family="f", batch_size=64, batch_limit=1024, local_limit=256)
    return msgspec.structs.replace(view, epoch_samples=1000)


def epoch(number: int, samples_done: int = 0) -> EpochSeen:
    return epoch_seen(A, family="f", epoch=number, train_loss=2.0 / number,
                      samples_done=samples_done)  # fmt: skip


def lived(policy: OnesPaper, epochs: int, *, succeeded: bool) -> None:
    """Report job A, which ends after so many epochs."""
    policy.plan(view_of(SLOTS, a_job(A)), Seconds(0.0))
    for number in range(1, epochs + 1):
        policy.observe(epoch(number), Seconds(number))
    ended = JobEnded(job=A, family="f", samples_done=1000 * epochs, succeeded=succeeded)
    policy.observe(ended, Seconds(epochs))


def test_the_progress_model_is_fitted_by_improve_to_jobs_that_succeeded() -> None:
    policy, failed, view = OnesPaper(), OnesPaper(), view_of(SLOTS, a_job(B))
    before, as_before = policy._estimates.progress, failed._estimates.progress
    lived(policy, 12, succeeded=True)
    lived(failed, 12, succeeded=False)

    policy.plan(view, NOW)
    assert policy._estimates.progress is before
    for each in (policy, failed):
        each.improve(view, Budget(steps=1), default_rng(0), NOW)

    assert policy._estimates.progress is not before
    assert failed._estimates.progress is as_before


def test_an_epoch_counts_its_samples() -> None:
    policy = OnesPaper()
    policy.plan(view_of(SLOTS, a_job()), Seconds(0.0))
    for number, done in [(1, 1000), (2, 1512)]:  # the script left the second epoch early
        policy.observe(epoch(number, done), NOW)

    log = policy._estimates.histories[A].log
    assert [(number, row[2]) for number, row in log] == [(1, 1000.0), (2, 1512.0)]


def test_the_validation_accuracy_is_a_feature_of_progress() -> None:
    policy = OnesPaper()
    policy.plan(view_of(SLOTS, a_job()), Seconds(0.0))
    for number, accuracy in [(1, 0.5), (2, None), (3, 0.7)]:
        policy.observe(msgspec.structs.replace(epoch(number), stop_metric=accuracy), NOW)

    log = policy._estimates.histories[A].log
    assert [row[4] for _, row in log] == [0.5, 0.5, 0.7]


def test_all_waiting_jobs_start_if_there_is_room() -> None:
    jobs = [a_job(JobId(f"j-{number}")) for number in range(6)]

    plan = planned("ones-paper", view_of(SLOTS, *jobs), options=PRESET)

    assert sorted(plan.local_batch) == sorted(job.job for job in jobs)
    assert {reason.code for reason in plan.reasons.values()} == {"start"}


def test_reasons_name_batch_limit_and_progress_or_other_jobs() -> None:
    start = planned("ones-paper", view_of(SLOTS, a_job()), options=PRESET).reasons[A]
    assert start.text == "starts on 1 slot: batch 64 of at most 64, 9% done on 1 slot"
    assert start.numbers.keys() >= {
        "slots_now", "slots_then", "batch_then", "batch_limit", "progress", "samples_left",
        "utilization_s",
    }  # fmt: skip
    jobs = [a_job(JobId(f"j-{number}")) for number in range(9)]

    plan = planned("ones-paper", view_of(SLOTS, *jobs), options=PRESET)

    waits = [reason for reason in plan.reasons.values() if reason.code == "waits"]
    assert [reason.text for reason in waits] == [
        "waits: the best schedule that was found gives all slots to other jobs"
    ]


def test_a_search_converges_until_the_next_event() -> None:
    policy = OnesPaper(OnesPaperOptions(**IMPROVED, patience=3))
    view = view_of(SLOTS, a_job())
    rng = default_rng(0)

    asked = 1
    while policy.improve(view, Budget(generations=1), rng, NOW):
        asked += 1
    assert asked <= 10
    steps = steps_seen(A, family="f", samples_per_s=0.0)
    policy.observe(steps, NOW)

    assert policy.improve(view, Budget(steps=1), rng, NOW)


def test_a_generation_is_three_steps() -> None:
    policy, view, rng = OnesPaper(), view_of(SLOTS, a_job(A), a_job(B)), default_rng(0)

    generations = []
    for _ in range(6):
        policy.improve(view, Budget(steps=1), rng, NOW)
        generations.append(policy.stats().generations)

    assert generations == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("jobs", [0, 1, 9])
def test_statistics_are_ordered(jobs: int) -> None:
    policy = OnesPaper()
    view = view_of(SLOTS, *(a_job(JobId(f"j-{number}")) for number in range(jobs)))

    policy.improve(view, Budget(generations=2), default_rng(0), NOW)
    stats = policy.stats()

    assert stats.best_fitness >= max(stats.mean_fitness, stats.incumbent_fitness)
    assert stats.spread == tuple(sorted(stats.spread))
    assert stats.spread[-1:] in ((), (stats.best_fitness,))


def test_candidates_are_as_many_as_slots_distinct_and_never_get_worse() -> None:
    """The schedule in force is one of the first."""
    jobs = [warm_job(JobId(f"j-{place}"), on=1, first=place) for place in range(8)]
    problem = problem_of(*jobs, events=(seen(),))
    search, rng = EvolutionarySearch(OnesPaperOptions(**IMPROVED)), default_rng(0)
    search.update(problem, rng)
    assert any((row == problem.present).all() for row in search._now.genes)
    assert search._now.scores[0] >= search.incumbent()

    best = []
    for _ in range(5):
        search.evolve(rng)
        scores = list(search._now.scores)
        assert scores == sorted(scores, reverse=True)
        assert search._now.genes.shape == (8, 8)
        assert len({row.tobytes() for row in search._now.genes}) == 8
        best.append(float(scores[0]))

    assert best == sorted(best)


def test_diversity_is_the_share_of_jobs_that_differ() -> None:
    problem = problem_of(warm_job(A), warm_job(B), events=(seen(),))
    search = EvolutionarySearch(OnesPaperOptions(**IMPROVED, population=2))
    search.update(problem, default_rng(0))
    standing = search._now

    def among(*candidates: list[int]) -> float:
        found = genes(*candidates)
        search._now = dataclasses.replace(standing, genes=found)
        return search.diversity()

    assert among([1, 1, 2], [2, 1, 1]) == 0.0  # the same numbers of slots
    assert among([1, 1, 2], [1, 1, 0]) == 0.5
    assert among([1, 1, 2], [1, 2, 2]) == 1.0


def test_aligned_reorder_uses_whole_nodes() -> None:
    held = warm_job(A, on=3, moved_at=Seconds(90.0))  # gated
    waits = warm_job(B, epoch=0, samples_done=0)
    wide = msgspec.structs.replace(waits, least=4)
    view = view_of(SLOTS, held, wide)

    def nodes(reorder: str) -> int:
        options = {**PRESET, "reorder": reorder}
        plan = planned("ones-paper", view, options=options)
        return len({slot.split("/")[0] for slot in plan.local_batch[B]})

    assert nodes("aligned") == 1
    assert nodes("flat") == 2
