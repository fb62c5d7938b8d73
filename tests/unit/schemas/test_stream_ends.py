"""The two ends of a stream: credit, losses, repetition, silence."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import FROM_SHIPPER, READ_LOG, encode
from schemas.errors import MalformedMessageError
from schemas.ids import JobId
from schemas.transport.stream_ends import (
    ALIVE_S,
    Incoming,
    Outgoing,
    StreamEnd,
    StreamError,
    StreamGapError,
)
from schemas.wire.streams import (
    PIECE,
    WINDOW,
    OpenStream,
    StreamAlive,
    StreamData,
    StreamResized,
)

ID: Final = "0" * 32


def data(offset: int, text: bytes) -> StreamData:
    return StreamData(stream=ID, offset=offset, data=text)


def test_bytes_are_sent_in_pieces_within_the_window() -> None:
    outgoing = Outgoing()

    sent = outgoing.send(ID, bytes(PIECE + 1))

    assert [(one.offset, len(one.data)) for one in sent] == [(0, PIECE), (PIECE, 1)]
    assert outgoing.room == WINDOW - PIECE - 1
    outgoing.mark_received(PIECE)
    assert (outgoing.room, outgoing.again(ID)) == (WINDOW - 1, [data(PIECE, b"\0")])


def test_what_was_never_sent_cannot_be_received() -> None:
    outgoing = Outgoing()
    outgoing.send(ID, b"ab")

    with pytest.raises(StreamError, match="byte 3 was never sent"):
        outgoing.mark_received(3)


def test_an_ended_direction_has_no_room_and_repeats_its_end() -> None:
    outgoing = Outgoing()
    outgoing.send(ID, b"ab")

    assert outgoing.end(ID) == [data(2, b"")]
    assert outgoing.room == 0
    assert outgoing.again(ID) == [data(0, b"ab"), data(2, b"")]


def test_repeated_bytes_are_dropped_and_gaps_refused() -> None:
    incoming = Incoming()

    assert incoming.take(data(0, b"abc")) == b"abc"
    assert incoming.take(data(1, b"bcd")) == b"d"
    assert incoming.take(data(0, b"ab")) == b""
    with pytest.raises(StreamGapError, match="bytes 4 to 6 were lost"):
        incoming.take(data(6, b"x"))
    assert not incoming.ended
    assert incoming.take(data(4, b"")) == b""
    assert incoming.ended


def test_a_peer_cannot_send_beyond_its_credit() -> None:
    incoming = Incoming()
    for at in range(0, WINDOW, PIECE):
        incoming.take(data(at, bytes(PIECE)))

    with pytest.raises(StreamError, match="beyond the credit"):
        incoming.take(data(WINDOW, b"x"))

    assert incoming.consume(WINDOW // 4)  # the peer is told of so much at once
    assert incoming.take(data(WINDOW, b"x")) == b"x"


def test_a_lost_last_message_shows_in_the_next_sign_of_life() -> None:
    sender, receiver = StreamEnd(ID, 0.0), StreamEnd(ID, 0.0)
    sender.outgoing.send(ID, b"lost")

    (sign,) = sender.due(ALIVE_S)

    assert sign == StreamAlive(stream=ID, received=0, sent=4)
    assert sender.due(ALIVE_S + 1.0) == []
    with pytest.raises(StreamGapError, match="up to 4 were lost"):
        receiver.take(sign, ALIVE_S)
    assert receiver.silent_s(ALIVE_S + 2.0) == 2.0


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=3 * PIECE),  # written by the sender
            st.sampled_from(["lose", "read", "again", "alive"]),
        ),
        max_size=40,
    )
)
def test_every_byte_arrives_once_and_in_order_whatever_is_lost(
    steps: list[bytes | str],
) -> None:
    sender, receiver = StreamEnd(ID, 0.0), StreamEnd(ID, 0.0)
    wire: list[StreamData] = []
    written, read = bytearray(), bytearray()

    def deliver() -> None:
        while wire:
            try:
                read.extend(receiver.take(wire.pop(0), 0.0))
            except StreamGapError:
                wire[:] = reopened()

    def reopened() -> list[StreamData]:
        sender.outgoing.mark_received(receiver.incoming.arrived)
        return sender.outgoing.again(ID)

    for step in steps:
        if isinstance(step, bytes):
            fits = step[: sender.outgoing.room]
            written.extend(fits)
            wire += sender.outgoing.send(ID, fits)
        elif step == "lose":
            del wire[:1]
        elif step == "read":
            deliver()
            receiver.consume(receiver.incoming.arrived - receiver.incoming.consumed, 0.0)
        elif step == "again":
            wire += reopened()
        else:
            sender.take(receiver.alive(0.0), 0.0)
    wire += reopened()
    deliver()

    assert read == written


@pytest.mark.parametrize(
    "wrong",
    [
        StreamResized(stream=ID, rows=0, cols=80),
        StreamResized(stream=ID, rows=24, cols=10_001),
        StreamResized(stream="../../etc/passwd", rows=24, cols=80),
        StreamData(stream=ID, offset=-1, data=b""),
        StreamData(stream=ID, offset=2**53 + 1, data=b""),
        StreamData(stream=ID, offset=0, data=bytes(PIECE + 1)),
        OpenStream(stream=ID, job=JobId("a-1"), port=65_536),
        OpenStream(stream=ID, job=JobId("a-1"), term="x" * 201),
    ],
)
def test_values_out_of_bounds_are_no_messages(wrong: StreamData) -> None:
    with pytest.raises(MalformedMessageError):
        READ_LOG.decode(encode(wrong))


def test_an_agent_cannot_open_a_stream() -> None:
    with pytest.raises(MalformedMessageError):
        FROM_SHIPPER.decode(encode(OpenStream(stream=ID, job=JobId("a-1"))))
