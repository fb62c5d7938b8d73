"""Check that a TCP port answers, for libraries that would try for minutes."""

from __future__ import annotations

import socket
from typing import Final

REACH_S: Final = 5.0  # longest wait for a connection


def reach(address: str) -> None:
    """Connect to HOST:PORT and disconnect.

    Raises:
        ConnectionError: if there is no reply; its text names the address.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"{address}: {getattr(error, 'strerror', None) or error}") from None
