"""Whose port it is: listening sockets of the kernel's tables, and who holds them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nodeagent.streams import address_of, listeners

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid ...\n"
ROW = (
    "   0: {} {} {} 00000000:00000000 00:00000000 00000000  1000        0 {} 1 0000 100 0 0 10 0\n"
)
NOWHERE4, NOWHERE6 = "00000000:0000", "0" * 32 + ":0000"


def table(folder: Path, name: str, *rows: tuple[str, str, int]) -> None:
    away = NOWHERE4 if name == "tcp" else NOWHERE6
    lines = (ROW.format(where, away, state, inode) for where, state, inode in rows)
    (folder / name).write_text(HEADER + "".join(lines))


def test_only_listening_sockets_of_this_port_and_of_loopback_count(tmp_path: Path) -> None:
    table(
        tmp_path, "tcp",
        ("0100007F:1776", "0A", 11),  # 127.0.0.1:6006
        ("00000000:1776", "0A", 12),  # 0.0.0.0:6006
        ("0100007F:1777", "0A", 13),  # another port
        ("0100007F:1776", "01", 14),  # a connection
        ("0700000A:1776", "0A", 15),  # 10.0.0.7
    )  # fmt: skip
    table(
        tmp_path, "tcp6",
        ("00000000000000000000000001000000:1776", "0A", 16),  # ::1
        ("00000000000000000000000000000000:1776", "0A", 17),  # ::
        ("0000000000000000FFFF00000100007F:1776", "0A", 18),  # ::ffff:127.0.0.1
    )  # fmt: skip

    assert listeners(6006, tmp_path) == [
        ("127.0.0.1", "11"), ("127.0.0.1", "12"), ("::1", "16"), ("127.0.0.1", "17"),
        ("127.0.0.1", "18"),
    ]  # fmt: skip


def test_a_host_without_tables_has_no_listeners(tmp_path: Path) -> None:
    assert listeners(6006, tmp_path) == []


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_belongs_to_the_process_that_listens(family: int) -> None:
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    with socket.socket(family) as server:
        try:
            server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError:
            pytest.skip("this host has no such address")
        server.listen()
        port = server.getsockname()[1]

        own = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        assert address_of(port, [os.getpid()]) == own
        assert address_of(port, [os.getppid()]) is None
        assert address_of(port, []) is None


def test_a_free_port_belongs_to_no_process() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    assert address_of(port, [os.getpid()]) is None
