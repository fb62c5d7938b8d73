"""One version of a job's process group, beside others, never torch's default group.

Tensors seen as bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from elastic.collectives.backend_protocol import Backend, Operation, first_line
from elastic.collectives.backends import GlooBackend
from elastic.collectives.rendezvous_store import GroupWords
from elastic.training_errors import BrokenGroupError, CancelledError


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


ABORT_LIMIT_S: Final = 20.0  # that recovery waits for a device to be free of the broken group


@dataclass(frozen=True, slots=True)
class Links:
    """What connects the members: apart, so that one that fails leaves the others alone."""

    training: Backend  # gradients, and the state while training waits; tensors on the device
    transfers: GlooBackend  # the state beside training, from helper threads; on the host
    words: Backend  # of the training thread between steps; on the host
    store: GroupWords  # before there is a step in common

    def backends(self) -> list[Backend]:
        """Each once; words and gradients of a group on CPUs share one."""
        found: list[Backend] = [self.training, self.transfers]
        return found if self.words is self.training else [*found, self.words]


class ProcessGroup:
    """The members of one version. A group of one needs no sockets."""

    def __init__(
        self,
        version: int,
        rank: int,
        size: int,
        device: torch.device,
        links: Links | None = None,
        *,
        drawn_ahead: int = 0,
    ) -> None:
        """Wrap what connects the members.

        Args:
            size: ranks.
            device: where gradients live, with its index.
            links: to the others; None for a group of one.
            drawn_ahead: steps whose samples the loader of some member may have drawn already.
        """
        self.version = version
        self.rank = rank
        self.size = size
        self.device = device
        self.drawn_ahead = drawn_ahead
        self._links = links

    def _linked(self) -> Links:
        if self._links is None:
            raise BrokenGroupError("the group was taken apart")
        return self._links

    @property
    def store(self) -> GroupWords:
        """For words beside the collectives; of a group of more than one."""
        return self._linked().store

    def all_reduce(self, tensor: torch.Tensor, cancel: threading.Event) -> None:
        """Sum `tensor` over all ranks, in place.

        Args:
            tensor: on the device, of the same shape and type on every rank.

        Raises:
            CancelledError: `cancel` was set meanwhile; the operation still owns `tensor`.
            BrokenGroupError: a peer is gone; the same.
        """
        if self.size > 1:
            training = self._linked().training
            _finish(lambda: training.all_reduce(tensor), cancel)

    def broadcast(self, tensor: torch.Tensor, source: int, cancel: threading.Event) -> None:
        """Give all ranks the `tensor` of rank `source`; errors as `all_reduce`.

        Args:
            tensor: on the device, of the same shape and type on every rank; written in place on
                all but `source`.
            source: rank whose values count.

        Raises:
            CancelledError: `cancel` was set meanwhile; the operation still owns `tensor`.
            BrokenGroupError: a peer is gone; the same.
        """
        if self.size > 1:
            training = self._linked().training
            _finish(lambda: training.broadcast(tensor, source), cancel)

    def broadcast_bytes(self, data: bytes, cancel: threading.Event, source: int = 0) -> bytes:
        """The `data` of rank `source`, on every rank; never over the device.

        Args:
            data: of this rank; only that of `source` counts, and may have any length.

        Raises:
            CancelledError: `cancel` was set meanwhile.
            BrokenGroupError: a peer is gone.
        """
        if self.size == 1:
            return data
        words = self._linked().words
        length = torch.tensor([len(data)], dtype=torch.int64)
        _finish(lambda: words.broadcast(length, source), cancel)
        if not int(length):
            return b""
        row = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        _finish(lambda: words.broadcast(row, source), cancel)
        return as_bytes(row)

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send `tensor`; returns torch's work, to be waited for in a helper thread.

        Args:
            tensor: on the host, contiguous; not to be changed until the work is over.
            to: rank that receives it.
        """
        return self._linked().transfers.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to receive into `tensor`; the same.

        Args:
            tensor: on the host, contiguous, of the shape and type that is sent; not to be read
                until the work is over.
            source: rank that sends it.
        """
        return self._linked().transfers.receive(tensor, source)

    def abort(self, limit_s: float = ABORT_LIMIT_S) -> None:
        """Free the device of what is under way, before anything else is asked of it.

        It happens in a second thread, while the training thread is in no collective.

        Args:
            limit_s: how long to wait for it; a device that does not let go is left to itself.
        """
        links = self._links
        if links is None:
            return

        def end() -> None:
            for backend in links.backends():
                backend.abort()

        ending = threading.Thread(target=end, name="abort", daemon=True)
        ending.start()
        ending.join(limit_s)

    def retire(self) -> None:
        """Take it apart, off the training thread: that waits for the backends' own threads."""
        links, self._links = self._links, None
        if links is not None:
            threading.Thread(
                target=_take_apart, args=([links],), name="retire", daemon=True
            ).start()


def _take_apart(held: list[Links]) -> None:
    for backend in held.pop().backends():
        backend.retire()


def _finish(begin: Callable[[], Operation], cancel: threading.Event) -> None:
    if cancel.is_set():
        raise CancelledError
    try:
        operation = begin()
        while not operation.is_over():
            if cancel.is_set():
                raise CancelledError
    except RuntimeError as error:
        raise BrokenGroupError(first_line(error)) from None
