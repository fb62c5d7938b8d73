"""Broadcast of a job's whole state to all ranks at once, while training waits."""

from __future__ import annotations

import threading
from typing import Any

import torch

from elastic.collectives.backends import finish_device_work
from elastic.collectives.process_group import ProcessGroup, as_byte_row
from elastic.state.portions import (
    MIN_IN_PLACE_BYTES,
    contiguous_pairs,
    decode_metadata,
    encode_metadata,
)
from elastic.state.state_tensors import TensorState
from elastic.state.training_state import TrainingState


def broadcast_training(
    training: TrainingState, group: ProcessGroup, source: int, cancel: threading.Event
) -> dict[str, Any] | None:
    """Broadcast tensors and metadata of rank `source`; returns the metadata, None on the source.

    The metadata is not loaded. If `cancel` is set, tensors may be partly overwritten.

    Raises:
        BrokenGroupError: if a peer is lost.
        CancelledError: if `cancel` is set.
    """
    own = encode_metadata(training.metadata()) if group.rank == source else b""
    metadata = broadcast_state(training.tensors(), group, source, own, cancel)
    return None if group.rank == source else decode_metadata(metadata)


def broadcast_state(
    state: TensorState, group: ProcessGroup, source: int, metadata: bytes, cancel: threading.Event
) -> bytes:
    """Broadcast the encoded `metadata` of rank `source`, then its tensors; returns the metadata.

    If `cancel` is set, tensors may be partly overwritten.

    Raises:
        BrokenGroupError: if a peer is lost.
        CancelledError: if `cancel` is set.
    """
    encoded = group.broadcast_bytes(metadata, cancel, source)
    if group.rank != source:
        state.adopt(decode_metadata(encoded)["structure"], group.device)
    finish_device_work(group.device)  # on any stream of the script
    tensors = [tensor for unit in state.units(group.device) for tensor in unit.tensors]
    small: list[torch.Tensor] = []
    for travelling, tensor in contiguous_pairs([*tensors, *state.buffers()]):
        if as_byte_row(travelling).numel() < MIN_IN_PLACE_BYTES:
            small.append(tensor)
            continue
        fresh = travelling.clone()  # an abandoned operation keeps its tensor
        group.broadcast(as_byte_row(fresh), source, cancel)
        if group.rank != source:
            tensor.copy_(fresh)
    if small:
        _broadcast_together(small, group, source, cancel)
    finish_device_work(group.device)
    return encoded


def _broadcast_together(
    tensors: list[torch.Tensor], group: ProcessGroup, source: int, cancel: threading.Event
) -> None:
    together = torch.cat([as_byte_row(tensor.contiguous()) for tensor in tensors])
    group.broadcast(together, source, cancel)
    if group.rank == source:
        return
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        chunk = together[start : start + size].clone()  # aligned for any type
        tensor.copy_(chunk.view(tensor.dtype).view(tensor.shape))
        start += size
