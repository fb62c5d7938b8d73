"""A host dies: its agent and workers all at once, and nobody says so but their peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster, assert_nothing_lost, further, kill, kinds, training_job


@pytest.mark.slow
def test_a_job_continues_seconds_after_a_host_died(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "home", tmp_path / "jobs", slots=2, agents=2, policy="fifo")
    try:
        pids = cluster.up()
        job = training_job(cluster, 4)
        workers = cluster.show(job)["workers"]

        kill(pids["agents"][1])
        for worker in workers:
            if worker["node"] == "node-2":
                kill(worker["pid"])
        cluster.until(job, lambda s: ("recover", "formed") in kinds(s) and s["slots"] == 2)
        further(cluster, job)

        times = {event["type"]: event["time"] for event in cluster.events()}
        lost = [e for e in cluster.events() if e["type"] == "node.lost"]
        assert [event["node"] for event in lost] == ["node-2"]
        assert lost[0]["silent_s"] < 15.0, times  # 30 without those who miss them
        assert_nothing_lost(cluster, job)
    finally:
        cluster.down()
