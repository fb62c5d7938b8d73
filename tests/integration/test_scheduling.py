"""Real clusters under the search: jobs grow, make room and finish; deaths lose nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import Cluster, await_gone, kill

SAMPLES = 240
SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(240, 8)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01), data, batch_size=24)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep(0.004 + 0.001 * len(x))  # like a device of its own
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base: Path = tmp_path_factory.mktemp("o")
    made = Cluster(base / "home", base / "jobs", policy="ones")
    made.up()
    yield made
    made.down()


@pytest.fixture
def cluster(house: Cluster) -> Iterator[Cluster]:
    """Four slots of one node under `ones`; no job is left behind."""
    yield house
    house.clear()


def submit(cluster: Cluster, epochs: int, **fields: Any) -> str:
    return cluster.submit(
        SCRIPT,
        **{
            "batch_size": 24,
            "max_batch_size": 96,
            "max_local_batch": 48,
            "slots": [1, 4],
            "record_samples": True,
            "stop": {"epochs": epochs},
            **fields,
        },
    )


def explained(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    decisions: list[dict[str, Any]] = cluster.ones("explain", job, "-o", "json").json["decisions"]
    return decisions


def search_process(cluster: Cluster) -> int:
    """The child that thinks for the controller."""
    controller = int((cluster.home / "run" / "controller.pid").read_text())
    (child,) = psutil.Process(controller).children()
    return child.pid


def check_all_done(cluster: Cluster, jobs: list[str], epochs: int) -> list[dict[str, Any]]:
    """All succeeded, every sample was seen once an epoch, every group was explained."""
    ids = list(range(SAMPLES))
    told = []
    for job in jobs:
        assert cluster.wait(job).code == 0, cluster.show(job)["history"]
        assert cluster.samples(job) == dict.fromkeys(range(1, epochs + 1), ids)
        decisions = explained(cluster, job)
        assert all(decision["why"] for decision in decisions)
        ordered = [version["version"] for version in cluster.show(job)["versions"]]
        assert [decision["version"] for decision in decisions] == ordered
        told += decisions
    assert slots_had_one_owner(cluster)
    return told


def slots_had_one_owner(cluster: Cluster) -> bool:
    """No two members of groups on one slot, at any event of the history."""
    members: dict[tuple[Any, ...], str] = {}
    for event in cluster.events():
        who = (event["job"], event.get("version"), event.get("rank"))
        if event["type"] == "worker.ready":
            members[who] = event["slot"]
        elif event["type"] == "worker.exited":
            members.pop(who, None)
        if max(Counter(members.values()).values(), default=0) > 1:
            return False
    return True


def test_jobs_grow_make_room_and_finish(cluster: Cluster) -> None:
    first = submit(cluster, 18)
    grown = cluster.until(first, lambda shown: shown["slots"] >= 3)
    others = [submit(cluster, 8) for _ in range(4)]
    decisions = check_all_done(cluster, others, 8) + check_all_done(cluster, [first], 18)

    assert grown["rescales"] >= 1
    codes = Counter(decision["code"] for decision in decisions)
    # Each begins once, and again each time that it had lost its slots; `fill` where the search
    # took too long to answer.
    changes = [c for job in (first, *others) for c in cluster.show(job)["history"]]
    pauses = sum(change["to_state"] == "paused" for change in changes)
    begun = codes["start"] + codes["resume"] + codes["fill"]
    assert begun == 5 + pauses, [c["why"] for c in changes]
    assert codes["grow"] >= 2
    assert codes["shrink"] + codes["pause"] >= 1
    searched = [d for d in decisions if "slots_then" in d["numbers"]]
    assert all(d["numbers"]["slots_then"] == len(d["to"]["slots"]) for d in searched)
    # The rest came about without the search: while it was away, or because a worker was lost.
    rest = [d for d in decisions if d not in searched]
    assert {d["code"] for d in rest} <= {"fill", "lost"}, [(d["code"], d["why"]) for d in rest]


def test_a_quiet_cluster_stays_quiet(pair: Cluster) -> None:
    jobs = [submit(pair, 10_000, slots=[1, 1], max_batch_size=24) for _ in range(4)]
    for job in jobs:
        pair.until_epoch(job, 3)
    before = pair.events()

    for job in jobs:
        pair.until_epoch(job, 15)

    kinds = {event["type"] for event in pair.events()[len(before) :]}
    assert kinds == {"job.epoch"}


def test_a_job_that_waits_says_what_it_waits_for(pair: Cluster) -> None:
    pair.until_epoch(submit(pair, 10_000), 1)

    late = submit(pair, 5, slots=[5, 6])

    (waits,) = explained(pair, late)
    assert (waits["code"], waits["outcome"]) == ("too_large", "waits")
    assert waits["numbers"] == {"needs": 5.0, "slots": 4.0}


def test_the_death_of_the_search_costs_nothing(cluster: Cluster) -> None:
    jobs = [submit(cluster, 14)]
    cluster.until(jobs[0], lambda shown: shown["slots"] >= 2)
    dead = search_process(cluster)

    kill(dead)
    jobs += [submit(cluster, 14), submit(cluster, 14)]
    kill(_another(cluster, dead))
    decisions = check_all_done(cluster, jobs, 14)

    assert any(decision["code"] == "grow" for decision in decisions)
    assert "search process ended" in (cluster.home / "logs" / "controller.log").read_text()


def test_a_search_that_hangs_leaves_no_slot_idle(pair: Cluster) -> None:
    first = submit(pair, 10_000, slots=[1, 1])
    pair.until_epoch(first, 1)
    hanging = search_process(pair)
    os.kill(hanging, signal.SIGSTOP)

    second = submit(pair, 3, slots=[1, 1])
    decisions = check_all_done(pair, [second], 3)
    kill(hanging)

    assert decisions[0]["code"] == "fill"


@pytest.mark.parametrize("victim", ["controller", "agents"])
def test_a_death_during_rescales_loses_nothing(cluster: Cluster, victim: str) -> None:
    jobs = [submit(cluster, 18)]
    cluster.until(jobs[0], lambda shown: shown["slots"] >= 2)
    jobs += [submit(cluster, 18), submit(cluster, 18)]
    for _ in range(3):
        cluster.until(jobs[0], lambda shown: shown["state"] in {"rescaling", "succeeded"})
        pids = cluster.up()[victim]
        for pid in [pids] if isinstance(pids, int) else pids:
            kill(pid)
            await_gone(pid)
        cluster.up()

    check_all_done(cluster, jobs, 18)


def test_jobs_whose_workers_on_a_node_die_go_on(pair: Cluster) -> None:
    jobs = [submit(pair, 40), submit(pair, 40)]
    pair.until(jobs[1], lambda shown: shown["slots"] >= 1)
    pair.until(jobs[0], lambda shown: shown["slots"] >= 2)
    here = pair.show(jobs[0])["workers"][0]

    for worker in pair.show(jobs[0])["workers"] + pair.show(jobs[1])["workers"]:
        if worker["node"] == here["node"] and worker["pid"]:
            os.kill(worker["pid"], signal.SIGKILL)

    check_all_done(pair, jobs, 40)


def _another(cluster: Cluster, dead: int) -> int:
    """The search process that came after `dead`."""
    found: list[int] = []

    def came(_: object) -> bool:
        controller = int((cluster.home / "run" / "controller.pid").read_text())
        found[:] = [c.pid for c in psutil.Process(controller).children() if c.pid != dead]
        return bool(found)

    cluster.until(cluster.ones("ps", "--all", "-o", "quiet").out.split()[0], came)
    return found[0]
