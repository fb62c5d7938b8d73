"""A job's whole state to every rank at once, while training waits."""

from __future__ import annotations

import threading
from typing import Any

import torch

from elastic.collectives.backends import finish_device_work
from elastic.collectives.process_group import ProcessGroup, as_byte_row
from elastic.state.portions import IN_PLACE, contiguous_pairs, decode_metadata, encode_metadata
from elastic.state.state_tensors import TensorState
from elastic.state.training_state import TrainingState


def broadcast_training(
    training: TrainingState, group: ProcessGroup, source: int, cancel: threading.Event
) -> dict[str, Any] | None:
    """Give every rank the tensors and the metadata of rank `source`.

    Args:
        training: of this worker; its tensors are overwritten on all but `source`.
        source: rank whose state counts.
        cancel: set when the wait is to end; the tensors may be half overwritten then.

    Returns:
        The metadata, which is not loaded; None on the source itself.

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
    """Give every rank the tensors of rank `source`, and its `metadata` first.

    Args:
        state: of this worker; overwritten on all but `source`.
        source: rank whose state counts.
        metadata: encoded; read on `source` only.
        cancel: set when the wait is to end; the tensors may be half overwritten then.

    Returns:
        The metadata of `source`, encoded.

    Raises:
        BrokenGroupError: if a peer is lost.
        CancelledError: if `cancel` is set.
    """
    encoded = group.broadcast_bytes(metadata, cancel, source)
    if group.rank != source:
        state.adopt(decode_metadata(encoded)["structure"], group.device)
    finish_device_work(group.device)  # on whatever stream the script trains
    tensors = [tensor for unit in state.units(group.device) for tensor in unit.tensors]
    small: list[torch.Tensor] = []
    for travelling, tensor in contiguous_pairs([*tensors, *state.buffers()]):
        if as_byte_row(travelling).numel() < IN_PLACE:
            small.append(tensor)
            continue
        fresh = travelling.clone()  # an operation that is given up keeps what it was given
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
    """Small ones, in one operation of the group."""
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
