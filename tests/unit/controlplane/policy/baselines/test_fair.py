"""Policy `fair`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobView
from controlplane.policy.placement.sizes import shares
from controlplane.policy.placement.slot_partition import partition_of
from controlplane.policy.registry import make
from schemas.ids import JobId
from tests.support.builders import A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, InstantCluster, row_of, view_of

D = JobId("d-4")


def asks(job: JobId, at: float, least: int = 1, most: int = 8, **changes: Any) -> JobView:
    return job_view(job, at, slots=(least, most), **changes)


@pytest.mark.parametrize(
    ("room", "jobs", "shared"),
    [
        (9, [asks(A, 0), asks(B, 1), asks(C, 2)], {A: 3, B: 3, C: 3}),
        (8, [asks(A, 0), asks(B, 1), asks(C, 2)], {A: 3, B: 3, C: 2}),
        (9, [asks(A, 0, 1, 1), asks(B, 1), asks(C, 2)], {A: 1, B: 4, C: 4}),
        (9, [asks(A, 0, 5, 8), asks(B, 1), asks(C, 2)], {A: 5, B: 2, C: 2}),
        (9, [asks(A, 0, 1, 2), asks(B, 1, 1, 2), asks(C, 2, 1, 2)], {A: 2, B: 2, C: 2}),
        (4, [asks(A, 0, 3, 3), asks(B, 1, 2, 2), asks(C, 2)], {A: 3, C: 1}),
        (8, [asks(A, 0, batch_size=2), asks(B, 1)], {A: 2, B: 6}),
    ],
    ids=["even", "rest", "small most", "large least", "all have most", "one waits", "tiny batch"],
)
def test_shares_are_as_equal_as_possible(
    room: int, jobs: list[JobView], shared: dict[JobId, int]
) -> None:
    assert shares(jobs, partition_of(view_of(row_of(room), *jobs), NOW)) == shared


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


def test_a_surplus_slot_stays_with_its_job() -> None:
    """B had it first; A is older, but returns from a failure."""
    it = InstantCluster(make("fair"), row_of(3))
    it.submit(asks(B, 1.0))
    it.at(1.0)
    it.submit(asks(A, 0.0))

    assert it.at(2.0) == it.at(3.0) == {A: ["n1/2"], B: ["n1/0", "n1/1"]}


def test_the_slots_of_an_ended_job_are_added_to_those_of_the_others() -> None:
    it = InstantCluster(make("fair"), row_of(2, 2))
    it.submit(asks(A, 0.0), asks(B, 1.0))
    assert it.at(1.0) == {A: ["n1/0", "n1/1"], B: ["n2/0", "n2/1"]}
    it.end(A)

    assert it.at(2.0) == {B: ["n2/0", "n2/1", "n1/0", "n1/1"]}
    assert it.plans[-2].restart == ()


def test_without_turns_a_job_waits_for_older_ones_to_end() -> None:
    it = InstantCluster(make("fair"), row_of(2))
    it.submit(asks(A, 0.0, 1, 1), asks(B, 1.0, 1, 1), asks(C, 2.0, 1, 1))

    assert it.sizes(2.0) == it.sizes(9000.0) == {A: 1, B: 1}
    assert it.plans[-1].wake_at is None


def test_turns_agree_with_a_trace_by_hand() -> None:
    """Two slots, turns of 100 s; A, B, C and D take one each.

    |  t  | run | queue of waiting jobs           | next turn ends |
    |-----|-----|---------------------------------|----------------|
    |   0 | A B | C (since 0), D (since 0)        | 100            |
    | 100 | C D | A (since 100), B (since 100)    | 200            |
    | 150 | C   | D ended; A starts               | 200            |
    | 200 | A B | C (since 200)                   | 250            |
    | 250 | B C | A (since 250)                   | 300            |
    """
    it = InstantCluster(make("fair", {"quantum_s": 100.0}), row_of(2))

    def then(now: float) -> tuple[list[JobId], float | None]:
        return sorted(it.at(now)), it.plans[-1].wake_at

    it.submit(*(asks(job, at, 1, 1) for at, job in enumerate((A, B, C, D))))
    assert then(0.0) == ([A, B], 100.0)
    assert then(100.0) == ([C, D], 200.0)
    it.end(D)
    assert then(150.0) == ([A, C], 200.0)
    assert then(200.0) == ([A, B], 250.0)
    assert then(250.0) == ([B, C], 300.0)
