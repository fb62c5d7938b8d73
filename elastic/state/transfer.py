"""Transfer of a job's state to newcomers during training, in several steps, a portion in each.

A broadcast of the whole state to all ranks is possible, too, but training waits for a broadcast.

Between two steps, all members with the full state have the same state. They share the work.
Each member sends its part during the next step's forward and backward passes, which do not change
the state, except the buffers, which rank 0 broadcasts in each step. Before its first portion, rank
0 sends small tensors and other state as metadata.
Transfers use sockets, so device tensors are first copied to the host, on a separate stream. On the
CPU nothing is copied.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from elastic import fault_points
from elastic.collectives.backend_protocol import OPERATION_TIMEOUT, wait_for
from elastic.collectives.backends import finish_device_work, use_device
from elastic.collectives.background import Background
from elastic.collectives.process_group import ProcessGroup, as_byte_row
from elastic.state.portions import (
    MIN_IN_PLACE_BYTES,
    byte_share,
    contiguous_pairs,
    decode_metadata,
    encode_metadata,
    large_and_small,
    portions,
)
from elastic.state.state_tensors import TensorState
from elastic.training_errors import BrokenGroupError

T = TypeVar("T")


def _host_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a host tensor, shape (numbers,), pinned for CUDA so that copies run asynchronously."""
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")


class HostStaging:
    """Copies of one transfer between device and host, on a separate stream.

    The copies run after the work on the current stream and on the stream of the last parameter
    update, because a script can choose the stream of its updates.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._beside: Any = None if self._on_host else torch.Stream(device=device)
        self._training = self._updates = self._current()
        finish_device_work(device)  # includes work on the script's own streams

    def _current(self) -> Any:
        return None if self._on_host else torch.accelerator.current_stream(self.device)

    def note_update(self) -> None:
        """Record that the current stream runs the parameter update."""
        self._updates = self._current()

    def mark(self) -> list[Any]:
        """Return events that follow all device work that the training thread has started."""
        if self._on_host:
            return []
        marks = []
        for stream in (self._current(), self._updates):
            event = torch.Event(self.device.type)
            event.record(stream)
            marks.append(event)
        return marks

    def to_host(self, tensors: Sequence[torch.Tensor], marks: Sequence[Any]) -> list[torch.Tensor]:
        """Return the content of `tensors` on the host. Call this in a helper thread: it blocks.

        The tensors are contiguous rows, which must not change before the method returns. `marks`
        are events that follow the work that computed the tensors.
        """
        if self._on_host:
            return list(tensors)
        use_device(self.device)
        copies = [_host_buffer(t.numel(), t.dtype, self.device) for t in tensors]
        with self._beside:
            for mark in marks:
                self._beside.wait_event(mark)
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._beside.synchronize()
        return copies

    def on_training_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for helper threads, in which device work follows the training's work."""
        if self._on_host:
            return contextlib.nullcontext()
        use_device(self.device)
        stream: contextlib.AbstractContextManager[Any] = self._training
        return stream


class Receiving:
    """Receiving of a portion from all members, directly into the final tensors where possible."""

    def __init__(
        self,
        group: ProcessGroup,
        tensors: Sequence[torch.Tensor],
        members: int,
    ) -> None:
        device, direct = group.device, group.device.type == "cpu"
        pairs = self._pairs = list(contiguous_pairs(tensors))
        parts = [byte_share([to for to, _ in pairs], member, members) for member in range(members)]

        def landing(piece: torch.Tensor) -> torch.Tensor:
            return piece if direct else _host_buffer(piece.numel(), piece.dtype, device)

        self._landed = [
            (
                large,
                [landing(piece) for piece in large],
                small,
                _host_buffer(sum(piece.numel() for piece in small), torch.uint8, device),
            )
            for large, small in map(large_and_small, parts)
        ]
        self.arrival = Background(partial(self._receive, group), "receive")

    def _receive(self, group: ProcessGroup) -> None:
        fault_points.reach("handover.receive", rank=group.rank, version=group.version)
        for member, (_, landed, small, together) in enumerate(self._landed):
            chunks = [*landed, *([together] if small else [])]
            for pending in [group.receive(chunk, member) for chunk in chunks]:
                pending.wait(OPERATION_TIMEOUT)

    def put_in_place(self) -> None:
        """Copy pieces from buffers into tensors, on the training thread after the arrival."""
        for large, landed, small, together in self._landed:
            pieces = together.split_with_sizes([chunk.numel() for chunk in small])
            for chunk, arrived in zip([*large, *small], [*landed, *pieces], strict=True):
                if chunk is not arrived:
                    chunk.copy_(arrived, non_blocking=True)
        for travelled, stands_for in self._pairs:
            if travelled is not stands_for:
                stands_for.copy_(travelled)


