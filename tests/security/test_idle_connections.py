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
    monkeypatch.setattr(flood_guard, "MAX_SILENT", MOST)
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


async def still_open(wires: list[socket.socket], most: int = MOST) -> list[int]:
    """Wait until few connections are open; return their places, and close them."""
    async with asyncio.timeout(LIMIT_S):
        while sum(map(is_open, wires)) > most:
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
    ("excess", "admitted", "cut"),
    [
        (0, {}, []),
        (1, {}, [1]),
        (3, {}, [1, 0, 2]),
        (7, {}, [1, 0, 2, 5, 3, 4, 6]),
        (1, {"10.0.0.2": 2}, [0]),  # two of the three have completed a handshake
        (1, {"10.0.0.2": 2, "10.0.0.1": 1}, [5]),  # both are of one network
    ],
)
def test_the_network_with_most_connections_without_a_handshake_loses_its_oldest(
    excess: int, admitted: dict[str, int], cut: list[int]
) -> None:
    silent = SilentConnections()
    for descriptor, host in enumerate(HOSTS):
        silent.add(descriptor, "agents", host)

    assert silent.surplus(excess, lambda _, host: admitted.get(host, 0)) == cut


def test_a_network_is_counted_at_each_port_of_its_own() -> None:
    silent = SilentConnections()
    peers = [("agents", "10.0.0.1"), ("events", "10.0.0.1"), ("agents", "10.0.0.2")]
    for descriptor, (port, host) in enumerate([*peers, peers[2]]):
        silent.add(descriptor, port, host)

    assert silent.surplus(1, lambda *_: 0) == [2]


@pytest.mark.parametrize(("unused", "left"), [(300, range(20, 21)), (40, range(5, 16))])
async def test_connections_without_a_handshake_may_have_half_of_the_unused_descriptors(
    port: Port, monkeypatch: pytest.MonkeyPatch, unused: int, left: range
) -> None:
    client = await port.client()
    assert client.send(b"hello")
    await port.received()
    monkeypatch.setattr(flood_guard, "MAX_SILENT", 100)
    here = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(flood_guard, "max_descriptors", lambda: here + unused)
    idle = [opened(port.address) for _ in range(20)]  # and as many on the other side

    assert len(await still_open(idle, most=left[-1])) in left
    assert client.send(b"hello")
    assert (await port.received()).identity == Identity("user", "ada")


def test_a_reused_descriptor_is_a_new_connection() -> None:
    silent = SilentConnections()
    for descriptor in (0, 1, 0):
        silent.add(descriptor, "agents", "10.0.0.1")

    assert silent.surplus(1, lambda *_: 0) == [1]


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
