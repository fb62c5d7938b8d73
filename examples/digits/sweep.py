"""The training of `train.py` as functions for a sweep."""

from collections.abc import Mapping
from typing import Any

import torch
from dataset import load_split
from model import DigitsNet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic.sweep_worker import Trained, Unit

BATCH = 48


def load(partition: int | None, partitions: int) -> TensorDataset:
    """Return one of `partitions` parts, each a multiple of a batch; None: what is held out."""
    data, held_out = load_split()
    if partition is None:
        return held_out
    size = len(data) // partitions // BATCH * BATCH
    begin = partition * size
    return TensorDataset(*(tensor[begin : begin + size] for tensor in data.tensors))


def build(values: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the network and its optimizer for a configuration."""
    model = DigitsNet(width=values.get("width", 96))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=values["lr"],
        momentum=values.get("momentum", 0.9),
        weight_decay=values.get("weight_decay", 5e-4),
    )
    return model, optimizer


def train(trained: Trained, data: TensorDataset, unit: Unit) -> dict[str, float]:
    """Pass over the partition once; return the mean loss."""
    total = 0.0
    for images, labels in unit.loader(data, BATCH):
        trained.optimizer.zero_grad()
        scores = trained.model(images.to(unit.device))
        loss = cross_entropy(scores, labels.to(unit.device), label_smoothing=0.1)
        loss.backward()
        trained.optimizer.step()
        total += loss.item() * len(labels)
    return {"loss": total / len(data)}


def evaluate(trained: Trained, data: TensorDataset, unit: Unit) -> dict[str, float]:
    """Return the share of held-out digits that are recognised."""
    images, labels = data.tensors
    predicted = trained.model(images.to(unit.device)).argmax(dim=1)
    return {"accuracy": (predicted == labels.to(unit.device)).float().mean().item()}
