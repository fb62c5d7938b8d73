"""Values of several workers, put together; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic.state.host_copy import copy_to_host
from elastic.state.transfer_metadata import decode_metadata, encode_metadata


def encoded(value: Any) -> bytes:
    """Bytes of tensors, numbers, text and their containers, which nothing executes.

    Args:
        value: on any device.
    """
    return encode_metadata({"value": copy_to_host(value)})


def decoded(data: bytes) -> Any:
    """The reverse, on the host.

    Args:
        data: what `encoded` gave on some worker.
    """
    return decode_metadata(data)["value"]


def concatenated(parts: Sequence[Any], device: torch.device) -> Any:
    """Tensors of all parts one behind the other, in the containers that each part has.

    Args:
        parts: by rank, alike but for the tensors' first dimension; scalars become one row each.
    """

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([v.reshape(1) if v.dim() == 0 else v for v in values]).to(device)

    return _over(parts, join)


def reduced(parts: Sequence[tuple[int, Any]], reduction: str, device: torch.device) -> Any:
    """Sum over all parts, or mean over their samples, in the containers that each part has.

    Args:
        parts: (samples, value) by rank.
        reduction: "sum" or "mean".
    """
    counts = [count for count, _ in parts]

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        weights = counts if reduction == "mean" else [1] * len(values)
        total = sum(value * weight for value, weight in zip(values, weights, strict=True))
        whole = sum(counts) if reduction == "mean" else 1
        return torch.as_tensor(total / max(1, whole)).to(device)

    return _over([value for _, value in parts], join)


def _over(parts: Sequence[Any], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return join(parts)
    if isinstance(first, Mapping):
        return {key: _over([part[key] for part in parts], join) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_over(list(each), join) for each in zip(*parts, strict=True))
    return list(parts)