@dataclass(kw_only=True, eq=False)
class StateTransfer:
    """Facts that both sides know: the group, the steps, and the portion of each step.

    Each rank r < `senders` sends about the same number of bytes. There are `steps` portions, and
    the first of them is transferred in step `first`.
    """

    group: ProcessGroup
    state: TensorState
    senders: int
    first: int
    steps: int

    def __post_init__(self) -> None:
        """Set up the parts that both sides use."""
        self._staging = HostStaging(self.group.device)
        self._order: list[list[int]] = []  # parameters of each portion

    def is_over(self, step: int) -> bool:
        """True if nothing is transferred in `step` (1-based) or later."""
        return step - self.first >= self.steps

    def _plan(self) -> None:
        self._order = portions(self.state.unit_sizes(self.group.device), self.steps)

    def _portion(self, place: int) -> list[torch.Tensor]:
        units = self.state.units(self.group.device)
        return [tensor for index in self._order[place] for tensor in units[index]]


@dataclass(kw_only=True, eq=False)
class OutgoingState(StateTransfer):
    """Transfer from a member that has the full state."""

    newcomers: Sequence[int]  # ranks of the newcomers
    metadata: Mapping[str, Any] | None = None  # of rank 0; it must not change afterwards

    def __post_init__(self) -> None:
        """Plan the transfer."""
        super().__post_init__()
        self._released: threading.Event | None = None  # set when sent tensors may change again
        self._plan()

    def begin_portion(self, step: int) -> None:
        """Start to send this member's part of the portion of `step` to every newcomer."""
        group, staging, place = self.group, self._staging, step - self.first
        held = [travelling for travelling, _ in contiguous_pairs(self._portion(place))]
        if self.state.limited_embeddings():  # this step's forward pass changes them
            held = [tensor.clone() for tensor in held]
        mine = byte_share(held, group.rank, self.senders)
        chunks, small = large_and_small(mine)
        corrupt = fault_points.reach("handover.send", rank=group.rank, version=group.version)
        if small:
            together = torch.cat(small)
            chunks.append(-together - 1 if corrupt else together)  # corrupt: any different value
        marks, released = staging.mark(), threading.Event()
        self._released = released

        def send() -> None:
            try:
                if place == 0 and self.metadata is not None:
                    self._send_metadata(self.metadata)
                copies = staging.to_host(chunks, marks)
                if group.device.type != "cpu":
                    released.set()  # only the copies are sent, so the originals may change
                for to in self.newcomers:
                    for pending in [group.send(copy, to) for copy in copies]:
                        pending.wait(OPERATION_TIMEOUT)
            finally:
                released.set()

        Background(send, "send")  # an error is ignored: the next reduction detects a lost newcomer

    def _send_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Send the metadata to all newcomers. If it cannot be encoded, send nothing, and raise."""
        encoded = b""  # newcomers must not wait for an encoding that failed
        try:
            encoded = encode_metadata(metadata)
        except Exception as error:
            sys.stderr.write(f"[ones] the state cannot be sent to newcomers: {error!r}\n")
            raise
        finally:
            for to in self.newcomers:
                self.group.send_bytes(encoded, to)

    def await_sent(self, cancelled: threading.Event) -> None:
        """Wait until the portion of this step is sent, before the optimizer changes the portion."""
        self._staging.note_update()
        if self._released is not None:
            wait_for(self._released, cancelled)


class IncomingState(StateTransfer):
    """Transfer to a newcomer. The transfer replaces the newcomer's optimizer state."""

    def __post_init__(self) -> None:
        """Start a thread that waits for the metadata, allocates the state and starts to receive."""
        super().__post_init__()
        self._receiving: Receiving  # set before the metadata is complete
        self._received = 0  # the portion of this step was the last one put in place
        self._metadata = Background(self._take_metadata, "metadata")

    def _take_metadata(self) -> dict[str, Any]:
        encoded = self.group.receive_bytes(0)
        if not encoded:
            raise BrokenGroupError("rank 0 could not encode its state")
        metadata = decode_metadata(encoded)
        with self._staging.on_training_stream():
            self.state.adopt(metadata["structure"], self.group.device)
            self._plan()
            self._receive_portion(0)
        return metadata

    def begin_portion(self, step: int) -> None:
        """Start to receive the portion of `step`; the first starts when the metadata arrives."""
        if step > self.first:
            self._receive_portion(step - self.first)

    def _receive_portion(self, place: int) -> None:
        self._receiving = Receiving(self.group, self._portion(place), self.senders)

    def take_portion(
        self,
        step: int,
        cancelled: threading.Event,
        take_metadata: Callable[[dict[str, Any]], None],
    ) -> None:
        """Wait for the portion of `step`, which the optimizer needs, and put it in place.

        After the first portion, `take_metadata` is called with the metadata. If the portion did not
        arrive, it raises BrokenGroupError.
        """
        if self._received == step:
            return
        self._received = step
        metadata = _arrived(self._metadata, cancelled)
        _arrived(self._receiving.arrival, cancelled)
        self._receiving.put_in_place()
        if step == self.first:
            take_metadata(metadata)
        finish_device_work(self.group.device)  # because a script may train on its own stream


