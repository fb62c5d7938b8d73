"""Batches keep their types on the way to the device."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from elastic.step.batch_loader import held_samples, loader_options, to_device
from elastic.training_errors import UsageError

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


def test_a_loader_that_draws_samples_otherwise_is_refused() -> None:
    data: Any = TensorDataset(torch.arange(8))
    samplers = [
        RandomSampler(data, replacement=True),
        RandomSampler(data, num_samples=4),
        SequentialSampler(data),
    ]
    for sampler in samplers:
        with pytest.raises(UsageError, match=f"the training loader has a {type(sampler).__name__}"):
            loader_options(DataLoader(data, 2, sampler=sampler), torch.device("cpu"))

    assert loader_options(DataLoader(data, 2, shuffle=True), torch.device("cpu"))


@pytest.mark.parametrize(
    ("batch", "held"),
    [
        ((torch.zeros(5, 8), torch.zeros(5)), 5),  # three samples were left out
        ({"x": torch.zeros(5, 9), "names": ["a"] * 5}, 5),
        ((torch.zeros(8, 5), torch.zeros(8)), 8),
        ((torch.zeros(5, 8, 3), torch.zeros(5, 8)), 8),  # time before the samples
        ((torch.zeros(5, 3), torch.zeros(4)), 8),  # packed
        (torch.zeros(16, 3), 8),  # two views of each
        (Record(torch.zeros(6), "name"), 6),
        (["a"], 8),
    ],
)
def test_samples_that_a_batch_holds_are_counted(batch: Any, held: int) -> None:
    assert held_samples(batch, 8) == held
