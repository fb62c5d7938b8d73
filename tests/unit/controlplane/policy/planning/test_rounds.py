"""When sizes are decided anew, and what happens in between."""

from __future__ import annotations

import pytest

from controlplane.policy.placement.rounds import Rounds, fill_idle_slots
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


def test_who_came_since_counts_as_of_no_age() -> None:
    rounds = Rounds(60.0, 0.5)
    old, new = job_view(A, 60.0, running_on={FIRST: 64}), job_view(B, 105.0)
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(105.0, old)) == 120.0
    assert rounds.next_at(at(105.0, old, new)) == 110.0


def test_a_round_pays_for_the_restarts_that_it_may_bring() -> None:
    """Starts took 3 s on average: ten of them are 30 s."""
    rounds = Rounds(600.0, 0.5, starts=10.0)
    jobs = [
        job_view(name, 98.0, running_on={slot.slot: 64}, start_s=start_s)
        for name, slot, start_s in ((A, SLOTS[0], 2.0), (B, SLOTS[1], 4.0), (C, SLOTS[2], None))
    ]
    rounds.begin(Seconds(100.0))

    assert rounds.next_at(at(100.0, *jobs)) == 130.0


def test_between_rounds_who_waits_has_what_nobody_has_or_is_to_have() -> None:
    """Four slots: A has one and is to have two. B came first, C wants two."""
    has = job_view(A, running_on={FIRST: 64}, slots=(1, 4))
    second, third = job_view(B, 1.0), job_view(C, 2.0, slots=(2, 4))

    assert fill_idle_slots(at(3.0, has, third, second), {A: 2}) == {B: 1}
    assert fill_idle_slots(at(3.0, has, third, second), {A: 1}) == {B: 1, C: 2}
    assert fill_idle_slots(at(3.0, has, third, second), {A: 1, B: 0, C: 2}) == {B: 1}
    assert fill_idle_slots(at(3.0, has, third, second), {A: 4}) == {}


def test_who_cannot_train_on_any_size_is_not_started() -> None:
    assert fill_idle_slots(at(3.0, job_view(A)), {}, lambda _: 0) == {}
