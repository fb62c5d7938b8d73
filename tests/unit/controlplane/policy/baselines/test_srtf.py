"""Shortest remaining time first."""

from __future__ import annotations

import pytest

from controlplane.policy.api import JobView
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId, SlotId
from tests.support.builders import A, B, C, job_view
from tests.support.views import InstantCluster, ToldOracle, row_of


def gang(job: JobId, at: float, size: int) -> JobView:
    return job_view(job, at, slots=(size, size))


def sizes(placed: dict[JobId, list[SlotId]]) -> dict[JobId, int]:
    return {name: len(slots) for name, slots in placed.items()}


def test_a_trace_worked_out_by_hand() -> None:
    """Four slots; n slots are n times as fast.

    |  t | event           | left (s)        | run |
    |----|-----------------|-----------------|-----|
    |  0 | A: 400 on 4     | A 100           | A   |
    | 10 | B: 100 on 2     | A 90, B 50      | B   |
    | 20 | C: 120 on 2     | A 90, B 40, C 60| B C |
    | 60 | B ends          | A 90, C 20      | C   |
    | 80 | C ends          | A 90            | A   |
    """
    told = ToldOracle({A: 400.0, B: 100.0, C: 120.0})
    it = InstantCluster(make("srtf", {}, told), row_of(4))
    it.submit(gang(A, 0.0, 4))
    assert sizes(it.at(0.0)) == {A: 4}
    told.steps[A] = 360.0
    it.submit(gang(B, 10.0, 2))
    assert sizes(it.at(10.0)) == {B: 2}
    told.steps[B] = 80.0
    it.submit(gang(C, 20.0, 2))
    assert sizes(it.at(20.0)) == {B: 2, C: 2}
    it.end(B)
    told.steps[C] = 40.0
    assert sizes(it.at(60.0)) == {C: 2}
    it.end(C)
    assert sizes(it.at(80.0)) == {A: 4}


def test_smaller_jobs_fill_what_the_first_leave() -> None:
    it = InstantCluster(make("srtf", {}, ToldOracle({A: 30.0, B: 40.0, C: 90.0})), row_of(4))
    it.submit(gang(A, 0.0, 3), gang(B, 1.0, 2), gang(C, 2.0, 1))

    assert sizes(it.at(2.0)) == {A: 3, C: 1}
    assert it.plans[-1].reasons[B].text == (
        "waits: 20 s left; needs 2 slots, those before it leave 0 of 4"
    )


def test_a_cluster_has_no_oracle_and_no_such_policy() -> None:
    with pytest.raises(SettingsError, match="needs to know how long jobs will last"):
        make("srtf")
