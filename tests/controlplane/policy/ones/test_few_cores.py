"""A family that nobody knows, on a host with fewer cores than slots: what is promised, what comes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pytest

from schemas.ids import SlotId
from tests.support.steady_cluster import SteadyCluster, a_job
from tests.support.views import row_of

ALONE: Final = 64 / 5000  # seconds of a step of 64 samples on one slot
CROWDED: Final = {1: 1.0, 2: 1.7, 3: 4.0, 4: 10.0}  # times that by slots: 500 samples/s on four
PROMISE: Final = re.compile(r"([\d.]+) x the speed expected")


class FewCores(SteadyCluster):
    """Four slots share two cores."""

    def speed(self, on: Mapping[SlotId, int]) -> float:
        batch, slots = sum(on.values()), len(on)
        return batch / (ALONE * (0.5 + 0.5 * batch / slots / 64) * CROWDED[slots])


def lived(cores: int) -> tuple[FewCores, list[int]]:
    """A minute of one job, and the slots that it had in each second."""
    cluster = FewCores(row_of(4, cores=cores), [a_job(1, most=4)], noise=0.02)
    slots = []
    for _ in range(60):
        cluster.run(1)
        slots += [len(job.running_on) for job in cluster.jobs.values()]
    return cluster, slots


def test_a_growth_that_makes_a_job_five_times_slower_is_gone_after_three_seconds() -> None:
    cluster, slots = lived(cores=0)  # nobody said that the slots share any

    promised = [float(said) for *_, text in cluster.changes for said in PROMISE.findall(text)]
    assert max(promised) < 2.0
    assert slots.count(4) == 3
    assert slots[-1] == 2
    assert [text for *_, code, text in cluster.changes if code == "shrink"] == [
        "takes its growth back, which made 0.28 x the progress of before; goes on with 2 slots"
    ]


@pytest.mark.parametrize("cores", [1, 2])
def test_where_cores_are_known_it_is_not_even_tried(cores: int) -> None:
    _, slots = lived(cores)

    assert set(slots) == set(range(1, cores + 1))
