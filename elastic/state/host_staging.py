"""Copies of a device's tensors on the host, made beside training: the state travels over sockets.

On the CPU there is nothing to copy: a tensor is its own copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from elastic.collectives.device_backends import finish_device_work, use_device


def host_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room on the host, shape (numbers,), that `device` can copy to and from by itself.

    Args:
        device: CUDA's copies run beside the host only where the host's memory is pinned.
    """
    return torch.empty(numbers, dtype=dtype, pin_memory=device.type == "cuda")


class HostStaging:
    """One transfer's copies, on a stream of their own.

    The training thread marks what the copies have to follow: the stream that is current, and the
    one that parameters were changed on last, which a script may choose.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self._beside: Any = None if self._on_host else torch.Stream(device=device)
        self._training = self._updates = self._current()
        self.settle()  # whatever stream the script used so far

    def _current(self) -> Any:
        return None if self._on_host else torch.accelerator.current_stream(self.device)

    def settle(self) -> None:
        """Wait until the device is through with all that it was given."""
        finish_device_work(self.device)

    def note_update(self) -> None:
        """Parameters are about to change, on the stream that is current now."""
        self._updates = self._current()

    def mark(self) -> list[Any]:
        """Events behind all that the training thread has given the device so far."""
        if self._on_host:
            return []
        marks = []
        for stream in (self._current(), self._updates):
            event = torch.Event(self.device.type)
            event.record(stream)
            marks.append(event)
        return marks

    def to_host(self, tensors: Sequence[torch.Tensor], marks: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors' content on the host; blocks until it is there, in a helper thread.

        Args:
            tensors: contiguous, of one dimension; they must not change before this returns.
            marks: what `mark` gave when they had their content.
        """
        if self._on_host:
            return list(tensors)
        use_device(self.device)
        copies = [host_buffer(t.numel(), t.dtype, self.device) for t in tensors]
        with self._beside:
            for mark in marks:
                self._beside.wait_event(mark)
            for tensor, copy in zip(tensors, copies, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._beside.synchronize()
        return copies

    def as_training(self) -> contextlib.AbstractContextManager[Any]:
        """In a helper thread: what it gives the device follows what training gave it."""
        if self._on_host:
            return contextlib.nullcontext()
        use_device(self.device)
        stream: contextlib.AbstractContextManager[Any] = self._training
        return stream
