"""Flood guard of Unix sockets: only processes that send more than is read are cut."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
import zmq

from schemas.transport import flood_guard
from schemas.transport.flood_guard import UnixFloodGuard
from schemas.transport.sockets import Socket
from tests.support.schemas_links import HeldLink, connected, events_of, send_endless_message, soon

pytestmark = pytest.mark.slow
MIB = 1 << 20
ME = f"process {os.getpid()} of uid {os.getuid()}"


class Setup:
    """A server on a Unix socket, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        self._links = [HeldLink(None)]
        self.router = self._links[0].bind("ROUTER", f"ipc://{self.path}")
        self.cut: list[str] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def watch(self) -> UnixFloodGuard:
        (found,) = self._links[0]._unix_guards
        return found

    def begin(self) -> None:
        self._watching = asyncio.create_task(self._links[0].guard_connections(self.cut.append))

    def dealer(self) -> Socket:
        self._links.append(HeldLink(None))
        return self._links[-1].connect("DEALER", f"ipc://{self.path}")

    async def sender(self) -> Socket:
        return await connected(self.dealer())

    async def until_counted(self, connections: int) -> list[str]:
        """Wait until so many are counted; the lines of cuts until then."""
        lines: list[str] = []
        async with asyncio.timeout(60.0):
            while True:
                lines += self.watch.process_events()[0]
                if self.watch.count == connections:
                    return lines
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for link in self._links:
            link.close()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "UNIX_CHECK_INTERVAL_S", 0.005)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    folder = Path(mkdtemp(prefix="ones-"))  # tmp_path may be too long for AF_UNIX
    setup = Setup(folder)
    yield setup
    await setup.close()
    shutil.rmtree(folder)


def send_endless(path: Path, frame: int) -> int:
    """Send an endless message; the bytes sent until the connection was cut."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(20.0)
        wire.connect(str(path))
        return send_endless_message(wire, frame)


@pytest.mark.parametrize("frame", [100, 16_000])
async def test_an_endless_message_costs_its_sender_the_connection(setup: Setup, frame: int) -> None:
    setup.begin()
    honest = await setup.sender()

    sent = await soon(asyncio.to_thread(send_endless, setup.path, frame))
    assert honest.send(b"still here")

    assert (await soon(setup.router.receive())).frames[1:] == (b"still here",)
    assert sent > MIB
    assert setup.cut == [f"{ME} is cut off: it sends more than is read"]


async def test_all_connections_are_cut_when_memory_grows_and_none_stands_out(setup: Setup) -> None:
    now = 0
    setup.watch._memory = lambda: now
    setup.watch._reset()
    setup.begin()
    honest = await setup.sender()
    cut = events_of(honest, zmq.Event.DISCONNECTED)

    now = flood_guard.MAX_GROWTH_BYTES + 6 * MIB
    await soon(cut)
    again = await setup.sender()
    assert again.send(b"back")

    assert (await soon(setup.router.receive())).frames[1:] == (b"back",)
    assert setup.cut == [
        "all connections are cut: 70 MiB more are in use, and no connection stands out"
    ]


async def test_memory_that_grows_for_another_reason_cuts_no_connection(setup: Setup) -> None:
    seen: list[int] = []

    def memory() -> int:
        seen.append(len(seen))
        return min(len(seen) * MIB, flood_guard.MAX_GROWTH_BYTES - 1)

    setup.watch._memory = memory
    setup.watch._minimum, setup.watch._next_check_bytes = 0, flood_guard.CHECK_GROWTH_BYTES
    honest = await setup.sender()
    setup.begin()

    async with asyncio.timeout(60.0):
        while len(seen) < 100:
            await asyncio.sleep(0.005)
    assert honest.send(b"here")

    assert (await soon(setup.router.receive())).frames[1:] == (b"here",)
    assert setup.cut == []


async def test_connections_of_one_user_are_limited(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_guard, "MAX_CONNECTIONS_PER_USER", 2)
    honest = [await setup.sender() for _ in range(2)]
    await setup.until_counted(2)

    surplus = setup.dealer()
    lines: list[str] = []
    async with asyncio.timeout(60.0):
        while not lines:
            lines += setup.watch.process_events()[0]
            await asyncio.sleep(0.005)
    assert all(each.send(b"here") for each in honest)
    heard = [(await soon(setup.router.receive())).frames[1:] for _ in honest]

    assert heard == [(b"here",)] * 2
    assert lines[0] == f"{ME} is cut off: 2 of that user are connected"
    surplus.close()
    honest[0].close()
    await setup.until_counted(1)  # the surplus dealer may have come back and been cut again
    assert await connected(setup.dealer())
    await setup.until_counted(2)


def test_a_user_has_no_more_connections_than_a_quarter_of_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, most in (
        (64, 16),
        (1 << 20, flood_guard.MAX_CONNECTIONS_PER_USER),
        (-1, flood_guard.MAX_CONNECTIONS_PER_USER),
    ):
        monkeypatch.setattr(flood_guard.resource, "getrlimit", lambda _, soft=soft: (soft, -1))
        assert flood_guard.max_connections_per_user() == most


async def test_endless_short_connections_leave_the_loop_to_others(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_guard, "MAX_EVENTS", 4)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(setup.path))
    turns = []
    async with asyncio.timeout(60.0):
        while sum(turns) < 8:  # most of 40 events, four at a time
            _, more = setup.watch.process_events()
            turns.append(more)
            await asyncio.sleep(0.005)

    assert await setup.until_counted(0) == []


async def test_a_few_unread_bytes_are_no_flood(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.sender()
    await setup.until_counted(1)
    for unread, behind in (
        (flood_guard.MAX_KERNEL_BYTES, 0),
        (flood_guard.MAX_KERNEL_BYTES + 1, 1),
    ):
        monkeypatch.setattr(setup.watch, "_unread", lambda *_, unread=unread: unread)
        assert len(await setup.watch._cut_flooding()) == behind
