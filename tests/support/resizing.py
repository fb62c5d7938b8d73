"""A job that trains until it is cancelled, orders to it, and what it may never lose."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.support.cluster import Cluster

SAMPLES = 96
SCRIPT = """
import hashlib, os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))


model, optimizer, loader = agent.load(
    build_model, lambda p: torch.optim.AdamW(p, lr=0.01), data, batch_size=12)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
for epoch in agent.epochs(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        time.sleep(0.035)  # what trains while a test waits leaves the cores to others
    whole = b"".join(bytes(p.detach().view(-1).view(torch.uint8).tolist())
                     for p in model.parameters())
    print("epoch", epoch, "rank", agent.rank, hashlib.sha1(whole).hexdigest())
    agent.report(size=agent.world_size)
"""


def training(cluster: Cluster, slots: int = 1, faults: str = "", **fields: Any) -> str:
    """A job that trains on so many slots until it is cancelled."""
    job = cluster.submit(
        SCRIPT,
        **{
            "batch_size": 12,
            "max_batch_size": 96,
            "max_local_batch": 12,
            "slots": [1, 4],
            "slots_wanted": slots,
            "record_samples": True,
            "stop": {"epochs": 100_000},
            "env": {"OMP_NUM_THREADS": "1", "ELASTIC_FAULTS": faults},
            **fields,
        },
    )
    cluster.until(job, lambda shown: shown["state"] == "running")
    return job


def resize(cluster: Cluster, job: str, slots: int, *more: str) -> dict[str, Any]:
    """Order a size, and wait until it is there."""
    done = cluster.ones("resize", job, "--slots", str(slots), *more)
    assert done.code == 0, done.err
    state = "running" if slots else "paused"
    return cluster.until(job, lambda s: s["slots"] == slots and s["state"] == state)


def further(cluster: Cluster, job: str, epochs: int = 2) -> dict[str, Any]:
    """The job when it has finished some more epochs."""
    return cluster.until_epoch(job, cluster.show(job)["epoch"] + epochs)


def assert_nothing_lost(cluster: Cluster, job: str, *, equal_after: int = 0) -> None:
    """End the job: every sample once in every epoch, and equal parameters on all ranks.

    `equal_after`: an epoch in which a damaged state may not have been sent again yet.
    """
    shown = cluster.show(job)
    assert cluster.ones("cancel", job).code == 0
    taken = cluster.samples(job)
    whole = {epoch: ids for epoch, ids in taken.items() if epoch <= shown["epoch"]}
    assert whole == {epoch: list(range(SAMPLES)) for epoch in range(1, shown["epoch"] + 1)}
    digests: dict[str, set[str]] = defaultdict(set)
    for line in cluster.output(job):
        if line.startswith("epoch"):
            _, epoch, _, _, digest = line.split()
            digests[epoch].add(digest)
    apart = {int(epoch) for epoch, found in digests.items() if len(found) > 1}
    assert apart <= set(range(equal_after))


def kinds(shown: dict[str, Any]) -> list[tuple[str, str]]:
    return [(version["kind"], version["outcome"]) for version in shown["versions"]]
