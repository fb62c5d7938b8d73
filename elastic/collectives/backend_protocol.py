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

    store: PrefixStore  # separate client and key prefix
    rank: int
    size: int  # ranks
    address: str  # of this host, for connections from the other ranks
    device: torch.device  # of the operations' tensors, with index


class Operation(Protocol):
    """A collective under way; it owns its tensor until it is over."""

    def is_over(self) -> bool:
        """Wait briefly; True if the calling thread's next operation may use the result.

        Raises:
            RuntimeError: if a peer is lost or the backend was aborted; the result is invalid.
        """
        ...


class Backend(Protocol):
    """Connected ranks. Operations come from one thread, in the same order on every rank.

    An operation that cannot start raises RuntimeError.
    """

    def connect(self) -> None:
        """Connect to the other ranks; blocks, and raises early if it is aborted.

        Raises:
            RuntimeError: if a rank did not connect.
            ValueError: if the device is missing.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Start to sum a dense, contiguous tensor over all ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Operation:
        """Start to broadcast a dense, contiguous tensor of rank `source`."""
        ...

    def abort(self) -> None:
        """Free the device of operations under way, whatever the other ranks do; from any thread."""
        ...

    def retire(self) -> None:
        """Close the backend when nothing is under way; may block, so not on the training thread."""
        ...


POLL_S: Final = 0.02  # poll interval of cancellable waits
BUILD_TIMEOUT_S: Final = 30.0  # for connecting to the other members
OPERATION_TIMEOUT_S: Final = 1800.0  # long, since a rank may evaluate while the others wait
OPERATION_TIMEOUT: Final = timedelta(seconds=OPERATION_TIMEOUT_S)


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait for `ready`; a limit of None waits without limit.

    Raises:
        CancelledError: if `cancel` was set first, or the limit is over.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(POLL_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def first_line(error: BaseException) -> str:
    """Return the first line of a backend's error (at most 300 characters), without a stack."""
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
