"""Where nothing happens, nothing is changed: noise in telemetry moves nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from controlplane.policy.api import JobView, SlotView
from schemas.ids import SlotId
from tests.support.sizes import part
from tests.support.views import row_of
from tests.unit.controlplane.policy.ones.steady_cluster import SteadyCluster, a_job

STEADY: dict[str, tuple[Sequence[SlotView], list[JobView], dict[str, Any]]] = {
    "all slots used": (
        row_of(4, 4),
        [a_job(number, batch_limit=64) for number in range(1, 5)],
        {"step_s": 0.3},
    ),
    "batches may grow": (
        row_of(4, 4),
        [a_job(number) for number in range(1, 5)],
        {"step_s": 0.4, "scaling": 0.9},
    ),
    "an idle slot that nobody may have": (
        row_of(5),
        [a_job(number, most=1) for number in range(1, 5)],
        {"step_s": 0.3},
    ),
    "an idle slot that makes everybody slower": (
        row_of(5),
        [a_job(number) for number in range(1, 5)],
        {"step_s": 0.4, "scaling": 0.0},
    ),
    "an idle slot that any of them would like": (
        row_of(5),
        [a_job(number) for number in range(1, 5)],
        {"step_s": 0.4, "scaling": 0.9},
    ),
    "some wait": (row_of(4), [a_job(number) for number in range(1, 7)], {"step_s": 0.3}),
}


DEAR = {"an idle slot that makes everybody slower", "an idle slot that any of them would like"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "jobs", "how"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.slow] if name in DEAR else [])
        for name, each in STEADY.items()
    ],
)
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
def test_rough_noise_scales_change_at_most_batches_and_seldom(phi: float) -> None:
    jobs = [a_job(number) for number in range(1, 5)]
    cluster = SteadyCluster(row_of(4, 4), jobs, step_s=0.4, scaling=0.9, phi=phi)

    cluster.run(360)

    late = [change for change in cluster.changes if change[0] > 180]
    assert {change[2] for change in late} <= {"batch"}
    assert len(late) <= len(jobs) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", part(range(3)))
def test_where_gpus_are_alike_and_nobody_is_slowed_down_nobody_is_moved_for_it(seed: int) -> None:
    jobs = [a_job(number, batch_limit=64, family="fg"[number % 2]) for number in range(1, 5)]
    slots = row_of(4, 4, models=("one", "other"))
    cluster = SteadyCluster(slots, jobs, step_s=0.3, seed=seed)

    cluster.run(240)

    for_places = ("moved to faster", "moved to better", "moved away")
    assert [change for change in cluster.changes if change[3].startswith(for_places)] == []
    assert {change[2] for change in cluster.changes if change[0] > 120} <= {"pack"}
    assert [change for change in cluster.changes if change[0] > 200] == []


def test_an_idle_slot_that_serves_nobody_stays_idle() -> None:
    cluster = SteadyCluster(
        row_of(5), [a_job(number, most=1) for number in range(1, 5)], step_s=0.3
    )

    cluster.run(60)

    taken: list[SlotId] = [slot for job in cluster.jobs.values() for slot in job.running_on]
    assert len(taken) == 4
    assert {change[2] for change in cluster.changes} == {"start"}
