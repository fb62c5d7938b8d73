"""Policy `gittins`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policy.api import JobEnded, JobView
from controlplane.policy.baselines.gittins import ServiceHistory
from controlplane.policy.registry import make
from schemas.ids import JobId, Seconds
from tests.support.builders import A, B, C, job_view
from tests.support.sizes import examples
from tests.support.views import InstantCluster, row_of

SIZE = st.floats(1.0, 1e5)


def gang(job: JobId, at: float, size: int, **changes: Any) -> JobView:
    return job_view(job, at, slots=(size, size), **changes)


def cluster(past: Sequence[float], *nodes: int, **options: Any) -> InstantCluster:
    policy = make("gittins", {"quantum": 100.0, "least_history": 3, **options})
    for number, service in enumerate(past):
        name = JobId(f"x-{number}")
        ended = JobEnded(job=name, family="", samples_done=1, succeeded=True, slot_s=service)
        policy.observe(ended, Seconds(0.0))
    return InstantCluster(policy, row_of(*nodes))


def history_of(past: Sequence[float], kept: int = 100) -> ServiceHistory:
    history = ServiceHistory(kept)
    for service in past:
        history.add(service)
    return history


# --- the index


@pytest.mark.parametrize(
    ("attained", "index"),
    [
        (0.0, (2 / 4) / ((50 + 90 + 100 + 100) / 4)),
        (100.0, (1 / 2) / ((50 + 100) / 2)),
        (150.0, 0.0),
        (300.0, (1 / 1) / (100 / 1)),
        (400.0, 0.0),
    ],
)
def test_the_index_of_four_jobs_agrees_with_a_calculation_by_hand(
    attained: float, index: float
) -> None:
    """They took 50, 90, 150 and 400 slot seconds; the quantum is 100."""
    assert history_of([400, 50, 150, 90]).index(attained, 100.0) == pytest.approx(index)


@settings(max_examples=examples(200), deadline=None)
@given(
    past=st.lists(SIZE, min_size=1, max_size=30),
    attained=st.floats(0.0, 1e5),
    quantum=st.floats(1.0, 1e5),
    kept=st.integers(1, 30),
)
def test_the_index_agrees_with_its_definition(
    past: list[float], attained: float, quantum: float, kept: int
) -> None:
    recent = past[-kept:]
    longer = [service for service in recent if service > attained]
    ends = sum(service <= attained + quantum for service in longer)
    takes = sum(min(service - attained, quantum) for service in longer)

    index = history_of(past, kept).index(attained, quantum)

    assert index == pytest.approx(ends / takes if ends else 0.0, rel=1e-6, abs=1e-9)


# --- the policy


def test_without_a_history_the_least_attained_service_goes_first() -> None:
    it = cluster([50.0, 50.0], 2)
    it.submit(gang(A, 0.0, 2, slot_s=150.0), gang(B, 1.0, 1, slot_s=90.0), gang(C, 2.0, 1))

    assert it.sizes(2.0) == {B: 1, C: 1}


def test_a_job_that_probably_ends_soon_goes_before_a_new_one() -> None:
    """Past jobs took 250 or 950 slot seconds: at 200 an end is near or far."""
    it = cluster([250.0, 250.0, 950.0], 1)
    it.submit(gang(A, 1.0, 1, slot_s=200.0), gang(B, 0.0, 1))

    assert it.sizes(2.0) == {A: 1}


def test_ranks_change_at_the_end_of_a_quantum() -> None:
    """Jobs end before 100 or at 1000: A has two slots and ends its quantum at 50."""
    it = cluster([80.0, 80.0, 1000.0], 2)
    it.submit(gang(A, 0.0, 2))
    it.at(0.0)
    assert it.plans[-1].wake_at == 50.0
    it.submit(gang(B, 10.0, 2))

    assert it.sizes(49.0) == {A: 2}
    assert it.sizes(50.0) == {B: 2}
    assert it.plans[-1].wake_at == 100.0
