"""A training that keeps records of its own, apart from everything that the cluster writes down."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic import ScalingAgent
from schemas.codec import ASSIGNMENT
from schemas.ids import node_of, worker_id

assigned = ASSIGNMENT.decode((Path(os.environ["ONES_WORKER"]) / "assignment").read_bytes())
worker = worker_id(assigned.job, assigned.version, assigned.rank)
slot = assigned.group.members[assigned.rank].slot
path = Path(os.environ["RECORDS"]) / f"{worker}.{node_of(slot)}.{os.getpid()}.jsonl"
record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
samples, epochs, fails_at = (int(os.environ[name]) for name in ("SAMPLES", "EPOCHS", "FAILS_AT"))


def note(kind: str, **what: object) -> None:
    os.write(record, json.dumps({"kind": kind, **what}).encode() + b"\n")


note("began", job=os.environ["ONES_JOB"], worker=worker, slot=slot, pid=os.getpid())
agent = ScalingAgent.from_env()
inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
model, optimizer, loader = agent.load(
    lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    data,
    batch_size=int(os.environ["BATCH"]),
)
line = 0
for epoch in agent.epochs(epochs):
    for x, y in loader:
        began = time.monotonic()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        time.sleep(float(os.environ["PAUSE_S"]))
        optimizer.step()
        note("used", began=began, ended=time.monotonic())
        line += 1
        note("prints", line=line)
        print(f"{worker} {line}", flush=True)
        note("printed", line=line)
    if fails_at and epoch + 1 >= fails_at:
        note("fails", epoch=epoch + 1)
        sys.exit(7)
    agent.report(loss=float(loss))
    note("epoch", epoch=epoch + 1)
note("done")
