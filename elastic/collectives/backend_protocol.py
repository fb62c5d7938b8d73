"""Interface of the backends that run a group's collectives, and a wait that can be cancelled."""

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
    size: int  # number of ranks
    address: str  # address of this host, to which the other ranks connect
    device: torch.device  # device of the tensors; its index is set


class Operation(Protocol):
    """A running collective. Its tensor must not be touched until the collective is over."""

    def is_over(self) -> bool:
        """Wait briefly; return True if the calling thread's next operation can use the result.

        A lost peer or an abort raises RuntimeError; the result is then invalid.
        """


class Backend(Protocol):
    """Connection between the ranks of a group.

    One thread starts all operations, in the same order on every rank. An operation that cannot
    start raises RuntimeError.
    """

    def connect(self) -> None:
        """Connect to the other ranks. Blocks until all are connected; an abort ends the wait early.

        If it fails, it raises RuntimeError, or ValueError if the device is missing.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Start to sum a dense, contiguous tensor over all ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Operation:
        """Start to broadcast a dense, contiguous tensor of rank `source`."""

    def abort(self) -> None:
        """Stop all running operations on the device, without help from other ranks. Thread-safe."""

    def retire(self) -> None:
        """Wait for running operations and close the backend, outside of the training thread."""


POLL_S: Final = 0.02  # poll interval of cancellable waits
BUILD_TIMEOUT_S: Final = 30.0  # limit for connecting to the other members
OPERATION_TIMEOUT_S: Final = 1800.0  # long, because the others wait while a rank evaluates
OPERATION_TIMEOUT: Final = timedelta(seconds=OPERATION_TIMEOUT_S)


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait until `ready` is set, for at most `limit_s` seconds. None sets no limit.

    If `cancel` is set first or the limit has passed, it raises CancelledError.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(POLL_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def first_line(error: BaseException) -> str:
    """Return the first line of a backend's error message, cut to 300 characters."""
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
