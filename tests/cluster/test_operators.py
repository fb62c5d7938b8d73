"""What operators do to a live cluster: another policy, and nodes that say that they will go away."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    await_gone,
    further,
    kill,
    running,
    training_job,
)

pytestmark = pytest.mark.slow  # clusters of their own


def test_jobs_train_on_while_the_policy_is_exchanged(tmp_path: Path) -> None:
    with running(tmp_path, policy="ones") as cluster:
        jobs = [training_job(cluster, slots=2) for _ in range(2)]

        done = cluster.ones("policy", "set", "tiresias", "--set", "limits=[3600.0]", "-o", "json")

        assert done.json["name"] == "tiresias", done.err
        for job in jobs:
            further(cluster, job)
        kill(cluster.up()["controller"])
        cluster.up()
        assert cluster.ones("policy", "show", "-o", "quiet").out == "tiresias\n"
        for job in jobs:
            further(cluster, job)
            assert "job.paused" not in [event["type"] for event in cluster.events(job)]
            assert_nothing_lost(cluster, job)


def nodes_of(shown: dict[str, Any]) -> set[str]:
    return {worker["node"] for worker in shown["workers"]}


def until_on(cluster: Cluster, job: str, node: str) -> None:
    cluster.until(job, lambda shown: shown["state"] == "running" and nodes_of(shown) == {node})


def test_a_job_leaves_a_node_in_time_that_gives_notice_by_a_file_or_by_term(tmp_path: Path) -> None:
    with running(tmp_path, agents=2, slots=1) as cluster:
        cluster.down()
        for path in cluster.home.glob("agent-*.toml"):
            with path.open("a") as file:
                file.write(f'[notice]\nfile = "{path.stem}.notice"\non_term_s = 600.0\n')
        pids = cluster.up()
        job = training_job(cluster)
        (first,) = nodes_of(cluster.show(job))
        (second,) = {"node-1", "node-2"} - {first}
        file_name = f"agent-{first[-1]}.notice"

        (cluster.home / file_name).write_text("600\n")
        until_on(cluster, job, second)
        listed = {one["node"]: one for one in cluster.ones("node", "list", "-o", "json").json}
        assert listed[first]["reason"] == f"drained by notice of {first}: {file_name} appeared"

        assert cluster.ones("node", "undrain", first).code == 0
        agent = pids["agents"][int(second[-1]) - 1]
        os.kill(agent, signal.SIGTERM)
        await_gone(agent)
        until_on(cluster, job, first)
        further(cluster, job)
        assert "job.paused" not in [event["type"] for event in cluster.events(job)]
        assert_nothing_lost(cluster, job)
