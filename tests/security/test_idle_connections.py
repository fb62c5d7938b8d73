"""Connections that a stranger opens without a handshake, up to the limit of descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from schemas.transport import flood_guard
from schemas.transport.flood_guard import SilentConnections, SpareDescriptor, memory_bytes
from schemas.transport.keys import Identity, write_keys
from schemas.transport.sockets import Incoming, Socket
from schemas.transport.state_transfer import StateServer
from tests.support.schemas_links import HeldLink, connected, free_address

MOST = 8  # connections without a handshake
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "max_descriptors", lambda: MOST * flood_guard.SILENT_SHARE)
    monkeypatch.setattr(flood_guard, "CHECK_INTERVAL_S", 0.005)


def opened(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def is_open(wire: socket.socket) -> bool:
    wire.settimeout(0.0)
    try:
        while wire.recv(1 << 16):  # the greeting
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def still_open(wires: list[socket.socket]) -> list[int]:
    """Wait until few connections are open; return their places, and close them."""
    async with asyncio.timeout(LIMIT_S):
        while sum(map(is_open, wires)) > MOST:
            await asyncio.sleep(0.005)
    left = [place for place, wire in enumerate(wires) if is_open(wire)]
    for wire in wires:
        wire.close()
    return left


class Port:
    """A server with keys, and its client ada."""

    def __init__(self, folder: Path) -> None:
        self.keys = {name: write_keys(folder, name) for name in ("server", "ada")}
        self.link = HeldLink(self.keys["server"])
        self.clients: list[HeldLink] = []
        known = {self.keys["ada"].public: Identity("user", "ada")}
        authority = self.link.authority(known, lambda *_: None)
        self.address = free_address()
        self.socket = self.link.bind("ROUTER", self.address)
        self.tasks = [
            asyncio.create_task(authority.run()),
            asyncio.create_task(self.link.guard_connections(lambda _: None)),
        ]

    async def client(self) -> Socket:
        link = HeldLink(self.keys["ada"])
        self.clients.append(link)
        return await connected(link.connect("DEALER", self.address, self.keys["server"].public))

    async def received(self) -> Incoming:
        return await asyncio.wait_for(self.socket.receive(), LIMIT_S)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for link in [*self.clients, self.link]:
            link.close()


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    made = Port(tmp_path)
    yield made
    await made.close()


async def test_the_oldest_idle_connections_are_closed_and_clients_stay(port: Port) -> None:
    old = await port.client()
    assert old.send(b"hello")
    await port.received()
    idle = [opened(port.address) for _ in range(5 * MOST)]

    left = await still_open(idle)
    new = await port.client()
    sent = [client.send(b"hello") for client in (old, new)]

    assert (left, sent) == (list(range(4 * MOST, 5 * MOST)), [True, True])
    assert [(await port.received()).identity for _ in sent] == [Identity("user", "ada")] * 2


def test_the_port_of_states_closes_the_oldest_idle_connections_too() -> None:
    server = StateServer("127.0.0.1", lambda _: "", lambda _: None)
    try:
        idle = [opened(f"tcp://{server.address}") for _ in range(5 * MOST)]
        left = asyncio.run(still_open(idle))
    finally:
        server.close()

    assert left == list(range(4 * MOST, 5 * MOST))


HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"]


@pytest.mark.parametrize(
    ("most", "admitted", "cut"),
    [
        (7, {}, []),
        (6, {}, [1]),
        (4, {}, [1, 0, 2]),
        (0, {}, [1, 0, 2, 5, 3, 4, 6]),
        (4, {"10.0.0.2": 2}, [0]),  # two of the three have completed a handshake
        (3, {"10.0.0.2": 2, "10.0.0.1": 1}, [5]),  # both are of one network
    ],
)
def test_the_network_with_most_connections_without_a_handshake_loses_its_oldest(
    most: int, admitted: dict[str, int], cut: list[int]
) -> None:
    port = SilentConnections()
    for descriptor, host in enumerate(HOSTS):
        port.add(descriptor, host)

    assert port.surplus(most, lambda host: admitted.get(host, 0)) == cut


def test_a_reused_descriptor_is_a_new_connection() -> None:
    port = SilentConnections()
    for descriptor, host in [(0, "10.0.0.1"), (1, "10.0.0.1"), (0, "10.0.0.1")]:
        port.add(descriptor, host)

    assert port.surplus(1, lambda _: 0) == [1]


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())), hard)
        )
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)


async def test_the_guard_needs_no_free_descriptor(port: Port) -> None:
    guard = port.link._flood_guard
    client = await port.client()
    assert client.send(b"hello")
    source = (await port.received()).source
    with no_descriptor_free():
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        unread, memory, peer = guard.unread_bytes(source), memory_bytes(), guard.cut(source)

    assert (unread >= 0, memory > 0, peer.startswith("127.0.0.1:")) == (True, True, True)


def test_a_closed_spare_descriptor_closes_and_replaces_nothing() -> None:
    spare = SpareDescriptor()
    spare.close()
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # reuse its numbers

    spare.close()
    with pytest.raises(OSError, match="Bad file descriptor"), spare.duplicate(held[0]):
        pass

    for each in held:
        os.close(each)
