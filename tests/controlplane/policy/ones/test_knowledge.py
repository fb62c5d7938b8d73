"""What the search learns, and from what."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import EpochSeen, JobEnded, JobView, PlanTaken, StepsSeen
from controlplane.policy.ones.knowledge import Knowledge
from controlplane.policy.ones.options import OnesOptions
from schemas.ids import JobId, Seconds
from tests.support.builders import S0, A, B, job_view

OPTIONS = OnesOptions(warmup_steps=10, report_interval_s=30.0)


def epoch(job: JobId = A, **changes: Any) -> EpochSeen:
    seen = EpochSeen(
        job=job, family="f", slots=2, nodes=1, global_batch=64, samples_per_s=640.0, whole=True
    )
    return msgspec.structs.replace(seen, **changes)


def steps(step: int, job: JobId = A, **changes: Any) -> StepsSeen:
    seen = StepsSeen(
        job=job, family="f", group=1, slots=1, nodes=1, global_batch=64, step=step,
        samples_done=64 * step, samples_per_s=320.0,
    )  # fmt: skip
    return msgspec.structs.replace(seen, **changes)


def knowing(*news: tuple[float, Any]) -> Knowledge:
    knowledge = Knowledge(OPTIONS)
    for at, event in news:
        knowledge.observe(event, Seconds(at))
    return knowledge


def running(**changes: Any) -> JobView:
    return job_view(A, family="f", batch_limit=1024, running_on={S0: 64}, **changes)


def met(knowledge: Knowledge, *jobs: JobView, now: float, contended: bool = False) -> Knowledge:
    knowledge.meet(jobs, contended=contended, now=Seconds(now))
    return knowledge


def sizes(knowledge: Knowledge) -> dict[tuple[int, int, int], float]:
    """Mean step times by nodes, slots and local batch."""
    return {size: mean.step_s for size, mean in knowledge.family("f").means.items()}


# --- speeds


def test_a_whole_epoch_is_a_measurement_of_its_size() -> None:
    assert sizes(knowing((1.0, epoch()))) == {(1, 2, 32): 0.1}


@pytest.mark.parametrize(
    "changes", [{"whole": False}, {"samples_per_s": 0.0}, {"slots": 0}], ids=lambda c: next(iter(c))
)
def test_an_epoch_that_tells_nothing_of_one_size_is_none(changes: dict[str, Any]) -> None:
    assert sizes(knowing((1.0, epoch(**changes)))) == {}


def test_the_second_report_of_a_group_is_a_measurement_by_the_workers_clock() -> None:
    knowledge = knowing((10.0, steps(2)))
    assert sizes(knowledge) == {}

    knowledge.observe(steps(4, samples_per_s=320.0), Seconds(10.01))  # held up, or early

    assert sizes(knowledge) == {(1, 1, 64): 0.2}


@pytest.mark.parametrize(
    "other",
    [
        {"group": 2}, {"global_batch": 128}, {"samples_done": 3}, {"samples_per_s": 0.0},
        {"samples_per_s": float("inf")}, {"samples_per_s": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_a_report_of_another_group_or_of_no_progress_or_speed_measures_nothing(
    other: dict[str, Any],
) -> None:
    knowledge = knowing((10.0, steps(0, samples_done=5)), (13.0, steps(5, **other)))

    assert sizes(knowledge) == {}


def test_an_epoch_without_a_finite_speed_measures_nothing() -> None:
    assert sizes(knowing((1.0, epoch(samples_per_s=float("inf"))))) == {}


def test_a_newer_measurement_of_one_size_counts_for_three_tenths() -> None:
    knowledge = knowing((1.0, epoch()), (2.0, epoch(samples_per_s=320.0)))

    assert sizes(knowledge) == {(1, 2, 32): pytest.approx(0.13)}


def test_a_model_is_fitted_again_for_a_new_size_or_a_drift_and_not_for_noise() -> None:
    knowledge = knowing((1.0, epoch()))
    family = knowledge.family("f")
    first = family.speed(32)

    knowledge.observe(epoch(samples_per_s=600.0), Seconds(2.0))
    assert family.speed(32) is first
    knowledge.observe(epoch(slots=3), Seconds(3.0))
    second = family.speed(32)
    assert second is not first
    knowledge.observe(epoch(samples_per_s=200.0), Seconds(4.0))
    assert family.speed(32) is not second
    assert family.edition == 3


def test_families_learn_apart() -> None:
    knowledge = knowing((1.0, epoch()))

    assert not knowledge.family("g").speed(32).known
    assert knowledge.family("f").speed(32).known
    assert (knowledge.family("f").largest, knowledge.family("g").largest) == (2, 1)


# --- limits


def test_a_job_is_warm_after_an_epoch_or_ten_steps_whose_speed_is_known() -> None:
    job = running()

    assert not knowing().warm(job)
    assert not knowing((1.0, steps(4)), (2.0, steps(9))).warm(job)
    assert not knowing((1.0, steps(10))).warm(job), "how long they took cannot be told yet"
    assert knowing((1.0, steps(4)), (2.0, steps(10))).warm(job)
    assert knowing((0.5, epoch(B)), (1.0, steps(10))).warm(job), "a relative was measured"
    assert knowing().warm(running(epoch=1))


def test_the_rate_of_arrivals_is_that_of_all_jobs_whoever_comes_first() -> None:
    old = running(ran_s=9.0, submitted_at=Seconds(0.0))
    late = [job_view(JobId(f"l-{n}"), submitted_at=Seconds(float(n))) for n in range(1, 10)]
    limits = []
    for jobs in ([old, *late], [*late, old]):
        knowledge = knowing((9.0, epoch(global_batch=512)))
        met(knowledge, *jobs, now=9.0, contended=True)
        limits.append(knowledge.limit(old))

    assert limits == [256, 256]


def test_a_limit_begins_at_the_first_batch_and_doubles_with_each_epoch() -> None:
    knowledge = met(knowing(), running(), now=10.0)
    limits = [knowledge.limit(running())]

    for at in (11.0, 12.0, 13.0, 14.0, 15.0):
        knowledge.observe(epoch(), Seconds(at))
        limits.append(met(knowledge, running(), now=at).limit(running()))
    assert limits == [64, 128, 256, 512, 1024, 1024]


def test_an_epoch_moves_the_limit_once_however_often_the_job_is_looked_at() -> None:
    knowledge = met(knowing((1.0, epoch())), running(), running(), now=2.0)

    assert met(knowledge, running(), now=3.0).limit(running()) == 128


def test_a_long_epoch_counts_in_report_intervals_once_the_job_is_warm() -> None:
    knowledge = met(knowing((1.0, steps(9))), running(), now=40.0)
    assert knowledge.limit(running()) == 64

    knowledge.observe(steps(10), Seconds(41.0))

    times = (41.0, 60.0, 71.0, 71.1, 90.0, 101.2)
    assert [met(knowledge, running(), now=at).limit(running()) for at in times] == [
        128,
        128,
        128,
        256,
        256,
        512,
    ]


def test_each_plan_that_leaves_a_job_waiting_halves_its_limit() -> None:
    knowledge = met(knowing((1.0, epoch(global_batch=512))), running(), now=2.0)
    waiting = msgspec.structs.replace(running(), running_on={})
    limits = [knowledge.limit(waiting)]

    for _ in range(5):
        knowledge.observe(PlanTaken(waiting=(A, B)), Seconds(3.0))
        limits.append(met(knowledge, waiting, now=3.0).limit(waiting))
    assert limits == [1024, 512, 256, 128, 64, 64]


def test_a_plan_that_lets_a_job_run_leaves_its_limit() -> None:
    knowledge = met(knowing((1.0, epoch())), running(), now=2.0)

    knowledge.observe(PlanTaken(waiting=(B,)), Seconds(3.0))

    assert knowledge.limit(running()) == 128


def test_a_limit_is_cut_for_a_job_that_ran_long_while_others_wait() -> None:
    others = [job_view(JobId(f"x-{n}"), at=float(n)) for n in range(4)]  # one a second
    knowledge = met(knowing(), *others, now=5.0)
    knowledge.observe(epoch(global_batch=512), Seconds(6.0))

    met(knowledge, running(ran_s=9.0), now=6.0, contended=True)

    assert knowledge.limit(running()) == 256


# --- when a job may be changed


@pytest.mark.parametrize(
    ("moved_at", "epoch_at", "now", "gated"),
    [
        (100.0, 90.0, 110.0, True),
        (100.0, 100.0, 110.0, True),
        (100.0, 105.0, 110.0, False),
        (100.0, 90.0, 129.9, True),
        (100.0, 90.0, 130.0, False),
    ],
    ids=["just moved", "an epoch before", "an epoch since", "almost an interval", "an interval"],
)
def test_a_job_that_was_moved_is_left_alone_for_an_epoch_or_a_report_interval(
    moved_at: float,
    epoch_at: float,
    now: float,
    gated: bool,  # noqa: FBT001
) -> None:
    job = running(moved_at=Seconds(moved_at), epoch_at=Seconds(epoch_at))

    assert knowing().gated(job, Seconds(now)) is gated


# --- how much is left, and who comes


def test_jobs_arrive_at_the_mean_rate_of_the_latest_of_them() -> None:
    knowledge = knowing()
    assert knowledge.arrivals_per_s == 0.0

    met(knowledge, *(job_view(JobId(f"x-{n}"), at=5.0 * n) for n in (2, 0, 1)), now=20.0)
    met(knowledge, *(job_view(JobId(f"x-{n}"), at=5.0 * n) for n in (2, 0, 1)), now=30.0)

    assert knowledge.arrivals_per_s == 0.2


def test_jobs_of_one_moment_tell_no_rate() -> None:
    jobs = [job_view(JobId(f"x-{n}")) for n in range(3)]

    assert met(knowing(), *jobs, now=1.0).arrivals_per_s == 0.0


def test_what_is_left_is_told_by_the_user_or_by_relatives_or_by_nobody() -> None:
    done = JobEnded(job=B, family="f", samples_done=900, succeeded=True)
    failed = JobEnded(job=B, family="f", samples_done=900, succeeded=False)

    assert knowing().remaining(running()) is None
    assert knowing().remaining(running(stop_samples=500, samples_done=200)) == 300
    assert knowing((1.0, done)).remaining(running(samples_done=200)) == 700
    assert knowing((1.0, failed)).remaining(running(samples_done=200)) == 700
    assert knowing((1.0, failed)).remaining(running(samples_done=500)) == 500
    assert knowing((1.0, steps(5, B))).remaining(running()) == 320


# --- from history

PAST = [
    (1.0, epoch(slots=1)),
    (3.0, epoch(slots=1, samples_per_s=600.0)),
    (5.0, epoch(slots=2, global_batch=128, samples_per_s=1100.0)),
    (6.0, JobEnded(job=B, family="f", samples_done=900, succeeded=True)),
]


def test_a_search_that_begins_anew_knows_the_speeds_and_the_length_that_the_last_one_knew() -> None:
    lived = Knowledge(OPTIONS)
    for at, event in PAST:
        lived.observe(event, Seconds(at))
        met(lived, running(), now=at)
        lived.family("f").speed(64)
    again = met(knowing(*PAST), running(), now=7.0)

    assert sizes(again) == sizes(lived)
    assert again.remaining(running()) == lived.remaining(running()) == 900
    assert again.family("f").largest == lived.family("f").largest == 2
    size = (np.array([1, 1]), np.array([1, 2]), np.array([64.0, 64.0]))
    one, other = (k.family("f").speed(64).step_s(*size) for k in (lived, again))
    assert other == pytest.approx(one, rel=0.15)


def test_a_search_that_begins_anew_allows_at_least_the_batch_that_a_job_had() -> None:
    limit = met(knowing(*PAST), running(), now=7.0).limit(running())

    assert limit == 256


@settings(max_examples=80)
@given(
    doublings=st.integers(0, 6), batch=st.sampled_from([64, 128, 512, 5000]), moment=st.floats(0, 9)
)
def test_a_limit_that_is_learnt_again_is_within_the_users_bounds(
    doublings: int, batch: int, moment: float
) -> None:
    past = [(float(n), epoch(global_batch=batch)) for n in range(doublings)]

    knowledge = met(knowing(*past), running(), now=doublings + moment)

    assert 64 <= knowledge.limit(running()) <= 1024
