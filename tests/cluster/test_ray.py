"""Nodes from a real Ray cluster of three raylets and more, all on this host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    further,
    looked,
    training_job,
)
from tests.support.commands import Finished, ones
from tests.support.compute_clusters import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FREE = (
    "import json, ray; ray.init(log_to_driver=False); print(json.dumps(ray.available_resources()))"
)


class Provided(Cluster):
    """A cluster whose nodes come from Ray."""

    ray: RayCluster

    def cluster(self, command: str, *options: str) -> Finished:
        """Run `ones cluster ...`."""
        line = ("cluster", command, *options, "--dir", str(self.home), "-o", "json")
        done = ones(*line, limit_s=240, RAY_ADDRESS=self.ray.address)
        assert done.code == 0, done.err + self.said()
        return done

    def up_with_ray(self) -> None:
        """Start the cluster, with jobs as the user of the tests: others may not see its Python."""
        self.cluster("up", "--ray", "--notice", "20s", "--address", "127.0.0.1")
        with (self.home / "autoscaler-agent.toml").open("a") as file:
            file.write("\n[jobs]\ntrust_each_other = true\n")

    def nodes(self) -> dict[str, tuple[str, int]]:
        """Return state and slots of the nodes that are up."""
        done = self.ones("node", "list", "-o", "json")
        assert done.code == 0, done.err
        rows: list[dict[str, Any]] = done.json
        found = {row["node"]: (row["state"], row["slots"]) for row in rows}
        return {name: one for name, one in found.items() if one[0] == "up"}

    def until_nodes(self, *slots: int) -> set[str]:
        """Return the names of the nodes when all are up and have these slots."""
        wanted = sorted(("up", each) for each in slots)
        why = lambda: f"{self.nodes()} {self.cluster('status').json['decisions']} {self.said()}"  # noqa: E731
        found = looked(self.nodes, lambda found: sorted(found.values()) == wanted, why)
        return set(found)

    def free(self) -> dict[str, float]:
        """Return the CPUs and GPUs that Ray can give to others."""
        done = subprocess.run(
            [sys.executable, "-c", FREE], env=self.ray.environ, capture_output=True, check=True
        )
        free = json.loads(done.stdout)
        return {name: free[name] for name in ("CPU", "GPU") if free.get(name)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Provided]:
    with RayCluster(tmp_path / "r") as engine:
        engine.add("a", cpus=2)
        engine.add("b", cpus=2)
        made = Provided(tmp_path / "home", tmp_path / "jobs")
        made.ray = engine
        made.up_with_ray()
        try:
            yield made
        finally:
            made.cluster("down")


def test_agents_come_and_go_with_the_nodes_of_ray_and_a_job_keeps_every_sample(
    cluster: Provided,
) -> None:
    first = cluster.until_nodes(2, 2)
    assert cluster.free() == {}
    job = training_job(cluster, slots=4)
    further(cluster, job)

    cluster.ray.kill("b")
    left = cluster.until_nodes(2)
    assert left < first
    further(cluster, job)

    cluster.ray.add("c", cpus=4, gpus=1)
    second = cluster.until_nodes(1, 2)
    assert cluster.free() == {}
    (name,) = left
    cluster.ray.drain(name.removeprefix("ray-"))
    assert cluster.until_nodes(1) == second - left
    further(cluster, job)
    assert_nothing_lost(cluster, job)

    whys = [f"{one['action']}: {one['why']}" for one in cluster.cluster("status").json["decisions"]]
    assert any("Ray drains it" in why for why in whys), whys


def test_resources_return_to_ray_after_a_drain_and_at_the_end(
    cluster: Provided,
) -> None:
    cluster.until_nodes(2, 2)
    (drained, *_) = cluster.nodes()
    assert cluster.ones("node", "drain", drained).code == 0
    looked(cluster.free, lambda free: free == {"CPU": 2.0})
    looked(lambda: cluster.ones("node", "list").out, lambda out: drained not in out)

    cluster.cluster("down")

    looked(cluster.free, lambda free: free == {"CPU": 4.0})
    cluster.up_with_ray()
    cluster.until_nodes(2, 2)
