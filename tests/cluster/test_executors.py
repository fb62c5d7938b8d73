"""`ones sim compare --executor` on real clusters of Ray and Dask."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from controlplane.sim.experiment import load
from schemas import __version__
from tests.support.compute_clusters import DaskCluster, RayCluster

# The first simulation of this policy never ends, wherever it runs.
POLICY = """
import os, time
from pathlib import Path
from controlplane.policy.baselines.fifo import Fifo

HERE = Path(__file__).parent

class Logged(Fifo):
    def __init__(self, options=None):
        super().__init__(options)
        node = os.environ.get("NODE", "")
        with (HERE / "starts").open("a") as file:
            file.write(f"{node}\\n")
        try:
            (HERE / "first").open("x").write(node)
        except FileExistsError:
            return
        time.sleep(600.0)
"""
SMALL = ("--gpus", "4", "--jobs", "8")
LIMIT_S = 600.0
CLUSTERS = {"ray": RayCluster, "dask": DaskCluster}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def compare(
    folder: Path, results: str, *options: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = ("sim", "compare", "--results", results, *SMALL, *options)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "controlplane.cli.main", *command],
        cwd=folder, env={**os.environ, **(env or {})}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def said_at_end(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=LIMIT_S)
    return said


def wait_until(path: Path, lines: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < end, path
        assert process.poll() is None, said_at_end(process)
        time.sleep(0.05)


def same(path: Path) -> dict[str, bytes]:
    """The results, without the measured durations."""
    return {
        each.cell: msgspec.json.encode(msgspec.structs.replace(each, wall_s=0.0, decisions_ms=()))
        for each in load(path)
    }


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_killed_node_costs_only_its_run_and_results_equal_local_ones(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "logged.py").write_text(POLICY)
    starts = tmp_path / "starts"
    what = ("--policies", "tiresias,logged:Logged", "--seeds", "0-19")
    with CLUSTERS[name](tmp_path / "r") as cluster:
        cluster.add("a")
        cluster.add("b")
        given = {cluster.variable: cluster.address}

        far = compare(tmp_path, "far.jsonl", *what, "--executor", name, env=given)
        wait_until(tmp_path / "far.jsonl", 5, far)
        wait_until(tmp_path / "first", 1, far)
        cluster.kill((tmp_path / "first").read_text())
        said = said_at_end(far)

    assert far.returncode == 0, said
    assert len(starts.read_text().splitlines()) == 20 + 1
    starts.unlink()
    near = compare(tmp_path, "near.jsonl", *what, "--workers", "2")
    said = said_at_end(near)
    assert near.returncode == 0, said
    assert len(same(tmp_path / "near.jsonl")) == 40
    assert same(tmp_path / "far.jsonl") == same(tmp_path / "near.jsonl")


@pytest.mark.parametrize("name", CLUSTERS)
def test_results_are_kept_when_the_cluster_is_gone(tmp_path: Path, name: str) -> None:
    what = ("--policies", "tiresias", "--seeds", "0-19", "--executor", name)
    with CLUSTERS[name](tmp_path / "r") as cluster:
        cluster.add("a")
        process = compare(tmp_path, "far.jsonl", *what, env={cluster.variable: cluster.address})
        wait_until(tmp_path / "far.jsonl", 2, process)

        cluster.kill("head")
        said = said_at_end(process)

    done = len(load(tmp_path / "far.jsonl"))
    assert process.returncode == 2
    assert f"{20 - done} failed: tiresias with seed" in said
    assert "is gone" in said
    assert f"the {done} others are kept in far.jsonl: run the same command again" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("schemas", "found"),
    [("__version__ = '0.0.1'", "ONES 0.0.1"), ("raise ImportError", "no ONES")],
)
def test_a_worker_without_this_release_stops_the_comparison(
    tmp_path: Path, schemas: str, found: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "schemas.py").write_text(schemas)
    with DaskCluster(tmp_path / "r") as cluster:
        cluster.add("a", env={"PYTHONPATH": str(tmp_path / "other")})

        process = compare(
            tmp_path, "far.jsonl", "--policies", "tiresias", "--executor", "dask",
            env={cluster.variable: cluster.address},
        )  # fmt: skip
        said = said_at_end(process)

    assert process.returncode == 2
    assert f"stopped after 0 of 5 simulations: a worker has {found}" in said
    assert f"install ONES {__version__} for {Path(sys.executable).parent}/" in said
