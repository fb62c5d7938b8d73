"""Flood guard of TCP: only connections that send more than is read are cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from schemas.transport import connection_limits, flood_guard
from schemas.transport.flood_guard import FloodGuard
from schemas.transport.keys import Identity, KeyPair, write_keys
from schemas.transport.sockets import Socket
from schemas.transport.state_transfer import StateServer
from tests.support.schemas_links import (
    HeldLink,
    connected,
    events_of,
    free_address,
    send_endless_message,
    soon,
)

MIB = 1 << 20
SLACK = 2000  # bytes: a handshake and heartbeats


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_UNREAD_BYTES", 8 * MIB)
    monkeypatch.setattr(flood_guard, "MAX_TOTAL_UNREAD_BYTES", 12 * MIB)
    monkeypatch.setattr(flood_guard, "CHECK_GROWTH_BYTES", -(1 << 60))  # each look finds it
    monkeypatch.setattr(flood_guard, "CHECK_INTERVAL_S", 0.005)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyPair]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: write_keys(folder, name) for name in ("server", "ada", "bob", "node")}


class Setup:
    """A server and its clients, with keys or without."""

    def __init__(self, keys: dict[str, KeyPair] | None) -> None:
        self.keys = keys
        self.server = HeldLink(keys["server"] if keys else None)
        self.cut: list[str] = []
        self.denied: list[str] = []
        self._links = [self.server]
        roles = {"ada": "user", "bob": "user", "node": "node"} if keys else {}
        known = {keys[name].public: Identity(role, name) for name, role in roles.items() if keys}
        authority = self.server.authority(known, lambda why, _: self.denied.append(why))
        self._tasks = [asyncio.create_task(authority.run())]
        self.address = free_address()

    def dealer(self, name: str = "ada") -> Socket:
        link = HeldLink(self.keys[name] if self.keys else None)
        self._links.append(link)
        return link.connect(
            "DEALER", self.address, self.keys["server"].public if self.keys else None
        )

    async def sender(self, name: str = "ada") -> Socket:
        return await connected(self.dealer(name))

    def watch(self) -> None:
        watching = self.server.guard_connections(self.cut.append)
        self._tasks.append(asyncio.create_task(watching))

    async def unread_bytes(self, least: int) -> list[int]:
        """Unread bytes of each connection, once they are `least` in all."""
        watch: FloodGuard = self.server._flood_guard
        async with asyncio.timeout(60.0):
            while True:
                watch.process_events()
                found = sorted(watch.unread_bytes(each) for each in watch.descriptors())
                if sum(found) >= least:
                    return found
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            link.close()


@pytest.fixture(params=["with keys", "without"])
async def setup(request: pytest.FixtureRequest, keys: dict[str, KeyPair]) -> AsyncIterator[Setup]:
    setup = Setup(None if request.param == "without" else keys)
    yield setup
    await setup.close()


only_with_keys = pytest.mark.parametrize("setup", ["with keys"], indirect=True)


def send_endless(address: str, frame: int) -> int:
    """Send an endless message; the bytes sent until the connection was cut."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as wire:
        return send_endless_message(wire, frame)


@pytest.mark.parametrize("setup", ["without"], indirect=True)
async def test_an_endless_message_costs_its_sender_the_connection(setup: Setup) -> None:
    router = setup.server.bind("ROUTER", setup.address)
    setup.watch()
    other = await setup.sender()

    await soon(asyncio.to_thread(send_endless, setup.address, MIB))
    other.send(b"still here")

    assert (await soon(router.receive())).frames[1:] == (b"still here",)
    (line,) = setup.cut
    assert line.startswith("127.0.0.1:")
    assert line.endswith("bytes that it sent were not read")


async def test_messages_that_are_not_read_cost_their_sender_the_connection(setup: Setup) -> None:
    setup.server.bind("ROUTER", setup.address)
    setup.watch()
    hostile = await setup.sender()
    lost = events_of(hostile, zmq.Event.DISCONNECTED)

    for _ in range(40):
        hostile.send(bytes(MIB))
    await soon(lost)

    assert len(setup.cut) == 1


