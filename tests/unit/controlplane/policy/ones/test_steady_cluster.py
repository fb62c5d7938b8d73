"""A cluster without changes comes to rest, although telemetry is noisy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from controlplane.policy.api import JobView, SlotView
from schemas.ids import SlotId
from tests.support.sizes import part
from tests.support.views import row_of
from tests.unit.controlplane.policy.ones.steady_cluster import SteadyCluster, a_job


def four(**changes: Any) -> list[JobView]:
    return [a_job(number, **changes) for number in range(1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "jobs", "how"),
    [
        (row_of(4, 4), four(batch_limit=64), {"step_s": 0.3}),
        (row_of(4, 4), four(), {"step_s": 0.4, "scaling": 0.9}),
        (row_of(5), four(most=1), {"step_s": 0.3}),
        (row_of(5), four(), {"step_s": 0.4, "scaling": 0.0}),
        (row_of(5), four(), {"step_s": 0.4, "scaling": 0.9}),
        (row_of(4), [a_job(number) for number in range(1, 7)], {"step_s": 0.3}),
    ],
    ids=[
        "all slots used", "batches may grow", "an idle slot beyond every limit",
        "an idle slot that slows jobs down", "an idle slot that any job could use", "jobs wait",
    ],
)  # fmt: skip
def test_a_steady_cluster_comes_to_rest(
    slots: Sequence[SlotView], jobs: list[JobView], how: dict[str, Any]
) -> None:
    cluster = SteadyCluster(slots, jobs, **how)

    cluster.run(300)

    # every size is tried once before it is known: a batch limit doubles each half minute
    assert len([change for change in cluster.changes if change[0] > 60]) <= 2 * len(jobs)
    assert [change for change in cluster.changes if change[0] > 180] == []


@pytest.mark.slow
@pytest.mark.parametrize("phi", part([100.0, 300.0, 1000.0]))
def test_rough_noise_scales_seldom_change_batches(phi: float) -> None:
    jobs = four()
    cluster = SteadyCluster(row_of(4, 4), jobs, step_s=0.4, scaling=0.9, phi=phi)

    cluster.run(360)

    late = [change for change in cluster.changes if change[0] > 180]
    assert {change[2] for change in late} <= {"batch"}
    assert len(late) <= len(jobs) / 2


def test_no_batch_is_taken_back_within_a_minute() -> None:
    job = a_job(1, most=2)
    cluster = SteadyCluster(row_of(2), [job], step_s=0.4, scaling=0.9, phi=300.0, noise=0.2)

    cluster.run(420)

    found = [(at, text) for at, _, code, text in cluster.changes if code == "batch"]
    soon = [
        text
        for (at, before), (later, text) in pairwise(found)
        if later - at < 60.0 and ("up" in before) != ("up" in text)
    ]
    assert (len(found) > 1, soon) == (True, [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", part(range(3)))
def test_no_job_moves_between_equal_places(seed: int) -> None:
    jobs = [a_job(number, batch_limit=64, family="fg"[number % 2]) for number in range(1, 5)]
    slots = row_of(4, 4, models=("one", "other"))
    cluster = SteadyCluster(slots, jobs, step_s=0.3, seed=seed)

    cluster.run(240)

    for_places = ("moved to faster", "moved to better", "moved away")
    assert [change for change in cluster.changes if change[3].startswith(for_places)] == []
    assert {change[2] for change in cluster.changes if change[0] > 120} <= {"pack"}
    assert [change for change in cluster.changes if change[0] > 200] == []


def test_a_slot_beyond_the_limits_of_jobs_stays_idle() -> None:
    cluster = SteadyCluster(row_of(5), four(most=1), step_s=0.3)

    cluster.run(60)

    taken: list[SlotId] = [slot for job in cluster.jobs.values() for slot in job.running_on]
    assert len(taken) == 4
    assert {change[2] for change in cluster.changes} == {"start"}
