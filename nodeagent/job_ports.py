"""Owners of listening TCP sockets: whether a port of this host belongs to a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, NamedTuple

LISTEN: Final = "0A"  # state of a socket in /proc/net/tcp
TABLES: Final = ("tcp", "tcp6")


class Listener(NamedTuple):
    """Listening socket that accepts connections from this host."""

    inode: int
    address: str  # at which to connect to it


def listeners(port: int, net: Path = Path("/proc/net")) -> list[Listener]:
    """Return the sockets that listen at a port of the loopback addresses."""
    return [one for name in TABLES for one in _rows(net / name, port)]


def _rows(table: Path, port: int) -> Iterator[Listener]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        words = line.split()
        where, _, number = words[1].rpartition(":")
        if words[3] != LISTEN or int(number, 16) != port:
            continue
        address = _address(where)
        plain = getattr(address, "ipv4_mapped", None) or address
        if plain.is_loopback or plain.is_unspecified:
            six = isinstance(plain, IPv6Address) and plain.is_loopback
            yield Listener(int(words[9]), "::1" if six else "127.0.0.1")


def _address(text: str) -> IPv4Address | IPv6Address:
    """Convert an address of 32-bit words in the byte order of the host."""
    raw = b"".join(
        int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)
    )
    return IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw)  # noqa: PLR2004


def address_of(port: int, pids: Iterable[int]) -> str | None:
    """Return the address of a port that belongs to these processes, or None if it does not.

    All sockets that may get the connection must belong to them.
    """
    found = listeners(port)
    if not found or not {one.inode for one in found} <= _sockets(pids):
        return None
    return found[0].address


def _sockets(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the sockets that processes have open."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = str(entry.readlink())
                    if link.startswith("socket:["):
                        held.add(int(link[8:-1]))
    return held
