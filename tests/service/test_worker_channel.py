"""Workers' socket: messages count for the worker whose token was shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nodeagent.connections import MAX_WORKER_MESSAGE_BYTES, WorkerChannel
from schemas.codec import TO_WORKER, encode
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.transport.sockets import ENVELOPE, MAX_QUEUED_ON_IPC, ThreadDealer
from schemas.wire import Message
from schemas.wire.worker import FromWorker, Reported, SlotGranted, WorkerHello
from tests.support.builders import A, B
from tests.support.schemas_links import GREETING, MORE, READY, framed, shake_hands
from tests.support.sizes import examples

LIMIT_S = 60.0
MINE, OTHER = WorkerId(f"{A}.v1.r0"), WorkerId(f"{B}.v1.r0")
OLD = WorkerId(f"{A}.v1.r1")
TOKENS = {MINE: "a" * 64, OTHER: "b" * 64, OLD: ""}


def hello(job: JobId = A, rank: int = 0, token: str = "") -> WorkerHello:
    return WorkerHello(job=job, version=Version(1), rank=Rank(rank), pid=1, token=token)


def reported(job: JobId = A, rank: int = 0, count: int = 1) -> Reported:
    return Reported(job=job, version=Version(1), rank=Rank(rank), count=count)


HELLO = hello(token=TOKENS[MINE])


@dataclass
class Node:
    """A channel, and what came over it."""

    channel: WorkerChannel
    heard: asyncio.Queue[tuple[WorkerId, FromWorker]]
    dealers: list[ThreadDealer] = field(default_factory=list)

    def connected(self, address: str = "") -> ThreadDealer:
        dealer = ThreadDealer(address or self.channel._address)
        self.dealers.append(dealer)
        while not dealer.poll(LIMIT_S)[1]:
            pass
        return dealer

    async def say(self, dealer: ThreadDealer, *messages: Message) -> None:
        """Say it, and have it taken."""
        for message in messages:
            assert dealer.send(encode(message))
            incoming = await asyncio.wait_for(self.channel.socket.receive(), LIMIT_S)
            self.channel._handle(incoming, message)  # type: ignore[arg-type]

    def all_heard(self) -> list[tuple[WorkerId, FromWorker]]:
        return [self.heard.get_nowait() for _ in range(self.heard.qsize())]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    heard: asyncio.Queue[tuple[WorkerId, FromWorker]] = asyncio.Queue()
    channel = WorkerChannel(f"ipc://{tmp_path}/s", lambda *said: heard.put_nowait(said), TOKENS.get)
    made = Node(channel, heard)
    yield made
    for dealer in made.dealers:
        dealer.close()
    channel.close()


@pytest.mark.parametrize("token", ["", "c" * 64, "b" * 64, "ä"])
async def test_a_connection_without_the_token_is_ignored(node: Node, token: str) -> None:
    stranger = node.connected()

    await node.say(stranger, hello(token=token), reported())
    node.channel.send(MINE, SlotGranted())

    assert node.all_heard() == []
    assert stranger.poll(0.05)[0] == []


async def test_a_message_counts_for_its_sender_whatever_worker_it_names(node: Node) -> None:
    dealer = node.connected()
    others = reported(B, 0, 7), reported(A, 1, 8)

    await node.say(dealer, HELLO, reported(), *others)

    mine = [HELLO, reported(), reported(count=7), reported(count=8)]
    assert node.all_heard() == [(MINE, message) for message in mine]


async def test_a_worker_cannot_take_the_orders_of_another(node: Node) -> None:
    mine, others = node.connected(), node.connected()
    await node.say(others, hello(B, token=TOKENS[OTHER]))

    await node.say(mine, hello(token=TOKENS[MINE]), hello(B, token=TOKENS[MINE]))
    node.channel.send(OTHER, SlotGranted())

    assert [TO_WORKER.decode(data) for data in others.poll(LIMIT_S)[0]] == [SlotGranted()]
    assert mine.poll(0.05)[0] == []


async def test_a_worker_of_an_older_library_needs_no_token(node: Node) -> None:
    await node.say(node.connected(), hello(rank=1), reported(rank=1))

    assert [worker for worker, _ in node.all_heard()] == [OLD, OLD]


async def test_messages_of_an_ended_worker_are_ignored(node: Node) -> None:
    dealer = node.connected()
    await node.say(dealer, HELLO)
    node.channel.forget(MINE)

    await node.say(dealer, reported())

    assert node.all_heard() == [(MINE, HELLO)]


async def test_a_reconnected_worker_receives_its_orders(node: Node) -> None:
    first, second = node.connected(), node.connected()
    await node.say(first, HELLO)

    await node.say(second, HELLO)
    await node.say(first, reported())
    node.channel.send(MINE, SlotGranted())

    assert [TO_WORKER.decode(data) for data in second.poll(LIMIT_S)[0]] == [SlotGranted()]
    assert node.all_heard() == [(MINE, HELLO), (MINE, HELLO)]


@pytest.mark.parametrize(
    ("first", "taken"), [(os.getpid(), False), (2**31 - 1, True)], ids=["runs", "has exited"]
)
async def test_a_second_process_with_the_token_is_refused_while_the_first_runs(
    node: Node, first: int, *, taken: bool
) -> None:
    worker, child = replace(HELLO, pid=first), replace(HELLO, pid=1)
    await node.say(node.connected(), worker)

    await node.say(node.connected(), child)

    assert node.all_heard() == [(MINE, worker)] + [(MINE, child)] * taken


async def test_a_worker_in_a_container_connects_by_a_link_also_to_a_socket_bound_again(
    tmp_path: Path,
) -> None:
    link, heard = f"ipc://{tmp_path}/containers/s", asyncio.Queue[tuple[WorkerId, FromWorker]]()
    channel = WorkerChannel(
        f"ipc://{tmp_path}/s", lambda *said: heard.put_nowait(said), TOKENS.get, link=link
    )
    node = Node(channel, heard)

    (tmp_path / "s").unlink()
    channel.listen()
    dealer = node.connected(link)
    await node.say(dealer, HELLO)

    assert node.all_heard() == [(MINE, HELLO)]
    assert [path.name for path in (tmp_path / "containers").iterdir()] == ["s"]
    dealer.close()
    channel.close()


# --- hostile bytes


Heard = list[tuple[WorkerId, FromWorker]]


async def channel_with(meddle: Callable[[str], Awaitable[None]]) -> Heard:
    """What a channel hears of an honest worker, that greeted before and speaks after."""
    with tempfile.TemporaryDirectory(prefix="ones-") as folder:
        heard: Heard = []
        address = f"ipc://{folder}/s"
        channel = WorkerChannel(address, lambda *said: heard.append(said), {MINE: TOKENS[MINE]}.get)
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
        await said(reported(count=7))
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
@example([frames((0, encode(reported(count=9))))])
@example([frames((0, encode(hello())))])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_bytes_neither_stop_nor_impersonate_another_worker(written: list[Written]) -> None:
    async def meddle(path: str) -> None:
        for each in written:
            await write(path, each)

    heard = asyncio.run(channel_with(meddle))

    assert {worker for worker, _ in heard} == {MINE}
    assert {message for _, message in heard} == {HELLO, reported(count=7)}


@given(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=6), max_size=8))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_messages_of_any_frames_count_for_no_worker(messages: list[list[bytes]]) -> None:
    async def meddle(path: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 1000
            dealer.connect(f"ipc://{path}")
            for frames in messages:
                dealer.send_multipart(frames)
            await asyncio.sleep(0)

    heard = asyncio.run(channel_with(meddle))

    assert {worker for worker, _ in heard} == {MINE}


def test_an_oversized_message_ends_its_connection() -> None:
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


async def test_unread_bytes_of_one_connection_are_limited(node: Node) -> None:
    socket = node.channel.socket._socket

    assert MAX_QUEUED_ON_IPC * (MAX_WORKER_MESSAGE_BYTES + ENVELOPE) <= 8 << 20
    assert (socket.rcvhwm, socket.maxmsgsize) == (
        MAX_QUEUED_ON_IPC, MAX_WORKER_MESSAGE_BYTES + ENVELOPE,
    )  # fmt: skip
