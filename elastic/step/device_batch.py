"""A batch of the loader, moved to the worker's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`; on the CPU it stays as it is.

    Args:
        batch: what a collate function gave: tensors, and mappings, lists and (named) tuples of
            them. A mapping becomes a dict; anything else is passed on.
        device: where the model lives.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
