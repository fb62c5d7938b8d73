"""Sweeps on a real cluster, and what is checked of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controlplane.client import BlockingClient
from schemas.wire.client import Ledger, SweepDetail
from tests.support.cluster import LIMIT_S, LOOK_S, Cluster

FUNCTIONS = """
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


def load(partition, partitions):
    chance = torch.Generator().manual_seed(1000 if partition is None else partition)
    inputs = torch.randn(64, 8, generator=chance)
    return TensorDataset(inputs, (inputs.sum(dim=1, keepdim=True) > 0).float())


def build(values):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=values["lr"])


def train(trained, data, unit):
    for inputs, labels in unit.loader(data, 16):
        trained.optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(trained.model(inputs), labels)
        loss.backward()
        trained.optimizer.step()
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return {"loss": loss.item()}


def evaluate(trained, data, unit):
    inputs, labels = data.tensors
    return {"accuracy": ((trained.model(inputs) > 0).float() == labels).float().mean().item()}
"""


def submit_sweep(
    house: Cluster,
    searcher: str,
    *,
    pause_s: float = 0.2,
    functions: str = FUNCTIONS,
    more: str = "",
    **fields: Any,
) -> str:
    """Submit a sweep that must be accepted; `searcher` and `more` are TOML."""
    folder = house.base / f"sweep-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    (folder / "functions.py").write_text(functions)
    table = {"name": "sweep", "slots": [1, 4], **fields}
    (folder / "sweep.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        + textwrap.dedent(f"""
            [env]
            OMP_NUM_THREADS = "1"
            PAUSE_S = "{pause_s}"
            [sweep]
            input_fn = "functions:load"
            model_fn = "functions:build"
            train_fn = "functions:train"
            eval_fn = "functions:evaluate"
            partitions = 4
            metric = "accuracy"
            {more}
            [sweep.space.lr]
            log_uniform = [1e-3, 1e-1]
            [sweep.searcher]
        """)
        + textwrap.dedent(searcher)
    )
    done = house.ones("sweep", "submit", str(folder / "sweep.toml"), "-o", "json")
    assert done.code == 0, done.err
    job: str = done.json["job"]
    (house.base / job).symlink_to(folder)
    return job


def until(house: Cluster, job: str, holds: Callable[[SweepDetail], bool]) -> SweepDetail:
    """The sweep when it is as wanted; fails when it never is."""
    deadline = time.monotonic() + LIMIT_S
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        while True:
            detail = client.sweep(job)
            if holds(detail):
                return detail
            assert time.monotonic() < deadline, f"{detail.summary}\n{house.said()}"
            time.sleep(LOOK_S)


def ledger(house: Cluster, job: str) -> Ledger:
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        return client.ledger(job)


def trained_alone(house: Cluster, job: str, trial: int) -> dict[str, Any]:
    """What comes of the visits of a trial, one after the other in one process."""
    with BlockingClient(house.home, timeout=LIMIT_S) as client:
        manifest = client.sweep_run(job).manifest()
        values = {one.number: dict(one.values) for one in client.sweep(job).trials}
    spec = manifest.spec.stated_sweep
    assert spec is not None
    visits = [
        {
            "config": one.values_of,
            "values": values[one.values_of],
            "epoch": one.epoch,
            "partition": one.partition,
            "version": one.version,
            "digest": one.digest,
        }
        for one in manifest.visits(trial)
    ]
    task = {
        "functions": {
            name: getattr(spec, name) for name in ("input_fn", "model_fn", "train_fn", "eval_fn")
        },
        "partitions": spec.partitions,
        "seed": spec.search.seed,
        "model": None,
        "visits": visits,
    }
    file = house.base / f"{job}-{trial}.json"
    file.write_text(json.dumps(task))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "elastic.sweep_worker.replay", str(file)],
        cwd=Path(house.base / job).resolve(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
