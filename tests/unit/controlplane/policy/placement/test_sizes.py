"""Rounds, and sizes that fit; `baselines/` has tests of shares and gangs."""

from __future__ import annotations

import pytest

from controlplane.policy.placement.sizes import Rounds, fill_idle_slots, fit_targets
from controlplane.policy.placement.slot_partition import Partition, partition_of
from schemas.ids import NodeId, Seconds, slot_id
from tests.support.builders import A, B, C, cluster_view, job_view, slot_view

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


def test_a_job_that_arrived_during_a_round_counts_with_age_0() -> None:
    rounds = Rounds(60.0, 0.5)
    old, new = job_view(A, 60.0, running_on={FIRST: 64}), job_view(B, 105.0)
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(105.0, old)) == 120.0
    assert rounds.next_at(at(105.0, old, new)) == 110.0


def test_a_round_is_not_shorter_than_some_starts() -> None:
    """Starts took 3 s on average: ten of them are 30 s."""
    rounds = Rounds(600.0, 0.5, starts=10.0)
    jobs = [
        job_view(name, 98.0, running_on={slot.slot: 64}, start_s=start_s)
        for name, slot, start_s in ((A, SLOTS[0], 2.0), (B, SLOTS[1], 4.0), (C, SLOTS[2], None))
    ]
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(100.0, *jobs)) == 130.0


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


def test_a_job_grows_or_starts_when_its_whole_target_fits() -> None:
    runs = job_view(A, slots=(1, 4), running_on={FIRST: 4})
    partition = at(0.0, runs, job_view(B, slots=(2, 2)))

    assert fit_targets(partition, {A: 3, B: 2}) == {A: 3}
    assert fit_targets(partition, {A: 2, B: 2}) == {A: 2, B: 2}
    assert fit_targets(partition, {B: 2}) == {A: 1, B: 2}


def test_with_fixed_batches_a_changed_size_has_a_sample_for_each_slot() -> None:
    had = {slot.slot: 1 for slot in SLOTS}  # of a policy that changes batches
    runs = at(0.0, job_view(A, slots=(1, 4), batch_size=2, running_on=had))
    waits = at(0.0, job_view(A, slots=(1, 4), batch_size=2))

    assert fit_targets(waits, {A: 4}, fixed_batches=True) == {A: 2}
    assert fit_targets(runs, {A: 3}, fixed_batches=True) == {A: 2}
    assert fit_targets(runs, {A: 4}, fixed_batches=True) == {A: 4}
    assert fit_targets(runs, {A: 3}) == {A: 3}
