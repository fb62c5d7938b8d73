"""User functions of a small sweep, as a module that is written to a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

NAME: Final = "user_functions"
FUNCTIONS: Final = {
    name: f"{NAME}:{name}" for name in ("input_fn", "model_fn", "train_fn", "eval_fn")
}
SOURCE: Final = """
import torch
from torch.utils.data import TensorDataset

seen = []

def input_fn(partition, partitions):
    x = torch.arange(12.0).reshape(6, 2) / 12 + (0 if partition is None else partition)
    return TensorDataset(x)

def model_fn(values):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=values["lr"])
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

def train_fn(trained, data, unit):
    seen.append((unit.epoch, len(data), trained.model.weight.detach().clone(),
                 trained.optimizer.param_groups[0]["lr"],
                 len(trained.optimizer.state)))
    for (x,) in unit.loader(data, batch_size=2):
        trained.optimizer.zero_grad()
        trained.model(x).square().mean().backward()
        trained.optimizer.step()
    trained.scheduler.step()

def eval_fn(trained, data, unit):
    print("a user prints")
    return {"score": trained.model(data.tensors[0]).mean()}

def no_optimizer(values):
    return torch.nn.Linear(2, 1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(NAME, None)
