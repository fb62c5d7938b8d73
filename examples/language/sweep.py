"""The training of `train.py` as functions for a sweep."""

from collections.abc import Mapping
from typing import Any

import torch
from dataset import load_split
from model import ByteTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic.sweep_worker import Trained, Unit

BATCH = 32
CONTEXT = 64


def load(partition: int | None, partitions: int) -> TensorDataset:
    """Return one of `partitions` parts, each a multiple of a batch; None: what is held out."""
    data, held_out = load_split(CONTEXT)
    if partition is None:
        return held_out
    size = len(data) // partitions // BATCH * BATCH
    begin = partition * size
    return TensorDataset(*(tensor[begin : begin + size] for tensor in data.tensors))


def build(values: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the transformer and its optimizer for a configuration."""
    model = ByteTransformer(CONTEXT, width=values.get("width", 48), depth=values.get("depth", 2))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=values["lr"],
        betas=(0.9, 0.98),
        weight_decay=values.get("weight_decay", 0.1),
    )
    return model, optimizer


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per byte, in nats."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def train(trained: Trained, data: TensorDataset, unit: Unit) -> dict[str, float]:
    """Pass over the partition once; return the mean loss."""
    total = 0.0
    for inputs, targets in unit.loader(data, BATCH):
        trained.optimizer.zero_grad()
        loss = next_byte_loss(trained.model(inputs.to(unit.device)), targets.to(unit.device))
        loss.backward()
        trained.optimizer.step()
        total += loss.item() * len(inputs)
    return {"train_loss": total / len(data)}


def evaluate(trained: Trained, data: TensorDataset, unit: Unit) -> dict[str, float]:
    """Return the loss on text that is not trained on."""
    inputs, targets = data.tensors
    loss = next_byte_loss(trained.model(inputs.to(unit.device)), targets.to(unit.device))
    return {"loss": loss.item()}
