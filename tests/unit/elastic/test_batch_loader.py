"""Batches keep their types on the way to the device."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch

from elastic.step.batch_loader import to_device

THERE = torch.device("meta")
X = torch.zeros(2)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str


class Encoding(collections.UserDict[str, Any]):
    tokenizer = "none"


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Graph | Record):
        return [batch.x]
    parts = list(batch.values()) if hasattr(batch, "values") else list(batch)
    return [found for part in parts if not isinstance(part, str) for found in tensors(part)]


@pytest.mark.parametrize("batch", [
    X,
    [X, "name"],
    (X, [X]),
    Pair(X, "name"),
    Record(X, "name"),
    {"x": X, "name": "name"},
    collections.OrderedDict(x=X),
    collections.defaultdict(list, x=[X]),
    Encoding(x=X),
    types.MappingProxyType({"x": X}),
    Graph(X),
], ids=lambda batch: type(batch).__name__)  # fmt: skip
def test_a_batch_keeps_its_type(batch: Any) -> None:
    moved = to_device(batch, THERE)

    assert type(moved) is type(batch)
    assert {tensor.device for tensor in tensors(moved)} == {THERE}
    assert len(tensors(moved)) == len(tensors(batch))
    assert {tensor.device.type for tensor in tensors(batch)} == {"cpu"}


def test_a_batch_on_the_host_is_unchanged() -> None:
    batch = Encoding(x=X)

    assert to_device(batch, torch.device("cpu")) is batch
