"""Two real nodes under the search: quiet when nothing happens, whole when workers of one die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.client import BlockingClient
from tests.support.cluster import (
    Cluster,
    assert_nothing_lost,
    explained,
    further,
    kill,
    kinds,
    looked,
    resize,
    running,
    submit_searched,
    training_job,
)

pytestmark = pytest.mark.slow  # a cluster or devices of its own


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("n"), slots=2, agents=2, policy="ones") as made:
        yield made


@pytest.fixture
def pair(nodes: Cluster) -> Iterator[Cluster]:
    """Two nodes of two slots, on which no job is left behind."""
    yield nodes
    nodes.clear()


def test_a_quiet_cluster_stays_quiet(pair: Cluster) -> None:
    jobs = [submit_searched(pair, 10_000, slots=[1, 1], max_batch_size=24) for _ in range(4)]
    for job in jobs:
        pair.until_epoch(job, 3)
    before = pair.events()

    for job in jobs:
        pair.until_epoch(job, 15)

    kinds = {event["type"] for event in pair.events()[len(before) :]}
    assert kinds == {"job.epoch"}


def test_a_group_spans_nodes_and_survives_the_loss_of_a_worker_there(pair: Cluster) -> None:
    job = training_job(pair, 2)
    shown = resize(pair, job, 4)
    far = [w for w in shown["workers"] if w["node"] != shown["workers"][0]["node"]]
    kill(far[-1]["pid"])
    pair.until(job, lambda s: ("recover", "formed") in kinds(s) and s["slots"] == 4)
    further(pair, job)

    assert len(far) == 2
    assert_nothing_lost(pair, job)


def test_a_drained_node_is_emptied_without_losing_samples_and_returned(pair: Cluster) -> None:
    job = training_job(pair, 2)
    node = pair.show(job)["workers"][0]["node"]

    asked = pair.ones(
        "node", "drain", node, "--reason", "new kernel", "--deadline", "600", "-o", "json"
    )
    moved = pair.until(job, lambda s: {w["node"] for w in s["workers"]}.isdisjoint({node}))
    until_state(pair, node, "drained")
    further(pair, job)
    back = pair.ones("node", "undrain", node, "-o", "json")

    assert (asked.code, asked.json["state"]) == (0, "draining")
    assert (back.code, back.json["state"]) == (0, "up")
    assert moved["slots"] >= 1
    told = [e["type"] for e in pair.events() if e["type"].startswith("node.")][-3:]
    assert told == ["node.draining", "node.drained", "node.undrained"]
    whys = [one["reason"] for one in explained(pair, job) if one["code"] == "drain"]
    assert whys[0].startswith(f"{node} is drained by ")
    assert ": new kernel; " in whys[0]
    assert_nothing_lost(pair, job)


def until_state(cluster: Cluster, node: str, state: str) -> None:
    """Wait until `ones node list` shows a node so."""
    with BlockingClient(cluster.home) as client:
        looked(
            lambda: [(one.node, one.state) for one in client.nodes()],
            lambda seen: (node, state) in seen,
        )


MADE = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
data = TensorDataset(torch.randn(30, 2), torch.randn(30, 1))
model, optimizer, loader = agent.load(
    lambda: nn.Linear(2, 1), lambda p: torch.optim.Adam(p), data, batch_size=6
)
for epoch in agent.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
open(f"rank{agent.rank}.txt", "w").write(f"rank {agent.rank}")
os.symlink("/etc/hostname", "away") if agent.rank == 0 else None
"""


def test_files_of_every_rank_are_fetched_from_their_nodes(pair: Cluster, tmp_path: Path) -> None:
    job = pair.submit(MADE, name="made", slots=[3, 3], batch_size=6, max_batch_size=6)
    assert pair.wait(job).code == 0
    slots = pair.show(job)["versions"][0]["slots"]

    done = pair.ones("fetch", job, "--to", str(tmp_path / "to"), "-o", "json")

    made = {str(Path(f["path"]).relative_to(tmp_path / "to")) for f in done.json["files"]}
    nodes = [slot.split("/")[0] for slot in slots]
    assert (done.code, done.json["missing"]) == (0, [])
    assert done.json["refused"] == [f"{nodes[0]}: away: a link that leads out of the job's folder"]
    assert len(set(nodes)) == 2
    ranks = {f"work/{node}/rank{rank}.txt" for rank, node in enumerate(nodes)}
    kept = {f"checkpoints/epoch-{epoch:06d}.v1.pt" for epoch in (1, 2)}
    assert made == ranks | kept | {"model.pt"}
    import torch  # noqa: PLC0415 - only here

    state = torch.load(tmp_path / "to" / "model.pt", weights_only=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes == {"weight": (1, 2), "bias": (1,)}
