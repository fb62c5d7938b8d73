"""Jobs that a search may grow and shrink, and what holds when they have ended."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import psutil

from controlplane.client import BlockingClient
from tests.support.cluster import LIMIT_S, LOOK_S, Cluster

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


def until_searched(cluster: Cluster) -> None:
    """The search is there and answers; a new process takes its time to start on a busy host."""
    deadline = time.monotonic() + LIMIT_S
    with BlockingClient(cluster.home, timeout=LIMIT_S) as client:
        while not client.search().running:
            assert time.monotonic() < deadline, cluster.said()
            time.sleep(LOOK_S)


def check_all_done(cluster: Cluster, jobs: list[str], epochs: int) -> list[dict[str, Any]]:
    """All succeeded, every sample was seen once an epoch, every group was explained."""
    ids = list(range(SAMPLES))
    told = []
    for job in jobs:
        assert cluster.wait(job).code == 0, cluster.show(job)["history"]
        assert cluster.samples(job) == dict.fromkeys(range(1, epochs + 1), ids)
        decisions = explained(cluster, job)
        assert all(decision["reason"] for decision in decisions)
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
