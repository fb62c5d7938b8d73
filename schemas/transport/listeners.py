"""TCP sockets that listen, and that another process serves."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar

from schemas.errors import AddressInUseError, SettingsError

BACKLOG: Final = 4096  # peers that may connect at once; others retry after seconds
WAIT_S: Final = 10.0  # a killed predecessor might still be closing its sockets
PAUSE_S: Final = 0.1
T = TypeVar("T")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Peers can connect at once, and wait until it is served.

    It uses the same address as libzmq would. `*` stands for all IPv4 addresses.

    Raises:
        AddressInUseError: if another socket uses the address.
        SettingsError: if this host has no such address.
    """
    try:
        family = socket.AF_INET6 if has_only_ipv6(host) else socket.AF_INET
        named = "0.0.0.0" if host == "*" else host  # noqa: S104 - as the settings say
        *_, address = socket.getaddrinfo(named, port, family, socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(address)
            found.listen(BACKLOG)
        except OSError:
            found.close()
            raise
    except OSError as error:
        refusal = AddressInUseError if error.errno == errno.EADDRINUSE else SettingsError
        what = f"cannot bind {host}:{port}: {error.strerror}"
        raise refusal(what, "choose another address") from None
    return found


def has_only_ipv6(host: str) -> bool:
    """True if a host has only IPv6 addresses. libzmq tries no more than one address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (socket.gaierror, UnicodeError):  # UnicodeError: not a valid DNS name
        return False
    return bool(found) and all(family == socket.AF_INET6 for family, *_ in found)


async def when_free(bind: Callable[[], T]) -> T:
    """Return the result of `bind`. If it raises `AddressInUseError`, repeat it for `WAIT_S`.

    Raises:
        AddressInUseError: if the address was not released.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return bind()
        except AddressInUseError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(PAUSE_S)
