"""Tensors seen as bytes."""

from __future__ import annotations

import ctypes

import torch


def as_bytes(data: torch.Tensor) -> bytes:
    """The content of a tensor of bytes, without numpy.

    Args:
        data: uint8, of any shape, on any device.
    """
    host = data.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel())


def as_byte_row(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor, shape (bytes,), of uint8.

    Args:
        tensor: contiguous, of any type and shape.
    """
    return tensor.view(-1).view(torch.uint8)
