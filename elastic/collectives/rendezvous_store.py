"""The store that the members of one version meet at: served by one worker, asked by all."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.collectives.backend_protocol import BUILD_LIMIT_S, LONG, first_line
from elastic.training_errors import BrokenGroupError


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


class GroupWords:
    """Words between the members of one version, beside their collectives.

    Every word has a client of its own: one that waits would hold up whoever shares it.
    """

    def __init__(self, address: str, version: int) -> None:
        self._address = address
        self._version = version

    def post(self, key: str, make: Callable[[], bytes]) -> None:
        """Say what `make` returns, off the calling thread.

        Args:
            key: name of the word, and of the thread.
            make: gives the value, in a thread of its own.
        """

        def put() -> None:
            # who should read it may be gone, which the next reduction finds out
            with contextlib.suppress(RuntimeError, BrokenGroupError):
                store: Any = connect_store(self._address, self._version)  # its types know text only
                store.set(key, make())

        threading.Thread(target=put, name=key, daemon=True).start()

    def ask(self, key: str) -> bytes:
        """Wait until somebody has said `key`, and return it; off the training thread.

        Raises:
            BrokenGroupError: if the store is gone.
            RuntimeError: the same, while it waits.
        """
        store = connect_store(self._address, self._version)
        store.wait([key], LONG)
        return bytes(store.get(key))
