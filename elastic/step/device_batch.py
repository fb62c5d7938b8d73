"""A batch of the loader, moved to the worker's device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`; on the CPU it stays as it is.

    Args:
        batch: what a collate function gave: tensors, objects with a method `to`, and mappings,
            lists, (named) tuples and dataclasses of them, which keep their type; anything else is
            passed on.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _mapping_to(batch, device)
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        make: Any = getattr(batch, "_make", type(batch))  # a named tuple's class wants one by one
        return make(moved)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _dataclass_to(batch, device)
    return batch


def _mapping_to(batch: Mapping[Any, Any], device: torch.device) -> Mapping[Any, Any]:
    moved = {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        kept = copy.copy(batch)  # with whatever else the script's class has
        kept.update(moved)
        return kept
    make: Any = type(batch)
    try:
        made: Mapping[Any, Any] = make(moved)
    except TypeError:  # its constructor wants something else
        return moved
    return made


def _dataclass_to(batch: Any, device: torch.device) -> Any:
    moved = copy.copy(batch)
    for entry in dataclasses.fields(batch):
        object.__setattr__(moved, entry.name, to_device(getattr(batch, entry.name), device))
    return moved
