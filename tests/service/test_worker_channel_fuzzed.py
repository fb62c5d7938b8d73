"""Whatever somebody writes into the workers' socket, another worker is heard."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Awaitable, Callable

import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nodeagent.connections import MAX_WORKER_MESSAGE_BYTES, WorkerChannel
from schemas.codec import encode
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.transport.sockets import ENVELOPE, MAX_QUEUED_ON_IPC, ThreadDealer
from schemas.wire.worker import FromWorker, Reported, WorkerHello
from tests.support.builders import A
from tests.support.schemas_links import GREETING, MORE, READY, framed, shake_hands
from tests.support.sizes import examples

LIMIT_S = 60.0
MINE, TOKEN = WorkerId(f"{A}.v1.r0"), "a" * 64
HELLO = WorkerHello(job=JobId(A), version=Version(1), rank=Rank(0), pid=1, token=TOKEN)


def reported(count: int) -> Reported:
    return Reported(job=A, version=Version(1), rank=Rank(0), count=count)


Heard = list[tuple[WorkerId, FromWorker]]


async def channel_with(meddle: Callable[[str], Awaitable[None]]) -> Heard:
    """What a channel hears of an honest worker, that greeted before and speaks after."""
    with tempfile.TemporaryDirectory(prefix="ones-") as folder:
        heard: Heard = []
        address = f"ipc://{folder}/s"
        channel = WorkerChannel(address, lambda *said: heard.append(said), {MINE: TOKEN}.get)
        receiving = asyncio.create_task(channel.receive())
        honest = ThreadDealer(address)

        async def said(message: FromWorker) -> None:
            async with asyncio.timeout(LIMIT_S):
                while (MINE, message) not in heard:
                    assert not receiving.done()
                    honest.send(encode(message))
                    await asyncio.sleep(0.002)

        await said(HELLO)
        await meddle(f"{folder}/s")
        await said(reported(7))
        receiving.cancel()
        honest.close()
        channel.close()
        return heard


Written = tuple[bool, bytes]  # whether after a handshake, and what


async def write(path: str, written: Written) -> None:
    shaken, data = written
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(path)
        wire.settimeout(LIMIT_S)
        with contextlib.suppress(OSError):
            if shaken:
                await asyncio.to_thread(shake_hands, wire)
            await asyncio.to_thread(wire.sendall, data)
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_WR)


def frames(*said: tuple[int, bytes]) -> Written:
    """Whatever flags they have, after a handshake."""
    return True, b"".join(framed(flags, body) for flags, body in said)


hostile = st.one_of(
    st.tuples(st.booleans(), st.binary(max_size=300)),
    st.binary(max_size=300).map(lambda data: (False, GREETING + data)),
    st.binary(max_size=300).map(lambda data: (False, GREETING + READY + data)),
    st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=80)), max_size=8).map(
        lambda said: frames(*said)
    ),
)


@given(st.lists(hostile, min_size=1, max_size=5))
@example([frames(*[(MORE, b"")] * 1000)])
@example([frames((0, encode(reported(9))))])
@example([frames((0, encode(WorkerHello(job=A, version=Version(1), rank=Rank(0), pid=2))))])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_written_another_worker_is_heard_and_nobody_speaks_for_it(
    written: list[Written],
) -> None:
    async def meddle(path: str) -> None:
        for each in written:
            await write(path, each)

    heard = asyncio.run(channel_with(meddle))

    assert {worker for worker, _ in heard} == {MINE}
    assert {message for _, message in heard} == {HELLO, reported(7)}


@given(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=6), max_size=8))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_messages_of_any_frames_are_no_words_of_a_worker(messages: list[list[bytes]]) -> None:
    async def meddle(path: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 1000
            dealer.connect(f"ipc://{path}")
            for frames in messages:
                dealer.send_multipart(frames)
            await asyncio.sleep(0)

    heard = asyncio.run(channel_with(meddle))

    assert {worker for worker, _ in heard} == {MINE}


def test_a_message_that_no_worker_would_say_ends_its_connection() -> None:
    cut: list[bool] = []

    async def meddle(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(path)
            wire.settimeout(LIMIT_S)
            large = framed(0, bytes(MAX_WORKER_MESSAGE_BYTES + ENVELOPE + 1))

            def speak() -> None:
                shake_hands(wire)
                with contextlib.suppress(ConnectionError):
                    wire.sendall(large)
                    while wire.recv(4096):
                        pass
                cut.append(True)

            await asyncio.to_thread(speak)

    heard = asyncio.run(channel_with(meddle))

    assert cut
    assert {worker for worker, _ in heard} == {MINE}


def test_what_waits_of_one_connection_is_a_few_mebibytes() -> None:
    assert MAX_QUEUED_ON_IPC * (MAX_WORKER_MESSAGE_BYTES + ENVELOPE) <= 8 << 20
    with tempfile.TemporaryDirectory(prefix="ones-") as folder:

        async def bounds() -> tuple[object, object]:
            channel = WorkerChannel(f"ipc://{folder}/s", lambda *_: None, lambda _: None)
            found = channel.socket._socket.rcvhwm, channel.socket._socket.maxmsgsize
            channel.close()
            return found

        assert asyncio.run(bounds()) == (MAX_QUEUED_ON_IPC, MAX_WORKER_MESSAGE_BYTES + ENVELOPE)
