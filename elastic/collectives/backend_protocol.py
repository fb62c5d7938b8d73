"""What carries a group's collectives: the protocol that each backend keeps.

Waits that end when they are called off.
"""

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
class Meeting:
    """What a backend needs to meet the other ranks."""

    store: PrefixStore  # a client of its own, with keys of its own
    rank: int
    size: int  # ranks
    address: str  # of this host, where the others reach it
    device: torch.device  # where the tensors of its operations live, with its index


class Operation(Protocol):
    """A collective that is under way; it owns its tensor until it is over."""

    def is_over(self) -> bool:
        """Wait a little; whether its result can be used by what the calling thread does next.

        Raises:
            RuntimeError: if a peer is gone or the backend was aborted; the result is garbage.
        """
        ...


class Backend(Protocol):
    """Connected ranks. Operations come from one thread, in the same order on every rank."""

    def connect(self) -> None:
        """Meet the other ranks; blocks, and ends early with an error when it is aborted.

        Raises:
            RuntimeError: if they did not all come.
            ValueError: if the device is missing.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Begin to sum `tensor` over all ranks, in place.

        Args:
            tensor: dense and contiguous, of the same shape and type on every rank.

        Raises:
            RuntimeError: if it cannot begin.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Operation:
        """Begin to give all ranks the `tensor` of rank `source`.

        Args:
            tensor: dense and contiguous, of the same shape and type on every rank.
            source: rank whose values count.

        Raises:
            RuntimeError: if it cannot begin.
        """
        ...

    def abort(self) -> None:
        """Free the device of what is under way, whatever the other ranks do; from any thread."""
        ...

    def retire(self) -> None:
        """Take it apart when nothing is under way any more; may block, off the training thread."""
        ...


LOOK_S: Final = 0.02  # how often a wait looks whether it was called off
BUILD_LIMIT_S: Final = 30.0  # meeting the other members
OPERATION_LIMIT_S: Final = 1800.0  # a rank may evaluate for long while the others wait
LONG: Final = timedelta(seconds=OPERATION_LIMIT_S)


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait for `ready`.

    Args:
        limit_s: how long, seconds; None: for ever.

    Raises:
        CancelledError: if `cancel` was set first, or `limit_s` is over.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(LOOK_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def first_line(error: BaseException) -> str:
    """What a backend's error says, without its source lines and stack; at most 300 characters.

    Args:
        error: of torch or a backend of it; one without text gives the name of its class.
    """
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
