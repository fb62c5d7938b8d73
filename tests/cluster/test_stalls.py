"""Real clusters, real workers: a rank that hangs is named, and holds up the others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import pytest

from tests.support.cluster import (
    RESIZED,
    Cluster,
    assert_nothing_lost,
    further,
    kinds,
    running,
    training_job,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own

LONGEST_PAUSE_S: Final = 35.0  # 30 s without an answer, the reports of them, and the recovery
HANGS: Final = RESIZED.replace(
    "for epoch in agent.epochs(1000):\n",
    """
def evaluate():
    import threading
    threading.Event().wait()

for epoch in agent.epochs(1000):
    if epoch == 2 and agent.rank == 1:
        evaluate()
""",
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("h")) as made:
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    """Four slots of one node; no job is left behind."""
    yield house
    house.clear()


@pytest.mark.parametrize("fault", ["handover.receive", "reduce"])
def test_a_newcomer_that_stops_costs_the_others_half_a_minute(cluster: Cluster, fault: str) -> None:
    job = training_job(cluster, 2, faults=f"{fault}:rank=2:version=2=stop")
    further(cluster, job)  # the pause lies between two epochs
    assert cluster.ones("resize", job, "--slots", "3").code == 0
    cluster.until(job, lambda s: "rank 2 did not answer" in s["reason"])
    cluster.until(job, lambda s: s["state"] == "running")
    further(cluster, job)
    shown = cluster.until(job, lambda s: len(s["workers"]) == 2)  # the stopped process is gone

    assert kinds(shown) == [("start", "formed"), ("join", "broken"), ("recover", "formed")]
    # `shown` has the latest epochs only, and more of them end while the process is ended.
    ends = [e["time"] for e in cluster.events() if (e["type"], e["job"]) == ("job.epoch", job)]
    pauses = [later - first for first, later in pairwise(ends)]
    assert 30.0 < max(pauses) < LONGEST_PAUSE_S
    assert_nothing_lost(cluster, job)


def test_a_rank_that_hangs_is_named_and_left_behind_by_a_pause(cluster: Cluster) -> None:
    job = training_job(cluster, 2, script=HANGS, progress_deadline_s=60)
    line = HANGS[: HANGS.index("threading.Event().wait()")].count("\n") + 1
    place = f"rank 1 is at train.py:{line} in evaluate"
    shown = cluster.until(job, lambda s: s["reason"].startswith("no step for "))
    said = cluster.ones("ps").out
    assert cluster.ones("pause", job).code == 0
    cluster.until(job, lambda s: "rank 1 made no step for" in s["reason"])
    paused = cluster.until(job, lambda s: s["state"] == "paused")

    assert (place in shown["reason"], place in said) == (True, True), (shown["reason"], said)
    assert paused["epoch"] == 2
    assert kinds(paused)[-2:] == [("recover", "formed"), ("suspend", "suspended")]
