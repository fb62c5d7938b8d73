"""Limits of jobs by control groups, with real jobs of a real agent; needs a host that has them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.cgroups import MEMORY, PIDS, Hierarchy, find, members
from tests.support.cluster import Cluster, await_gone, kill, looked, running

OFFERED = {name for tree in find() for name in tree.controllers}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif({MEMORY, PIDS} != OFFERED, reason="needs control groups that it may divide"),
]
MOST = 384 << 20
HELD = {"OMP_NUM_THREADS": "1", "PAUSE_S": "0.01"}
GREEDY = "taken = bytearray(2 << 30)"
FORKS = """
import os, signal
born = 0
while born < 1000:
    try:
        first = os.fork()
    except BlockingIOError:
        break
    if first == 0:
        os.setsid()
        try:
            second = os.fork()
        except BlockingIOError:
            os._exit(1)
        if second == 0:
            signal.pause()
        os._exit(0)
    if os.waitpid(first, 0)[1]:
        break
    born += 1
print(born)
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("l"), slots=2) as made:
        pids = made.up()
        with (made.home / "agent-1.toml").open("a") as file:
            file.write(f"[jobs]\nmemory_bytes = {MOST}\npids = 100\n")
        os.kill(pids["agents"][0], signal.SIGHUP)
        log, changed = (
            made.home / "logs" / "agent-1.log",
            '"changed": ["jobs.pids", "jobs.memory_bytes"]',
        )
        looked(lambda: changed in log.read_text(), why=made.said)
        yield made
    assert list(groups(made)) == []


def groups(house: Cluster, tree: Hierarchy | None = None) -> list[Path]:
    """The groups of a cluster's jobs."""
    log = (house.home / "logs" / "agent-1.log").read_text().splitlines()
    ready = next(json.loads(line) for line in log if '"agent ready"' in line)
    trees = [tree] if tree else find()
    return [path for tree in trees for path in (tree.base / ready["groups"]).glob("job-*")]


def test_a_job_beyond_its_memory_limit_fails_without_its_neighbour(
    house: Cluster, tmp_path: Path
) -> None:
    held = {**HELD, "HOLD": str(tmp_path / "go on")}
    neighbour = house.submit(env=held)
    house.until_epoch(neighbour, 1)

    greedy = house.submit(GREEDY, retries=0)

    ended = house.until(greedy, lambda shown: shown["state"] == "failed")
    assert ended["reason"] == (
        "rank 0 was killed: the job's processes on the node exceeded 0.375 GiB of memory; "
        "reduce it, or ask the operator to raise memory_bytes in [jobs]"
    )
    (tmp_path / "go on").touch()
    assert house.wait(neighbour).code == 0


def test_a_fork_bomb_reaches_its_limit_and_leaves_no_process(house: Cluster) -> None:
    job = house.submit(FORKS)

    assert house.wait(job).code == 0
    (born,) = house.output(job)
    assert 20 < int(born) < 100
    house.until(job, lambda shown: not shown["workers"])
    assert [path for path in groups(house) if path.name == f"job-{job}"] == []


def test_limits_survive_a_killed_agent(house: Cluster, tmp_path: Path) -> None:
    job = house.submit(env={**HELD, "HOLD": str(tmp_path / "go on")})
    (worker,) = house.until_epoch(job, 1)["workers"]
    before = {path: members(path / f"{job}.v1.r0") for path in groups(house)}

    kill(house.up()["agents"][0])
    house.up()

    assert house.show(job)["workers"] == [worker]
    assert {path: members(path / f"{job}.v1.r0") for path in groups(house)} == before
    assert all(worker["pid"] in inside for inside in before.values())
    house.ones("cancel", job)
    await_gone(worker["pid"])


def test_a_new_agent_limits_its_first_job(house: Cluster) -> None:
    house.clear()
    kill(house.up()["agents"][0])
    house.up()

    greedy = house.submit(GREEDY, retries=0)

    ended = house.until(greedy, lambda shown: shown["state"] in {"failed", "succeeded"})
    assert "exceeded 0.375 GiB of memory" in ended["reason"], house.said()