@only_with_keys
async def test_a_key_that_was_cut_off_often_has_to_wait_and_other_keys_do_not(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "FREE_CUTS", 1)
    monkeypatch.setattr(connection_limits, "FIRST_DELAY_S", connection_limits.MAX_DELAY_S)
    router = setup.server.bind("ROUTER", setup.address)
    setup.watch()
    hostile = await setup.sender()

    async with asyncio.timeout(60.0):
        while len(setup.cut) < 2:
            hostile.send(bytes(MIB))
            await asyncio.sleep(0.001)
        while not setup.denied:
            await asyncio.sleep(0.001)
    bob = await setup.sender("bob")
    bob.send(b"still here")
    heard = await soon(router.receive())
    while heard.identity != Identity("user", "bob"):  # what was sent before the cut
        heard = await soon(router.receive())

    assert heard.frames[1:] == (b"still here",)
    assert setup.denied == ["user:ada cannot connect for 60 s: its connections were cut off"]


@only_with_keys
async def test_a_node_that_was_cut_off_connects_again_at_once(
    setup: Setup, keys: dict[str, KeyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "FREE_CUTS", 0)
    router = setup.server.bind("ROUTER", setup.address)
    for _ in range(3):
        setup.server._flood_guard.backoff.cut("ones-1", keys["node"].public)

    node = await setup.sender("node")
    node.send(b"here")

    assert (await soon(router.receive())).frames[1:] == (b"here",)


@only_with_keys
async def test_a_key_with_many_connections_that_are_cut_together_is_counted_once(
    setup: Setup,
) -> None:
    router = setup.server.bind("ROUTER", setup.address)
    for _ in range(3):
        (await setup.sender()).send(b"here")
        await soon(router.receive())
    watch = setup.server._flood_guard
    watch.process_events()

    lines = watch.cut_flooding(dict.fromkeys(watch.descriptors(), 9 * MIB))

    assert len(lines) == 3
    assert [cuts.count for cuts in watch.backoff._cuts.values()] == [1]


async def test_messages_that_were_read_are_not_counted(setup: Setup) -> None:
    router = setup.server.bind("ROUTER", setup.address)
    sender = await setup.sender()
    frames = [bytes(size) for size in (0, 1, 220, 221, 222, 223, 253, 254, 255, 256, 70_000)]

    for _ in range(100):
        sender.send(*frames)
    (waiting,) = await setup.unread_bytes(100 * sum(map(len, frames)))
    for _ in range(100):
        await soon(router.receive())

    (left,) = await setup.unread_bytes(0)
    assert waiting > 7_000_000
    assert left < SLACK


async def test_a_closed_connection_is_not_checked(setup: Setup) -> None:
    setup.server.bind("ROUTER", setup.address)
    sender = await setup.sender()
    assert len(await setup.unread_bytes(1)) == 1
    watch = setup.server._flood_guard
    (descriptor,) = watch.descriptors()

    sender._socket.disconnect(setup.address)
    async with asyncio.timeout(60.0):
        while watch.descriptors():
            watch.process_events()
            await asyncio.sleep(0.005)

    assert (watch.unread_bytes(descriptor), watch.cut(descriptor)) == (0, "")


def _descriptors(path: Path) -> list[int]:
    """Of this process, that are of this file; other files may be closed by the garbage collector."""
    same: list[int] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            if link.samefile(path):
                same.append(int(link.name))
    return same


def test_a_descriptor_that_is_no_connection_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        assert FloodGuard()._peer(file.fileno(), "") is None
        assert _descriptors(path) == [file.fileno()]


def test_the_worst_connections_are_cut_beyond_the_total_limit() -> None:
    watch, gone = FloodGuard(), list[int]()

    def end(descriptor: int) -> flood_guard._Ended:
        gone.append(descriptor)
        return flood_guard._Ended(f"peer-{descriptor}", "ones-1", b"")

    watch._end = end  # type: ignore[method-assign]

    lines = watch.cut_flooding({3: 5 * MIB, 4: 7 * MIB, 5: 6 * MIB, 6: 10})

    assert gone == [4]
    assert lines == [f"peer-4 is cut off: {7 * MIB} bytes that it sent were not read"]


def test_growth_of_memory_is_detected_once() -> None:
    sizes = iter([100, 100 + 15 * MIB, 50, 50 + 16 * MIB, 60 + 16 * MIB, 50 + 32 * MIB])
    growth = flood_guard.GrowthDetector(lambda: next(sizes), 16 * MIB)

    assert [growth.detected() for _ in range(5)] == [False, False, True, False, True]


def test_a_request_for_a_state_that_does_not_end_is_cut_off() -> None:
    with contextlib.closing(StateServer("127.0.0.1", lambda _: "", lambda _: None)) as server:
        assert send_endless(f"tcp://{server.address}", 4000) > 8 * MIB
