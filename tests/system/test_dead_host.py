"""A host dies: its agent and workers all at once, and nobody says so but their peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import (
    assert_nothing_lost,
    further,
    kill,
    kinds,
    running,
    training_job,
)


@pytest.mark.slow
def test_a_job_continues_seconds_after_a_host_died(tmp_path: Path) -> None:
    with running(tmp_path, slots=2, agents=2) as cluster:
        job = training_job(cluster, 4)
        workers = cluster.show(job)["workers"]

        kill(cluster.up()["agents"][1])
        for worker in workers:
            if worker["node"] == "node-2":
                kill(worker["pid"])
        cluster.until(job, lambda s: ("recover", "formed") in kinds(s) and s["slots"] == 2)
        further(cluster, job)

        lost = [event for event in cluster.events() if event["type"] == "node.lost"]
        assert [event["node"] for event in lost] == ["node-2"]
        assert lost[0]["silent_s"] < 15.0, lost  # 30 without those who miss them
        assert_nothing_lost(cluster, job)
