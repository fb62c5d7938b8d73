"""Gloo, for tensors on the host."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

GLOO: Final[Any] = dist.ProcessGroupGloo  # its options have no types


def connect_gloo(
    store: PrefixStore, rank: int, size: int, address: str, *, build_s: float, operation_s: float
) -> Any:
    """Connect to the other ranks, over the interface that has `address`.

    Args:
        store: where the ranks meet.
        rank: of this worker.
        size: ranks.
        address: of this host, where the others reach it; without it gloo advertises 127.0.0.1.
        build_s: how long connecting may take.
        operation_s: how long one operation may take afterwards.
    """
    options = GLOO._Options()  # noqa: SLF001 - no public name
    options._timeout = timedelta(seconds=build_s)  # noqa: SLF001 - of connecting, at first
    options._threads = 2  # noqa: SLF001
    options._devices = [GLOO.create_device(hostname=address)]  # noqa: SLF001
    backend = GLOO(store, rank, size, options)
    with contextlib.suppress(RuntimeError, AttributeError):
        backend._set_default_timeout(timedelta(seconds=operation_s))  # noqa: SLF001
    return backend
