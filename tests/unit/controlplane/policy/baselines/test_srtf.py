"""Policy `srtf`."""

from __future__ import annotations

import pytest

from controlplane.policy.api import JobView
from controlplane.policy.registry import make
from schemas.errors import SettingsError
from schemas.ids import JobId
from tests.support.builders import A, B, C, job_view
from tests.support.views import InstantCluster, ToldOracle, row_of


def gang(job: JobId, at: float, size: int) -> JobView:
    return job_view(job, at, slots=(size, size))


def test_plans_agree_with_a_trace_by_hand() -> None:
    """Four slots; n slots are n times as fast.

    |  t | event           | left (s)        | run |
    |----|-----------------|-----------------|-----|
    |  0 | A: 400 on 4     | A 100           | A   |
    | 10 | B: 100 on 2     | A 90, B 50      | B   |
    | 20 | C: 120 on 2     | A 90, B 40, C 60| B C |
    | 60 | B ends          | A 90, C 20      | C   |
    | 80 | C ends          | A 90            | A   |
    """
    oracle = ToldOracle({A: 400.0, B: 100.0, C: 120.0})
    it = InstantCluster(make("srtf", {}, oracle), row_of(4))
    it.submit(gang(A, 0.0, 4))
    assert it.sizes(0.0) == {A: 4}
    oracle.steps[A] = 360.0
    it.submit(gang(B, 10.0, 2))
    assert it.sizes(10.0) == {B: 2}
    oracle.steps[B] = 80.0
    it.submit(gang(C, 20.0, 2))
    assert it.sizes(20.0) == {B: 2, C: 2}
    it.end(B)
    oracle.steps[C] = 40.0
    assert it.sizes(60.0) == {C: 2}
    it.end(C)
    assert it.sizes(80.0) == {A: 4}


def test_smaller_jobs_fill_the_remaining_slots() -> None:
    it = InstantCluster(make("srtf", {}, ToldOracle({A: 30.0, B: 40.0, C: 90.0})), row_of(4))
    it.submit(gang(A, 0.0, 3), gang(B, 1.0, 2), gang(C, 2.0, 1))

    assert it.sizes(2.0) == {A: 3, C: 1}
    assert it.plans[-1].reasons[B].text == (
        "waits: 20 s left; needs 2 slots, those before it leave 0 of 4"
    )


def test_a_cluster_without_an_oracle_refuses_the_policy() -> None:
    with pytest.raises(SettingsError, match="needs to know how long jobs will last"):
        make("srtf")
