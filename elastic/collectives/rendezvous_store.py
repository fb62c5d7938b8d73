"""Store where the members of one version meet. One worker serves it, and all connect to it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.collectives.backend_protocol import BUILD_TIMEOUT_S, OPERATION_TIMEOUT, first_line
from elastic.training_errors import BrokenGroupError


class StoreServer:
    """TCPStore of one version, served on this worker's address. The system chooses the port.

    If it cannot be served, the constructor raises OSError or torch's RuntimeError.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address, self.port, is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=BUILD_TIMEOUT_S), master_listen_fd=listener.detach(),
        )  # fmt: skip


class StoreServers:
    """Stores that this worker serves, one per version of the group."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._servers: dict[int, StoreServer] = {}

    def __contains__(self, version: int) -> bool:
        """Return whether the store of `version` is served."""
        return version in self._servers

    def serve(self, version: int, *, oldest: int) -> int:
        """Return the port of the store of `version`; open the store if it is not open yet.

        Opening a store closes the stores of versions before `oldest`.
        """
        if version not in self._servers:
            self._servers = {
                known: server for known, server in self._servers.items() if known >= oldest
            }
            self._servers[version] = StoreServer(self._address)
        return self._servers[version].port


def connect_store(address: str, version: int, limit_s: float = BUILD_TIMEOUT_S) -> PrefixStore:
    """Return a new client of the store at HOST:PORT. A client must not be shared by threads."""
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise BrokenGroupError(f"cannot reach the group's store: {first_line(error)}") from None
    return PrefixStore(f"v{version}", store)


class GroupStore:
    """Messages between the members of one version, outside of their collectives.

    Every message uses its own client, because a waiting client blocks all threads that share it.
    """

    def __init__(self, address: str, version: int) -> None:
        self._address = address
        self._version = version

    def post(self, key: str, make: Callable[[], bytes]) -> None:
        """Start a thread, named `key`, that stores the result of `make` under `key`."""

        def post_value() -> None:
            # if the reader is lost, the next reduction detects the loss
            with contextlib.suppress(RuntimeError, BrokenGroupError):
                store: Any = connect_store(self._address, self._version)  # torch's hints: str only
                store.set(key, make())

        threading.Thread(target=post_value, name=key, daemon=True).start()

    def fetch(self, key: str) -> bytes:
        """Wait until `key` is posted and return its value. Never call it on the training thread.

        If the store is lost, it raises BrokenGroupError, or RuntimeError during the wait.
        """
        store = connect_store(self._address, self._version)
        store.wait([key], OPERATION_TIMEOUT)
        return bytes(store.get(key))
