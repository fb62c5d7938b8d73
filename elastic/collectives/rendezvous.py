"""How the members of one version meet: a store that rank 0 serves, then a process group."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.collectives.cancellable_waits import first_line
from elastic.collectives.gloo import connect_gloo
from elastic.collectives.nccl import connect_nccl
from elastic.collectives.process_group import ProcessGroup
from elastic.training_errors import BrokenGroupError

BUILD_LIMIT_S: Final = 30.0


OPERATION_LIMIT_S: Final = 1800.0  # a rank may evaluate for long while the others wait


class StoreServer:
    """The TCPStore that the members of one version meet at, on this worker's address only.

    Args:
        address: of this host, IPv4 or IPv6; the system chooses the port.

    Raises:
        OSError: if this host has no such address, or no port left.
        RuntimeError: if torch cannot serve it.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address, self.port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=BUILD_LIMIT_S), master_listen_fd=listener.detach(),
        )  # fmt: skip


class StoreServers:
    """The stores that this worker serves, by version of the group that meets at them.

    Args:
        address: of this host, IPv4 or IPv6, where the other members reach it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._servers: dict[int, StoreServer] = {}

    def __contains__(self, version: int) -> bool:
        """Whether the store of `version` is served."""
        return version in self._servers

    def serve(self, version: int, *, oldest: int) -> int:
        """The port of the store of `version`, which is opened if it is not there.

        Args:
            version: of the group.
            oldest: stores of groups before this one are closed.

        Raises:
            OSError: if this host has no port left.
            RuntimeError: if torch cannot serve it.
        """
        if version not in self._servers:
            self._servers = {
                known: server for known, server in self._servers.items() if known >= oldest
            }
            self._servers[version] = StoreServer(self._address)
        return self._servers[version].port


def connect_store(address: str, version: int, limit_s: float = BUILD_LIMIT_S) -> PrefixStore:
    """One client of the store at HOST:PORT; each thread needs its own.

    Args:
        address: HOST:PORT.
        version: of the group; names its keys.
        limit_s: how long an answer may take, seconds.

    Raises:
        BrokenGroupError: if nobody serves it.
    """
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise BrokenGroupError(f"cannot reach the group's store: {first_line(error)}") from None
    return PrefixStore(f"v{version}", store)


def build_process_group(
    *, version: int, store: str, rank: int, size: int, address: str, device: torch.device
) -> ProcessGroup:
    """Meet the other members; blocks up to `BUILD_LIMIT_S`.

    Args:
        version: of the group; names its keys in the store.
        store: HOST:PORT.
        rank: of this worker.
        size: members.
        address: of this host, where the others reach it; binds the sockets.
        device: where gradients live, which chooses gloo or NCCL.

    Raises:
        BrokenGroupError: if they did not all come.
    """
    if size == 1:
        return ProcessGroup(version, rank, size, device, [])
    client = connect_store(store, version)
    try:
        backends = [
            _connect_backend(PrefixStore(name, client), rank, size, address, device)
            for name in ("train", "state")
        ]
    except RuntimeError as error:
        raise BrokenGroupError(first_line(error)) from None
    group = ProcessGroup(version, rank, size, device, backends)
    group.store = client
    return group


def _connect_backend(
    store: PrefixStore, rank: int, size: int, address: str, device: torch.device
) -> Any:
    if device.type == "cuda":
        return connect_nccl(store, rank, size, address, operation_s=OPERATION_LIMIT_S)
    return connect_gloo(
        store, rank, size, address, build_s=BUILD_LIMIT_S, operation_s=OPERATION_LIMIT_S
    )
