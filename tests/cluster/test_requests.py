"""Requests for labels, cores and whole nodes, and jobs without slots, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, running, toml, training_job

pytestmark = pytest.mark.slow  # a cluster of its own

WAITS = ("sh", "-c", "echo begun; while ! test -e go; do sleep 0.1; done")
ENVIRONMENT = 'echo "$ONES_SLOTS slots, $OMP_NUM_THREADS threads"; exit 3'


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("o"), agents=2, slots=2, policy="fair") as made:
        made.down()
        for node, zone in (("1", "a"), ("2", "b")):
            settings = {"labels": {"zone": zone}, "places": {"cpus": 1.0}}
            with (made.home / f"agent-{node}.toml").open("a") as file:
                file.write(toml(settings))
        made.up()
        yield made


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    yield house
    house.clear()


def submitted(cluster: Cluster, folder: Path, *options: str) -> str:
    """A program that runs until it is cancelled."""
    done = cluster.ones("run", "-d", "-o", "json", *options, "--", *WAITS, cwd=folder)
    assert done.code == 0, done.err
    return done.json["job"]


def nodes_of(shown: dict[str, Any]) -> set[str]:
    return {worker["slot"].partition("/")[0] for worker in shown["workers"]}


def test_an_elastic_job_trains_and_grows_only_where_its_label_is(cluster: Cluster) -> None:
    for zone, node in (("a", "node-1"), ("b", "node-2")):
        job = training_job(cluster, slots=1, constraints={"zone": zone})

        shown = cluster.until(job, lambda shown: shown["slots"] == 2)

        assert nodes_of(shown) == {node}
        cluster.clear()


def test_a_job_without_slots_runs_beside_full_slots_with_its_exit_code(
    cluster: Cluster, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.until(submitted(cluster, tmp_path, "--slots", "2"), is_running)

    done = cluster.ones("run", "--slots", "0", "--", "sh", "-c", ENVIRONMENT, cwd=tmp_path)

    assert (done.code, done.out) == (3, "0 slots, 1 threads\n"), done.err
    beside = submitted(cluster, tmp_path, "--slots", "0", "--constraint", "zone=b")
    shown = cluster.until(beside, is_running)
    assert (nodes_of(shown), shown["slots"], shown["reason"]) == (
        {"node-2"}, 0, "runs without slots",
    )  # fmt: skip
    cluster.ones("cancel", beside)
    cluster.until(beside, lambda shown: not shown["workers"])


def test_an_exclusive_job_and_a_job_with_many_cores_keep_others_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = submitted(cluster, tmp_path, "--exclusive", "--constraint", "zone=a")
    cluster.until(alone, is_running)

    last = submitted(cluster, tmp_path, "--slots", "2")
    cluster.until(last, is_running)
    waits = submitted(cluster, tmp_path)

    reason = cluster.until(waits, lambda shown: shown["reason"] != "submitted")["reason"]
    assert "could have 0" in reason
    cluster.ones("cancel", alone)
    assert nodes_of(cluster.until(waits, is_running)) == {"node-1"}


def test_a_request_that_no_node_meets_is_named_at_submission_and_while_it_waits(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = ("run", "-d", "--constraint", "zone=c", "--", *WAITS)

    done = cluster.ones(*options, cwd=tmp_path)

    why = "no node has label zone = c; nodes report: zone = a, zone = b"
    assert f"{why}: it waits until such a node joins" in done.err
    cluster.until(done.out.split()[0], lambda shown: shown["reason"] == why)


def is_running(shown: dict[str, Any]) -> bool:
    return shown["state"] == "running"
