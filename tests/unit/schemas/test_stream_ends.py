"""The two ends of a stream: credit, losses, repetition, silence."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import FROM_SHIPPER, READ_LOG, encode
from schemas.errors import MalformedMessageError
from schemas.ids import JobId
from schemas.transport.stream_ends import ALIVE_S, LOST_S, RETRY_S, StreamEnd
from schemas.wire import Message
from schemas.wire.streams import PIECE, WINDOW, OpenStream, StreamClosed, StreamData

ID: Final = "0" * 32


def data(offset: int, text: bytes = b"", **fields: Any) -> StreamData:
    """Data of a peer that has received nothing."""
    given = {"kept_from": 0, "received": 0, "limit": WINDOW, **fields}
    return StreamData(stream=ID, offset=offset, data=text, **given)


class End(StreamEnd):
    """An end that keeps what it sends."""

    def __init__(self, **options: Any) -> None:
        self.wire: list[Message] = []
        super().__init__(ID, self.wire.append, **options)

    def taken(self) -> list[Message]:
        found, self.wire[:] = list(self.wire), []
        return found

    def unread(self) -> bytes:
        return bytes(self._unread)


def test_bytes_are_sent_in_pieces_within_the_window() -> None:
    end = End()

    end.write_now(bytes(PIECE + 1))

    assert end.taken() == [data(0, bytes(PIECE)), data(PIECE, b"\0")]
    assert end.room == WINDOW - PIECE - 1
    end.receive(data(0, received=PIECE, limit=WINDOW + 5))
    assert end.room == WINDOW + 5 - PIECE - 1
    end.receive(data(0, received=PIECE, limit=WINDOW + 5, lost=True))
    assert end.taken() == [data(PIECE, b"\0", kept_from=PIECE)]


def test_what_was_never_sent_cannot_be_received() -> None:
    end = End()
    end.write_now(b"ab")
    end.taken()

    end.receive(data(0, received=3))

    assert end.over
    assert end.taken() == [StreamClosed(stream=ID, reason="byte 3 was never sent")]


async def test_a_reader_learns_of_the_end_after_the_last_byte() -> None:
    end = End()

    end.receive(data(0, b"ab"))
    end.receive(data(2, ended=True))

    assert (await end.read(), await end.read(), end.over) == (b"ab", b"", False)


def test_an_end_is_repeated_with_each_sign_of_life() -> None:
    end = End()
    end.write_eof()
    end.taken()

    end.tick(time.monotonic() + ALIVE_S)

    assert end.taken() == [data(0, ended=True)]


def test_repeated_bytes_are_dropped_and_lost_ones_requested() -> None:
    end = End()

    for offset, text in ((0, b"abc"), (1, b"bcd"), (0, b"ab")):
        end.receive(data(offset, text))
    assert (end.unread(), end.taken()) == (b"abcd", [])
    end.receive(data(6, b"x"))
    end.receive(data(7, b"y"))  # the request is on its way

    assert end.unread() == b"abcd"
    assert end.taken() == [data(0, received=4, lost=True)]


async def test_a_peer_cannot_send_beyond_its_credit() -> None:
    end = End()
    for at in range(0, WINDOW, PIECE):
        end.receive(data(at, bytes(PIECE)))
    await end.read()
    asyncio.get_running_loop().call_soon(end.close)
    await end.read()  # grants credit for what was read before
    assert end.taken() == [data(0, received=WINDOW, limit=2 * WINDOW)]

    other = End()
    for at in range(0, WINDOW, PIECE):
        other.receive(data(at, bytes(PIECE)))
    other.receive(data(WINDOW, b"x"))

    reason = f"bytes beyond the credit of {WINDOW}"
    assert other.taken() == [StreamClosed(stream=ID, reason=reason)]


def test_a_lost_last_message_shows_in_the_next_sign_of_life() -> None:
    sender, receiver = End(), End()
    sender.write_now(b"lost")
    sender.taken()

    sender.tick(time.monotonic())
    (sign,) = sender.taken()
    assert isinstance(sign, StreamData)
    receiver.receive(sign)

    assert receiver.taken() == [data(0, lost=True)]


def test_news_are_told_at_the_next_tick_or_in_reply_to_a_sign_of_life() -> None:
    end = End()
    now = time.monotonic()
    end.tick(now + ALIVE_S - 1.0)
    assert end.taken() == []

    end.receive(data(0, b"a"))
    end.receive(data(1))
    assert end.taken() == [data(0, received=1)]
    end.receive(data(1, b"b"))
    assert end.taken() == []
    end.tick(now)
    assert end.taken() == [data(0, received=2)]
    end.tick(now)
    assert end.taken() == []


def test_bytes_that_the_peer_has_no_more_are_missed() -> None:
    end = End()
    end.receive(data(100, b"a", kept_from=100))  # the past of a terminal
    assert (end.unread(), end.missed) == (b"a", 0)

    end.receive(data(150, b"b", kept_from=150))

    assert (end.unread(), end.missed) == (b"ab", 49)


async def test_two_ends_join_two_connections_to_the_end_of_both_directions() -> None:
    loop = asyncio.get_running_loop()
    ends: list[StreamEnd] = []
    for other in (1, 0):
        ends.append(StreamEnd(ID, lambda one, to=other: loop.call_soon(ends[to].receive, one)))
    pairs = [socket.socketpair() for _ in ends]
    joined = [
        asyncio.create_task(end.join(*await asyncio.open_connection(sock=mine)))
        for end, (mine, _) in zip(ends, pairs, strict=True)
    ]
    near, far = [await asyncio.open_connection(sock=theirs) for _, theirs in pairs]
    asked = bytes(3 * WINDOW) + b"asked"

    near[1].write(asked)
    near[1].write_eof()
    assert await far[0].read() == asked
    far[1].write(asked[::-1])
    far[1].write_eof()
    assert await near[0].read() == asked[::-1]

    await asyncio.gather(*joined)
    for _, writer in (near, far):
        writer.close()


def test_a_silent_peer_ends_the_stream() -> None:
    end = End()
    now = time.monotonic()

    end.tick(now + LOST_S - 1.0)
    assert not end.over
    end.tick(now + LOST_S + 1.0)

    assert end.over
    end.tick(now + LOST_S + 2.0)
    assert all(isinstance(one, StreamData) for one in end.taken())


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=3 * PIECE),  # written by the sender
            st.sampled_from(["lose", "lose reply", "read", "tick"]),
        ),
        max_size=40,
    )
)
def test_every_byte_arrives_once_and_in_order_whatever_is_lost(
    steps: list[bytes | str],
) -> None:
    async def run() -> None:
        sender, receiver = End(), End()
        written, read = bytearray(), bytearray()

        def deliver(wire: list[Message], to: Callable[[StreamData], None]) -> None:
            for message in list(wire):
                assert isinstance(message, StreamData)
                to(message)
            wire.clear()

        async def exchange() -> None:
            receiver._lost_at -= RETRY_S
            deliver(sender.taken(), receiver.receive)
            if receiver.unread():
                read.extend(await receiver.read())
                receiver._reading = 0
            deliver(receiver.taken(), sender.receive)

        for step in steps:
            if isinstance(step, bytes):
                fits = step[: sender.room]
                written.extend(fits)
                sender.write_now(fits)
            elif step == "lose":
                del sender.wire[:1]
            elif step == "lose reply":
                del receiver.wire[:1]
            elif step == "read":
                await exchange()
            else:
                sender.tick(time.monotonic())
                receiver.tick(time.monotonic())
        for _ in range(3):
            sender.tick(time.monotonic())
            await exchange()
        assert read == written
        assert not sender.over
        assert not receiver.over

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [
        OpenStream(stream=ID, job=JobId("a-1"), rows=0),
        OpenStream(stream=ID, job=JobId("a-1"), cols=10_001),
        data(-1),
        data(2**53 + 1),
        data(0, limit=-1),
        data(0, bytes(PIECE + 1)),
        StreamClosed(stream="../../etc/passwd"),
        OpenStream(stream=ID, job=JobId("a-1"), port=65_536),
        OpenStream(stream=ID, job=JobId("a-1"), term="x" * 201),
    ],
)
def test_values_out_of_bounds_are_no_messages(wrong: Message) -> None:
    with pytest.raises(MalformedMessageError):
        READ_LOG.decode(encode(wrong))


def test_an_agent_cannot_open_a_stream() -> None:
    with pytest.raises(MalformedMessageError):
        FROM_SHIPPER.decode(encode(OpenStream(stream=ID, job=JobId("a-1"))))
