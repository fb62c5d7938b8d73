"""Whose words the agent takes for a worker's: only those of who shows that worker's token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent.connections import WorkerChannel
from schemas.codec import TO_WORKER, encode
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.transport.sockets import ThreadDealer
from schemas.wire import Message
from schemas.wire.worker import FromWorker, Reported, SlotGranted, WorkerHello
from tests.support.builders import A, B

LIMIT_S = 60.0
MINE, OTHER = WorkerId(f"{A}.v1.r0"), WorkerId(f"{B}.v1.r0")
OLD = WorkerId(f"{A}.v1.r1")
TOKENS = {MINE: "a" * 64, OTHER: "b" * 64, OLD: ""}


def hello(job: JobId = A, rank: int = 0, token: str = "") -> WorkerHello:
    return WorkerHello(job=job, version=Version(1), rank=Rank(rank), pid=1, token=token)


def reported(job: JobId = A, rank: int = 0, count: int = 1) -> Reported:
    return Reported(job=job, version=Version(1), rank=Rank(rank), count=count)


@dataclass
class Node:
    """A channel, and what came over it."""

    channel: WorkerChannel
    heard: asyncio.Queue[tuple[WorkerId, FromWorker]]
    dealers: list[ThreadDealer] = field(default_factory=list)

    def connected(self) -> ThreadDealer:
        dealer = ThreadDealer(self.channel._address)
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


async def test_who_shows_a_workers_token_is_that_worker(node: Node) -> None:
    mine = hello(token=TOKENS[MINE])

    await node.say(node.connected(), mine, reported())

    assert node.all_heard() == [(MINE, mine), (MINE, reported())]


@pytest.mark.parametrize("token", ["", "c" * 64, "b" * 64, "ä"])
async def test_who_does_not_show_it_is_heard_by_nobody_and_told_nothing(
    node: Node, token: str
) -> None:
    stranger = node.connected()

    await node.say(stranger, hello(token=token), reported())
    node.channel.send(MINE, SlotGranted())

    assert node.all_heard() == []
    assert stranger.poll(0.05)[0] == []


async def test_a_worker_that_names_another_one_speaks_of_itself(node: Node) -> None:
    dealer = node.connected()

    await node.say(dealer, hello(token=TOKENS[MINE]), reported(B, 0, 7), reported(A, 1, 8))

    assert node.all_heard()[1:] == [(MINE, reported(count=7)), (MINE, reported(count=8))]


async def test_a_worker_cannot_take_the_orders_of_another_one(node: Node) -> None:
    mine, others = node.connected(), node.connected()
    await node.say(others, hello(B, token=TOKENS[OTHER]))

    await node.say(mine, hello(token=TOKENS[MINE]), hello(B, token=TOKENS[MINE]))
    node.channel.send(OTHER, SlotGranted())

    assert [TO_WORKER.decode(data) for data in others.poll(LIMIT_S)[0]] == [SlotGranted()]
    assert mine.poll(0.05)[0] == []


async def test_a_worker_of_an_older_library_goes_on_without_a_token(node: Node) -> None:
    await node.say(node.connected(), hello(rank=1), reported(rank=1))

    assert [worker for worker, _ in node.all_heard()] == [OLD, OLD]


async def test_a_worker_that_ended_says_nothing_more(node: Node) -> None:
    dealer = node.connected()
    mine = hello(token=TOKENS[MINE])
    await node.say(dealer, mine)
    node.channel.forget(MINE)

    await node.say(dealer, reported())

    assert node.all_heard() == [(MINE, mine)]


async def test_a_worker_that_connects_again_is_told_what_comes_there(node: Node) -> None:
    first, second = node.connected(), node.connected()
    mine = hello(token=TOKENS[MINE])
    await node.say(first, mine)

    await node.say(second, replace(mine, pid=2))
    await node.say(first, reported())
    node.channel.send(MINE, SlotGranted())

    assert [TO_WORKER.decode(data) for data in second.poll(LIMIT_S)[0]] == [SlotGranted()]
    assert node.all_heard() == [(MINE, mine), (MINE, replace(mine, pid=2))]
