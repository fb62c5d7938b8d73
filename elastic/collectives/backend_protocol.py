"""What carries a group's collectives: the protocol that each backend keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._distributed_c10d import PrefixStore


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
