"""Digest of the order of a data set, which workers compare before they train together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from elastic.data_digest import data_digest


class Listed(Dataset[Any]):
    """Data set with a list of entries, and other attributes."""

    def __init__(self, entries: Any, **more: Any) -> None:
        self.entries = entries
        self.more = more

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> Any:
        return self.entries[place]


PATHS = [f"/data/node-1/{letter}.png" for letter in "abcd"]
ROWS = torch.arange(12.0).reshape(4, 3)
CHANGED = {
    "paths": (Listed(PATHS), Listed(PATHS[::-1])),
    "pairs of a path and a label": (
        Listed([(path, 0) for path in PATHS]), Listed([(path, 0) for path in PATHS[::-1]]),
    ),
    "objects of pathlib": (Listed([*map(Path, PATHS)]), Listed([*map(Path, PATHS[::-1])])),
    "indices of a subset": (Subset(Listed(PATHS), [0, 2]), Subset(Listed(PATHS), [2, 0])),
    "what a subset selects from": (
        Subset(Listed(PATHS), [0, 2]), Subset(Listed(PATHS[::-1]), [0, 2]),
    ),
    "tensors": (TensorDataset(ROWS), TensorDataset(ROWS.flip(0))),
    "parts of a whole": (
        ConcatDataset([Listed(PATHS), Listed("wxyz")]),
        ConcatDataset([Listed(PATHS[::-1]), Listed("wxyz")]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("one", "two"), CHANGED.values(), ids=CHANGED.keys())
def test_another_order_has_another_digest(one: Dataset[Any], two: Dataset[Any]) -> None:
    assert data_digest(one) == data_digest(one) != data_digest(two)


def test_folders_and_other_attributes_do_not_count() -> None:
    elsewhere = [path.replace("node-1", "node-2") for path in PATHS]

    assert data_digest(Listed(PATHS)) == data_digest(Listed(elsewhere, cache=["x"], at=object()))


class Unusual(Dataset[Any]):
    """Data set that cannot be looked into."""

    __slots__ = ()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Any:
        return place


class Broken(Listed):
    """Data set with an attribute that raises."""

    def __init__(self) -> None:
        super().__init__(PATHS)
        self.lazy = Unreadable()


class Unreadable:
    """List that cannot be read yet."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Any:
        raise OSError("not open")


def test_of_what_shows_no_order_only_the_length_counts() -> None:
    assert data_digest(Unusual()) == data_digest(Listed(dict.fromkeys(PATHS)))
    assert data_digest(Unusual()) != data_digest(Listed({"a": 1}))


def test_an_attribute_that_cannot_be_read_ends_the_search() -> None:
    assert data_digest(Broken()) == data_digest(Listed(PATHS))
