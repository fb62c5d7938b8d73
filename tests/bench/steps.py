"""A training whose workers write the time of each step, and what they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.cluster import Cluster

SCRIPT: Final = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from elastic import ScalingAgent

agent = ScalingAgent.from_env()
samples, batch, width, loaders = (
    int(os.environ[name]) for name in ("SAMPLES", "BATCH", "WIDTH", "LOADERS"))
idle_s, momentum = float(os.environ["IDLE_S"]), float(os.environ["MOMENTUM"])
inputs = torch.randn(samples, 64)
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def build_model():
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 1))


model, optimizer, loader = agent.load(
    build_model, lambda p: torch.optim.SGD(p, lr=0.001, momentum=momentum),
    data, batch_size=batch, num_workers=loaders)
name = os.path.basename(os.environ["ONES_WORKER"])
out = open(os.environ["STEPS"] + name, "w", buffering=1)
for epoch in agent.epochs(100000):
    asked = time.time()
    for x, y in loader:
        got = time.time()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        time.sleep(idle_s)
        loss.backward()
        optimizer.step()
        now = time.time()
        out.write(f"{now} {agent.step + 1} {agent.rank} {agent.world_size} {got - asked}\\n")
        asked = now
    agent.report()
"""


@dataclass(frozen=True)
class Step:
    at: float
    step: int
    rank: int
    size: int
    wait_s: float  # for its batch


def submit(
    cluster: Cluster,
    folder: Path,
    *,
    samples: int = 4096,
    batch: int = 64,
    env: Mapping[str, object] | None = None,
    **fields: Any,
) -> str:
    """Submit a job that trains until it is cancelled; its workers write into a new folder.

    `env` may change WIDTH, IDLE_S (of each step), MOMENTUM and LOADERS.
    """
    folder.mkdir()
    given = {
        "SAMPLES": samples, "BATCH": batch, "WIDTH": 64, "IDLE_S": 0.04, "MOMENTUM": 0.9,
        "LOADERS": 0, "OMP_NUM_THREADS": 1, "STEPS": f"{folder}/",
        "TMPDIR": cluster.base,  # killed workers cannot delete the folders of their loaders
        **(env or {}),
    }  # fmt: skip
    shape = {
        "batch_size": batch, "max_local_batch": batch, "slots": [1, 4], "record_samples": True,
        "stop": {"epochs": 100_000}, **fields,
    }  # fmt: skip
    return cluster.submit(SCRIPT, env={name: str(one) for name, one in given.items()}, **shape)


def steps_of(folder: Path) -> dict[str, list[Step]]:
    """Return the steps of each worker."""
    found = {}
    for path in sorted(folder.iterdir()):
        rows = [line.split() for line in path.read_text().split("\n")[:-1]]
        found[path.name] = [
            Step(float(at), int(step), int(rank), int(size), float(wait))
            for at, step, rank, size, wait in rows
        ]
    return found


def ends(folder: Path) -> list[float]:
    """Return when steps of any worker ended, seconds since the epoch."""
    return sorted(step.at for steps in steps_of(folder).values() for step in steps)
