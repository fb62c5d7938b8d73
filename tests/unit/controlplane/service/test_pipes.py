"""Messages between two processes: at once, whole, and until one of them ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from controlplane.service.pipes import MessagePipe


class Text(msgspec.Struct):
    """A message."""

    text: str


@dataclass
class Ends:
    """Two ends of a pair of pipes, and what arrived at each."""

    one: MessagePipe[Text]
    other: MessagePipe[Text]
    at_one: list[str]
    at_other: list[str]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    at_one, at_other = list[str](), list[str]()
    (source, far_sink), (far_source, sink) = os.pipe(), os.pipe()
    decoder = msgspec.msgpack.Decoder(Text)
    one = MessagePipe(source, sink, decoder, lambda message: at_one.append(message.text))
    other = MessagePipe(far_source, far_sink, decoder, lambda told: at_other.append(told.text))
    yield Ends(one, other, at_one, at_other)
    for end in (one, other):
        end.close()


async def test_a_message_can_be_read_as_soon_as_it_is_sent(ends: Ends) -> None:
    ends.one.send(Text("a"))
    ends.one.send(Text("b"))

    ends.other.read()

    assert ends.at_other == ["a", "b"]


async def test_messages_larger_than_the_pipe_arrive_whole_and_in_order(ends: Ends) -> None:
    texts = [letter * 1_000_000 for letter in "abc"]

    for text in texts:
        ends.one.send(Text(text))
    ends.other.send(Text("meanwhile"))
    assert ends.one.unsent_bytes > 0
    while len(ends.at_other) < len(texts):
        await asyncio.sleep(0)

    assert (ends.at_other, ends.at_one) == (texts, ["meanwhile"])
    assert ends.one.unsent_bytes == 0


async def test_the_end_of_the_other_process_is_noticed(ends: Ends) -> None:
    ends.other.send(Text("last"))
    os.close(ends.other._sink)
    ends.other._sink = os.open(os.devnull, os.O_WRONLY)

    await ends.one.ended

    assert ends.at_one == ["last"]
    ends.one.send(Text("too late"))
    assert ends.one.unsent_bytes == 0


async def test_a_reader_that_is_gone_ends_the_pipe(ends: Ends) -> None:
    os.close(ends.other._source)
    ends.other._loop.remove_reader(ends.other._source)
    ends.other._source = os.open(os.devnull, os.O_RDONLY)

    ends.one.send(Text("nobody reads this"))

    assert ends.one.ended.done()


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x01\xc1", b"\xff" * 8])
async def test_bytes_that_are_no_message_end_the_pipe(ends: Ends, data: bytes) -> None:
    os.write(ends.other._sink, data)

    with pytest.raises(ValueError, match=r"MessagePack|exceeds"):
        ends.one.read()

    assert ends.one.ended.done()
