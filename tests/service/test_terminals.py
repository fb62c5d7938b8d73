"""A held terminal and its clients, over the real Unix socket; this test is the program."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import termios
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Self

import pytest

from nodeagent import terminals
from nodeagent.terminals import (
    KEEP_S,
    LATEST,
    MAX_FRAME,
    SIZE,
    Bounds,
    Terminal,
    connect,
    listen,
)
from schemas.codec import FROM_TERMINAL
from schemas.host.fork_server import framed, read_frame
from schemas.ids import JobId
from schemas.wire.streams import (
    PIECE,
    WINDOW,
    OpenStream,
    StreamClosed,
    StreamData,
)

LIMIT_S: Final = 30.0
ONE, TWO = "1" * 32, "2" * 32


def data(offset: int, text: bytes = b"", **fields: Any) -> StreamData:
    """Data of an end that has received nothing."""
    given = {"stream": ONE, "kept_from": 0, "received": 0, "limit": WINDOW, **fields}
    return StreamData(offset=offset, data=text, **given)


class Seat:
    """A client of a terminal."""

    def __init__(self, stream: str, reader: asyncio.StreamReader, writer: Any) -> None:
        self.stream, self._reader, self._writer = stream, reader, writer
        self.output = b""

    @classmethod
    async def at(cls, stage: Stage, stream: str = ONE, **fields: Any) -> Self:
        reader, writer = await asyncio.open_unix_connection(sock=connect(stage.folder, os.getuid()))
        made = cls(stream, reader, writer)
        stage.seats.append(made)
        made.send(OpenStream(stream=stream, job=JobId("a-1"), **fields))
        return made

    def send(self, message: Any) -> None:
        self._writer.write(framed(message))

    async def next(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while True:
                message = FROM_TERMINAL.decode(await read_frame(self._reader, MAX_FRAME))
                if isinstance(message, StreamData):
                    self.output += message.data
                if isinstance(message, kind):
                    return message

    async def opened(self) -> StreamData:
        """Return the first message."""
        found = await self.next(StreamData)
        assert isinstance(found, StreamData)
        return found

    async def until(self, end: bytes) -> bytes:
        while not self.output.endswith(end):
            await self.next(StreamData)
        return self.output

    def leave(self) -> None:
        self._writer.close()


class Stage:
    """A terminal whose program writes to `slave`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seats = folder, list[Seat]()
        self.master, self.slave = os.openpty()
        attributes = termios.tcgetattr(self.slave)
        attributes[1] &= ~termios.OPOST
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
        os.set_blocking(self.slave, False)
        self.terminal = Terminal(
            folder, self.master, os.getpid(), os.pidfd_open(os.getpid()), Bounds()
        )

    def size(self) -> tuple[int, ...]:
        return SIZE.unpack(fcntl.ioctl(self.slave, termios.TIOCGWINSZ, bytes(SIZE.size)))[:2]

    async def print(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self.slave, data) :]
                await asyncio.sleep(0.001)

    async def typed(self, count: int) -> bytes:
        found = b""
        async with asyncio.timeout(LIMIT_S):
            while len(found) < count:
                with contextlib.suppress(BlockingIOError):
                    found += os.read(self.slave, count)
                await asyncio.sleep(0.001)
        return found


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    task = asyncio.create_task(made.terminal.run(listen(tmp_path)))
    yield made
    for seat in made.seats:
        seat.leave()
    for client in list(made.terminal._clients.values()):
        client.close()
    while made.terminal._clients:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    loop = asyncio.get_running_loop()
    for descriptor in (made.master, made.terminal._pidfd):
        loop.remove_reader(descriptor)
        os.close(descriptor)
    os.close(made.slave)


async def test_a_client_sees_the_latest_output_and_types(stage: Stage) -> None:
    await stage.print(b"hello\n")
    seat = await Seat.at(stage)

    assert await seat.until(b"\n") == b"hello\n"
    seat.send(data(0, b"ls\r"))
    seat.send(data(0, b"ls\rx"))  # repeated, with one more

    assert await stage.typed(4) == b"ls\nx"


