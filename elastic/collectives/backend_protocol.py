"""Protocol of a backend for a group's collectives, and waits that can be cancelled."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.training_errors import CancelledError


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Parameters for connecting a backend to the other ranks."""

    store: PrefixStore  # with its own client and key prefix
    rank: int
    size: int  # ranks
    address: str  # this host's address, to which the other ranks connect
    device: torch.device  # device of the operations' tensors, with an index


class Operation(Protocol):
    """A running collective operation, which owns its tensor until the operation is over."""

    def is_over(self) -> bool:
        """Wait briefly. Return True if the calling thread's next operation can use the result.

        Raises:
            RuntimeError: if a peer is lost or the backend was aborted. The result is then invalid.
        """
        ...


class Backend(Protocol):
    """Connected ranks. One thread starts all operations, in the same order on every rank.

    An operation that cannot start raises RuntimeError.
    """

    def connect(self) -> None:
        """Connect to the other ranks. Blocks until they are connected or the backend is aborted.

        Raises:
            RuntimeError: if a rank did not connect, or the backend was aborted.
            ValueError: if the device is missing.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Start to sum a dense, contiguous tensor over all ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Operation:
        """Start to broadcast a dense, contiguous tensor from rank `source`."""
        ...

    def abort(self) -> None:
        """Stop operations from occupying the device, whatever the other ranks do. Any thread can call this."""
        ...

    def retire(self) -> None:
        """Close the backend when no operation runs. Can block, so do not call it on the training thread."""
        ...


POLL_S: Final = 0.02  # poll interval of cancellable waits
BUILD_TIMEOUT_S: Final = 30.0  # limit for connecting to the other members
OPERATION_TIMEOUT_S: Final = 1800.0  # long, because one rank may evaluate while others wait
OPERATION_TIMEOUT: Final = timedelta(seconds=OPERATION_TIMEOUT_S)


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait for `ready`, at most `limit_s` seconds (None: no limit).

    Raises:
        CancelledError: if `cancel` was set first, or the limit has passed.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(POLL_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def first_line(error: BaseException) -> str:
    """Return the first line of a backend's error (at most 300 characters), without the stack."""
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