def _arrived(awaited: Background[T], cancelled: threading.Event) -> T:
    wait_for(awaited.over, cancelled)
    try:
        return awaited.result()
    except Exception as error:  # noqa: BLE001 - any error of the thread
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise BrokenGroupError(f"the state did not arrive: {reason}") from None


# --- broadcast, while training waits


def broadcast_state(
    state: TensorState, group: ProcessGroup, source: int, metadata: bytes, cancel: threading.Event
) -> bytes:
    """Broadcast rank `source`'s encoded `metadata`, then its tensors; return the metadata.

    If `cancel` is set, tensors can be partly overwritten.
    """
    encoded = group.broadcast_bytes(metadata, cancel, source)
    if group.rank != source:
        state.adopt(decode_metadata(encoded)["structure"], group.device)
    finish_device_work(group.device)  # includes work on the script's own streams
    tensors = [tensor for unit in state.units(group.device) for tensor in unit]
    small: list[torch.Tensor] = []
    for travelling, tensor in contiguous_pairs([*tensors, *state.buffers()]):
        if as_byte_row(travelling).numel() < MIN_IN_PLACE_BYTES:
            small.append(tensor)
            continue
        fresh = travelling.clone()  # an abandoned broadcast may still write to its tensor
        group.broadcast(as_byte_row(fresh), source, cancel)
        if group.rank != source:
            tensor.copy_(fresh)
    fault_points.reach("restore", rank=group.rank, version=group.version)
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
    chunks = together.split_with_sizes([tensor.nbytes for tensor in tensors])
    for tensor, chunk in zip(tensors, chunks, strict=True):
        aligned = chunk.clone()  # a copy is aligned for any type
        tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))
