"""Process group of one version of a job. Several can exist, and none is torch's default group."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from elastic.collectives.backend_protocol import (
    OPERATION_TIMEOUT,
    Backend,
    Operation,
    first_line,
)
from elastic.collectives.backends import GlooBackend
from elastic.collectives.rendezvous_store import GroupStore
from elastic.training_errors import BrokenGroupError, CancelledError


def as_bytes(data: torch.Tensor) -> bytes:
    """Return the content of a uint8 tensor of any shape and device, without numpy."""
    host = data.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel())


def as_byte_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a uint8 view of a contiguous tensor, shape (bytes,)."""
    return tensor.view(-1).view(torch.uint8)


ABORT_TIMEOUT_S: Final = 20.0  # limit of a recovery's wait for the device of the broken group


@dataclass(frozen=True, slots=True)
class GroupBackends:
    """Backends of a group. They are separate, so that one can fail while the others stay usable."""

    training: Backend  # sums gradients; sends the state while training waits; on the device
    transfers: GlooBackend  # sends the state during training, by helper threads; on the host
    control: Backend  # carries the training thread's messages between steps; on the host
    store: GroupStore  # carries messages before the first common step

    def distinct(self) -> list[Backend]:
        """Return each backend once: on CPUs, gradients and control messages share one backend."""
        found: list[Backend] = [self.training, self.transfers]
        return found if self.control is self.training else [*found, self.control]


class ProcessGroup:
    """Group of the members of one version. A group of one member needs no sockets.

    After a collective was cancelled or lost a peer, its tensor must not be used again.
    """

    def __init__(
        self,
        version: int,
        rank: int,
        size: int,
        device: torch.device,
        backends: GroupBackends | None = None,
        *,
        prefetched_steps: int = 0,
    ) -> None:
        self.version = version
        self.rank = rank
        self.size = size
        self.device = device
        self.prefetched_steps = prefetched_steps
        self._backends = backends

    def _require_backends(self) -> GroupBackends:
        if self._backends is None:
            raise BrokenGroupError("the group was closed")
        return self._backends

    @property
    def store(self) -> GroupStore:
        """Store for messages outside of the collectives. A group of one member has no store."""
        return self._require_backends().store

    def all_reduce(self, tensor: torch.Tensor, cancel: threading.Event) -> None:
        """Sum a device tensor over all ranks, in place."""
        if self.size > 1:
            training = self._require_backends().training
            _complete(lambda: training.all_reduce(tensor), cancel)

    def broadcast(self, tensor: torch.Tensor, source: int, cancel: threading.Event) -> None:
        """Broadcast a device tensor of rank `source`, in place."""
        if self.size > 1:
            training = self._require_backends().training
            _complete(lambda: training.broadcast(tensor, source), cancel)

    def broadcast_bytes(self, data: bytes, cancel: threading.Event, source: int = 0) -> bytes:
        """Return rank `source`'s `data`, of any length, on every rank. The device is not used."""
        if self.size == 1:
            return data
        control = self._require_backends().control
        length = torch.tensor([len(data)], dtype=torch.int64)
        _complete(lambda: control.broadcast(length, source), cancel)
        if not int(length):
            return b""
        row = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        _complete(lambda: control.broadcast(row, source), cancel)
        return as_bytes(row)

    def gather_bytes(self, data: bytes, cancel: threading.Event) -> list[bytes]:
        """Return the `data` of all ranks, by rank, of any lengths. The device is not used."""
        if self.size == 1:
            return [data]
        control = self._require_backends().control
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        _complete(lambda: control.all_reduce(sizes), cancel)
        lengths: list[int] = sizes.tolist()
        start, row = sum(lengths[: self.rank]), torch.zeros(sum(lengths), dtype=torch.uint8)
        if data:
            row[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if any(lengths):
            _complete(lambda: control.all_reduce(row), cancel)  # zeros on all other ranks
        return [as_bytes(part) for part in row.split_with_sizes(lengths)]

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Start to send a host tensor to rank `to`; see `GlooBackend.send`."""
        return self._require_backends().transfers.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Start to receive a host tensor from rank `source`; see `GlooBackend.receive`."""
        return self._require_backends().transfers.receive(tensor, source)

    def send_bytes(self, data: bytes, to: int) -> None:
        """Send `data`, of any length, to rank `to`. Call this in a helper thread: it blocks."""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self.send(as_byte_row(length), to).wait(OPERATION_TIMEOUT)
        if data:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.send(row, to).wait(OPERATION_TIMEOUT)

    def receive_bytes(self, source: int) -> bytes:
        """Return what rank `source` sends with `send_bytes`. Call this in a helper thread."""
        length = torch.empty(1, dtype=torch.int64)
        self.receive(as_byte_row(length), source).wait(OPERATION_TIMEOUT)
        row = torch.empty(int(length), dtype=torch.uint8)
        if row.numel():
            self.receive(row, source).wait(OPERATION_TIMEOUT)
        return as_bytes(row)

    def abort(self, limit_s: float = ABORT_TIMEOUT_S) -> None:
        """Stop the group's operations on the device in a second thread, so that the device is free.

        Call `abort` while the training thread is in no collective. It returns after `limit_s`
        seconds even if the device is not free.
        """
        backends = self._backends
        if backends is None:
            return

        def abort_all() -> None:
            for backend in backends.distinct():
                backend.abort()

        thread = threading.Thread(target=abort_all, name="abort", daemon=True)
        thread.start()
        thread.join(limit_s)

    def retire(self, limit_s: float = 0.0) -> None:
        """Close the group in another thread, because closing waits for the backends' threads.

        Return when the group is closed, or after `limit_s` seconds.
        """
        backends, self._backends = self._backends, None
        if backends is not None:
            held = [backends]
            del backends
            thread = threading.Thread(
                target=_close_backends, args=(held,), name="retire", daemon=True
            )
            thread.start()
            thread.join(limit_s)


def _close_backends(held: list[GroupBackends]) -> None:
    for backend in held.pop().distinct():
        backend.retire()


def _complete(begin: Callable[[], Operation], cancel: threading.Event) -> None:
    if cancel.is_set():
        raise CancelledError
    try:
        operation = begin()
        while not operation.is_over():
            if cancel.is_set():
                raise CancelledError
    except RuntimeError as error:
        raise BrokenGroupError(first_line(error)) from None
