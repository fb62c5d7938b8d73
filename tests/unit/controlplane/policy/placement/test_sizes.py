"""Rounds, sizes that fit, and fair shares; `baselines/` has tests of gangs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobView
from controlplane.policy.placement.sizes import Rounds, fill_idle_slots, fit_targets, shares
from controlplane.policy.placement.slot_partition import Partition, partition_of
from schemas.ids import JobId, NodeId, Seconds, slot_id
from tests.support.builders import A, B, C, cluster_view, job_view, slot_view
from tests.support.sizes import examples
from tests.support.views import NOW, row_of, view_of
from tests.unit.controlplane.policy.tables import cases

SLOTS = [slot_view(slot_id(NodeId("n1"), at)) for at in range(4)]
FIRST = SLOTS[0].slot


def at(now: float, *jobs: object) -> Partition:
    return partition_of(cluster_view(*SLOTS, *jobs), Seconds(now))


@pytest.mark.parametrize(
    ("age", "share", "next_at"),
    [
        (0.0, 0.5, 101.0),  # at least a second
        (20.0, 0.5, 110.0),
        (20.0, 1.0, 120.0),
        (1000.0, 0.5, 160.0),  # at most the interval
        (20.0, 0.0, 160.0),  # always the interval
    ],
)
def test_a_round_is_as_long_as_jobs_are_old(age: float, share: float, next_at: float) -> None:
    rounds = Rounds(60.0, share)
    job = job_view(A, 100.0 - age, running_on={FIRST: 64})
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(100.0, job)) == next_at
    assert not rounds.is_due(at(next_at - 0.1, job), {A: 1})
    assert rounds.is_due(at(next_at, job), {A: 1})


OLD, YOUNG = job_view(A, 60.0, running_on={FIRST: 64}), job_view(B, 105.0)
STARTED = [
    job_view(name, 98.0, running_on={slot.slot: 64}, start_s=start_s)
    for name, slot, start_s in zip((A, B, C), SLOTS[:3], (2.0, 4.0, None), strict=True)
]


@cases(
    "rounds, now, jobs, next_at",
    half_of_the_mean_age=(Rounds(60.0, 0.5), 105.0, [OLD], 120.0),
    a_job_that_arrived_meanwhile_has_age_0=(Rounds(60.0, 0.5), 105.0, [OLD, YOUNG], 110.0),
    ten_starts_of_3_s_on_average=(Rounds(600.0, 0.5, starts=10.0), 100.0, STARTED, 130.0),
)
def test_a_round_depends_on_new_jobs_and_on_starts(
    rounds: Rounds, now: float, jobs: list[JobView], next_at: float
) -> None:
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(now, *jobs)) == next_at


@pytest.mark.parametrize(
    ("targets", "filled"),
    [({A: 2}, {B: 1}), ({A: 1}, {B: 1, C: 2}), ({A: 1, B: 0, C: 2}, {B: 1}), ({A: 4}, {})],
)
def test_between_rounds_waiting_jobs_get_unassigned_slots(
    targets: dict[str, int], filled: dict[str, int]
) -> None:
    """Four slots, of which A has one; B is older than C, which needs two."""
    has = job_view(A, running_on={FIRST: 64}, slots=(1, 4))
    second, third = job_view(B, 1.0), job_view(C, 2.0, slots=(2, 4))

    assert fill_idle_slots(at(3.0, has, third, second), targets) == filled
    assert fill_idle_slots(at(3.0, job_view(A)), {}, lambda _: 0) == {}  # no size to train on


GROWS, PAIR = job_view(A, slots=(1, 4), running_on={FIRST: 4}), job_view(B, slots=(2, 2))
# One that a policy which changes batches gave more slots than samples, and one that waits.
WIDE = job_view(A, slots=(1, 4), batch_size=2, running_on={slot.slot: 1 for slot in SLOTS})
WAITS = job_view(A, slots=(1, 4), batch_size=2)


@cases(
    "jobs, targets, fixed, fitted",
    the_whole_target_of_one_fits=([GROWS, PAIR], {A: 3, B: 2}, False, {A: 3}),
    both_fit=([GROWS, PAIR], {A: 2, B: 2}, False, {A: 2, B: 2}),
    a_job_without_a_target_stays=([GROWS, PAIR], {B: 2}, False, {A: 1, B: 2}),
    a_sample_for_each_slot_of_a_start=([WAITS], {A: 4}, True, {A: 2}),
    a_sample_for_each_slot_of_a_change=([WIDE], {A: 3}, True, {A: 2}),
    an_unchanged_size=([WIDE], {A: 4}, True, {A: 4}),
    batches_that_may_change=([WIDE], {A: 3}, False, {A: 3}),
)
def test_a_target_is_fitted_whole_and_to_a_fixed_batch(
    *, jobs: list[JobView], targets: dict[JobId, int], fixed: bool, fitted: dict[JobId, int]
) -> None:
    assert fit_targets(at(0.0, *jobs), targets, fixed_batches=fixed) == fitted


# --- fair shares


def asks(job: JobId, at: float = 0, least: int = 1, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, at, slots=(least, most), **changes)


@settings(max_examples=examples(200), deadline=None)
@given(
    room=st.integers(1, 20),
    bounds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=8),
)
def test_no_slot_is_idle_and_no_larger_share_could_give_one(
    room: int, bounds: list[tuple[int, int]]
) -> None:
    jobs = [
        asks(JobId(f"j-{number}"), number, least, least + more)
        for number, (least, more) in enumerate(bounds)
    ]

    shared = shares(jobs, partition_of(view_of(row_of(room), *jobs), NOW))

    left = room - sum(shared.values())
    for job in jobs:
        size = shared.get(job.job, 0)
        assert not size or job.least <= size <= job.most
        if 0 < size < min(job.most, room):
            assert left == 0
            richer = [other for other in jobs if shared.get(other.job, 0) > size + 1]
            assert all(shared[other.job] == other.least for other in richer)


@cases(
    "room, jobs, shared",
    even=(9, [asks(A), asks(B, 1), asks(C, 2)], {A: 3, B: 3, C: 3}),
    rest=(8, [asks(A), asks(B, 1), asks(C, 2)], {A: 3, B: 3, C: 2}),
    small_most=(9, [asks(A, 0, 1, 1), asks(B, 1), asks(C, 2)], {A: 1, B: 4, C: 4}),
    large_least=(9, [asks(A, 0, 5, 8), asks(B, 1), asks(C, 2)], {A: 5, B: 2, C: 2}),
    all_have_most=(9, [asks(A, 0, 1, 2), asks(B, 1, 1, 2), asks(C, 2, 1, 2)], {A: 2, B: 2, C: 2}),
    one_waits=(4, [asks(A, 0, 3, 3), asks(B, 1, 2, 2), asks(C, 2)], {A: 3, C: 1}),
    tiny_batch=(8, [asks(A, batch_size=2), asks(B, 1)], {A: 2, B: 6}),
)
def test_shares_are_as_equal_as_possible(
    room: int, jobs: list[JobView], shared: dict[JobId, int]
) -> None:
    assert shares(jobs, partition_of(view_of(row_of(room), *jobs), NOW)) == shared