async def test_a_terminal_has_the_size_of_its_smallest_window(stage: Stage) -> None:
    first = await Seat.at(stage, ONE, rows=50, cols=100)
    await first.opened()
    second = await Seat.at(stage, TWO, rows=40, cols=200)
    await second.opened()
    assert stage.size() == (40, 100)

    second.send(OpenStream(stream=TWO, job=JobId("a-1"), rows=60, cols=90, again=True))
    await second.next(StreamData)

    assert stage.size() == (50, 90)


async def test_a_client_that_leaves_is_forgotten_even_if_its_input_waits(stage: Stage) -> None:
    seat = await Seat.at(stage, ONE, rows=20, cols=30)
    await seat.opened()
    seat.send(data(0, b"x" * PIECE))
    seat.send(StreamClosed(stream=ONE))
    await Seat.at(stage, TWO, rows=50, cols=100)

    async with asyncio.timeout(LIMIT_S):
        while stage.size() != (50, 100):
            await asyncio.sleep(0.001)
    assert await stage.typed(PIECE) == b"x" * PIECE


async def test_a_client_that_comes_back_gets_what_it_missed(stage: Stage) -> None:
    seat = await Seat.at(stage)
    await stage.print(b"one\n")
    await seat.until(b"one\n")
    seat.leave()
    await stage.print(b"two\n")

    again = await Seat.at(stage, again=True)
    await again.opened()
    again.send(data(0, received=4, lost=True))

    assert await again.until(b"\n") == b"two\n"


async def test_a_program_waits_for_a_client_with_a_full_window(stage: Stage) -> None:
    seat = await Seat.at(stage)
    await seat.opened()
    printing = asyncio.create_task(stage.print(bytes(2 * WINDOW)))
    while len(seat.output) < WINDOW:
        await seat.next(StreamData)
    assert len(seat.output) == WINDOW
    assert not printing.done()

    while not printing.done():
        got = len(seat.output)
        seat.send(data(0, received=got, limit=got + WINDOW))
        if len(seat.output) < 2 * WINDOW:
            await seat.next(StreamData)
        await asyncio.sleep(0)


async def test_lost_and_excessive_input_is_refused(stage: Stage) -> None:
    seat = await Seat.at(stage)
    await seat.opened()

    seat.send(data(9, b"x"))
    assert await seat.next(StreamData) == data(0, lost=True)
    seat.send(data(0, b"x", stream=TWO))  # of another stream: ignored
    seat.send(data(0, received=10**6))

    assert (await seat.next(StreamClosed)).reason == "byte 1000000 was never sent"


async def test_only_the_latest_output_is_kept_without_a_client(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals, "FIRST_S", 0.0)
    size = 3 * LATEST
    await stage.print(bytes(size) + b"last\n")
    seat = await Seat.at(stage)

    opened = await seat.opened()
    await seat.until(b"last\n")

    assert opened.offset >= size - LATEST - 65_536  # which the kernel may still hold
    assert opened.offset + len(seat.output) == size + 5


async def test_a_terminal_hangs_up_without_a_client_or_at_its_time_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung_up: list[float] = []
    monkeypatch.setattr(stage.terminal, "_hang_up", hung_up.append)
    now = time.monotonic()
    stage.terminal._tick(now + KEEP_S - 5.0)
    assert hung_up == []
    stage.terminal._tick(now + KEEP_S + 5.0)
    assert hung_up == [now + KEEP_S + 5.0]

    stage.terminal._bounds = Bounds(limit_s=10.0)
    seat = await Seat.at(stage)
    await seat.opened()
    hung_up.clear()
    stage.terminal._tick(now + 9.0)
    assert hung_up == []
    stage.terminal._tick(now + 15.0)
    assert hung_up == [now + 15.0]


def test_a_socket_of_another_user_gets_no_bytes(tmp_path: Path) -> None:
    listener = listen(tmp_path)

    with pytest.raises(PermissionError, match="another user"):
        connect(tmp_path, os.getuid() + 1)

    listener.close()


def test_a_socket_fits_into_any_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    listener = listen(deep)

    connect(deep, os.getuid()).close()

    listener.close()
