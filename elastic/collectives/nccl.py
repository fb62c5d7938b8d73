"""NCCL, for tensors on GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore


def connect_nccl(
    store: PrefixStore, rank: int, size: int, address: str, *, operation_s: float
) -> Any:
    """Prepare to meet the other ranks, over the interface that has `address`.

    Args:
        store: where the ranks meet.
        rank: of this worker.
        size: ranks.
        address: of this host, where the others reach it.
        operation_s: how long one operation may take.
    """
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=operation_s)  # noqa: SLF001 - no public name
    return dist.ProcessGroupNCCL(store, rank, size, options)


def interface_of(address: str) -> str:
    """The network interface that has `address`; NCCL wants it by name.

    Args:
        address: an IPv4 or IPv6 address, as text.

    Returns:
        Its name; where none has the address, `lo` for 127.0.0.0/8 and else an empty text.
    """
    import psutil  # noqa: PLC0415 - only where NCCL is used

    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return str(name)
    return "lo" if address.startswith("127.") else ""
