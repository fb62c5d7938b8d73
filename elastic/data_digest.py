"""Digest of the order of a data set, by which workers prove that they train on the same samples."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import Dataset

MAX_HASHED: Final = 256  # entries of a list that its digest samples
MAX_NESTED: Final = 8  # depth of data sets in each other; parts of an entry


def data_digest(dataset: Any) -> str:
    """Return the length of a data set, and a digest of its order as far as that shows.

    The order shows in the lists, tensors and arrays that the data set holds with one entry for each
    sample, and in data sets inside of it. Of paths, only the last part counts, because nodes may
    keep their copies in other folders.
    """
    entries: list[Any] = []
    with contextlib.suppress(Exception):  # attributes of a script's class may do anything
        entries += _per_sample(dataset, 0)
    digest = hashlib.blake2b(repr(entries).encode("utf-8", "replace"), digest_size=8)
    return f"{len(dataset)}-{digest.hexdigest()}"


def _per_sample(dataset: Any, depth: int) -> Iterator[Any]:
    size = len(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        parts = value if isinstance(value, list | tuple) else [value]
        inner = [part for part in parts[:MAX_HASHED] if isinstance(part, Dataset)]
        for part in inner if depth < MAX_NESTED else ():
            yield from _per_sample(part, depth + 1)
        for part in [value, *(parts if len(parts) <= MAX_NESTED else ())]:
            if entries := _entries(part, size):
                yield name, entries


def _entries(held: Any, size: int) -> list[Any]:
    if isinstance(held, torch.Tensor) and held.device.type != "cpu":
        return []  # the device may still be another worker's
    if isinstance(held, str | bytes | Mapping) or not hasattr(held, "__getitem__"):
        return []
    if not hasattr(held, "__len__") or len(held) != size:
        return []
    return [_plain(held[place]) for place in range(0, len(held), -(-len(held) // MAX_HASHED))]


def _plain(entry: Any) -> Any:
    """Return what the digest includes of an entry: numbers, last parts of paths, shapes."""
    if isinstance(entry, str | os.PathLike):
        return os.fspath(entry).rpartition(os.sep)[2]
    if isinstance(entry, bool | int | float | bytes | None):
        return entry
    if isinstance(entry, list | tuple):
        return [_plain(part) for part in entry[:MAX_NESTED]]
    if hasattr(entry, "shape") and hasattr(entry, "tolist"):
        return [*entry.shape, entry.reshape(-1)[:MAX_NESTED].tolist()]
    return type(entry).__name__
