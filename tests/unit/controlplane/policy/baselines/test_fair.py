"""Equal shares of slots."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobView
from controlplane.policy.placement.shares import shares
from controlplane.policy.placement.slot_partition import partition_of
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import NOW, InstantCluster, row_of, view_of

D = JobId("d-4")


def asks(job: JobId, at: float, least: int, most: int, **changes: Any) -> JobView:
    return job_view(job, at, slots=(least, most), **changes)


def sizes(placed: dict[JobId, list[SlotId]]) -> dict[JobId, int]:
    return {name: len(slots) for name, slots in placed.items()}


@pytest.mark.parametrize(
    ("room", "jobs", "shared"),
    [
        (9, [asks(A, 0, 1, 8), asks(B, 1, 1, 8), asks(C, 2, 1, 8)], {A: 3, B: 3, C: 3}),
        (8, [asks(A, 0, 1, 8), asks(B, 1, 1, 8), asks(C, 2, 1, 8)], {A: 3, B: 3, C: 2}),
        (9, [asks(A, 0, 1, 1), asks(B, 1, 1, 8), asks(C, 2, 1, 8)], {A: 1, B: 4, C: 4}),
        (9, [asks(A, 0, 5, 8), asks(B, 1, 1, 8), asks(C, 2, 1, 8)], {A: 5, B: 2, C: 2}),
        (9, [asks(A, 0, 1, 2), asks(B, 1, 1, 2), asks(C, 2, 1, 2)], {A: 2, B: 2, C: 2}),
        (4, [asks(A, 0, 3, 3), asks(B, 1, 2, 2), asks(C, 2, 1, 8)], {A: 3, C: 1}),
        (8, [asks(A, 0, 1, 8, batch_size=2), asks(B, 1, 1, 8)], {A: 2, B: 6}),
    ],
    ids=["even", "rest", "small most", "large least", "all have most", "one waits", "tiny batch"],
)
def test_shares_are_as_equal_as_can_be(
    room: int, jobs: list[JobView], shared: dict[JobId, int]
) -> None:
    assert shares(jobs, partition_of(view_of(row_of(room), *jobs), NOW)) == shared


@settings(max_examples=examples(200), deadline=None)
@given(
    room=st.integers(1, 20),
    bounds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=8),
)
def test_no_slot_is_idle_and_nobody_could_be_given_one_of_a_larger_share(
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
        if not size:
            continue
        assert job.least <= size <= job.most
        if size < min(job.most, room):
            assert left == 0
            richer = [other for other in jobs if shared.get(other.job, 0) > size + 1]
            assert all(shared[other.job] == other.least for other in richer)


def test_the_slot_that_is_left_over_stays_where_it_is() -> None:
    """B had it first; A is older, but comes back from a failure."""
    it = InstantCluster(make("fair"), row_of(3))
    it.submit(asks(B, 1.0, 1, 8))
    it.at(1.0)
    it.submit(asks(A, 0.0, 1, 8))

    assert it.at(2.0) == {A: ["n1/2"], B: ["n1/0", "n1/1"]}
    assert it.at(3.0) == {A: ["n1/2"], B: ["n1/0", "n1/1"]}


def test_what_a_job_leaves_is_shared_by_the_others_where_they_are() -> None:
    it = InstantCluster(make("fair"), row_of(2, 2))
    it.submit(asks(A, 0.0, 1, 8), asks(B, 1.0, 1, 8))
    assert it.at(1.0) == {A: ["n1/0", "n1/1"], B: ["n2/0", "n2/1"]}
    it.end(A)

    assert it.at(2.0) == {B: ["n2/0", "n2/1", "n1/0", "n1/1"]}
    assert it.plans[-2].restart == ()


def test_without_turns_who_does_not_fit_waits_for_older_ones_to_end() -> None:
    it = InstantCluster(make("fair"), row_of(2))
    it.submit(asks(A, 0.0, 1, 1), asks(B, 1.0, 1, 1), asks(C, 2.0, 1, 1))

    assert sizes(it.at(2.0)) == sizes(it.at(9000.0)) == {A: 1, B: 1}
    assert it.plans[-1].wake_at is None


def test_turns_worked_out_by_hand() -> None:
    """Two slots, turns of 100 s; A, B, C and D take one each.

    |  t  | run | line of those that wait         | next turn ends |
    |-----|-----|---------------------------------|----------------|
    |   0 | A B | C (since 0), D (since 0)        | 100            |
    | 100 | C D | A (since 100), B (since 100)    | 200            |
    | 150 | C   | D ended; A comes in             | 200            |
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


def test_an_option_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"quantum_s: -1\.0 is below 0"):
        make("fair", {"quantum_s": -1.0})
