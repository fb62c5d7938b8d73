"""The client's end of a stream: opened again after losses, given up after silence."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest
from msgspec.structs import replace

from controlplane.client.attachments import OPEN_S, Attachment, StreamLostError
from schemas.errors import DeniedError, UnavailableError
from schemas.ids import JobId, WorkerId
from schemas.transport.stream_ends import ALIVE_S, LOST_S, RETRY_S
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.streams import (
    WINDOW,
    OpenStream,
    StreamClosed,
    StreamData,
    StreamOpened,
)

ID: Final = "c" * 32
ASKED: Final = OpenStream(stream=ID, job=JobId("a-1"))
WORKER: Final = WorkerId("a-1.v1.r0")


class Line:
    """The connection of an attachment: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.end = Attachment(ASKED, self.sent_by)

    def sent_by(self, message: Message) -> None:
        self.sent.append(message)

    def opened(self, **fields: Any) -> None:
        self.end.take(StreamOpened(stream=ID, worker=WORKER))
        self.end.take(data(**fields))

    def taken(self) -> list[Message]:
        found, self.sent = self.sent, []
        return found


def data(offset: int = 0, text: bytes = b"", **fields: Any) -> StreamData:
    """Data of an end that has received nothing."""
    given = {"kept_from": 0, "received": 0, "limit": WINDOW, **fields}
    return StreamData(stream=ID, offset=offset, data=text, **given)


now = time.monotonic


async def test_output_is_read_and_its_credit_granted() -> None:
    line = Line()
    line.opened(offset=100, kept_from=100)
    got = 100
    for _ in range(2):
        line.end.take(data(got, bytes(WINDOW // 8)))
        got += WINDOW // 8
    line.taken()

    assert len(await line.end.read()) == WINDOW // 4
    line.end.take(data(got, b"more"))
    assert await line.end.read() == b"more"

    assert line.taken() == [data(received=got + 4, limit=got + WINDOW)]
    assert line.end.missed == 0  # output before the first opening


async def test_what_an_end_lacks_is_sent_again() -> None:
    line = Line()
    line.opened()
    await line.end.write(b"abc")
    line.end.take(data(0, b"one"))
    line.taken()

    line.end.take(data(5, b"late"))
    assert line.taken() == [data(3, received=3, limit=WINDOW, lost=True)]
    line.end.take(data(3, b"two", received=1, lost=True))

    assert line.taken() == [data(1, b"bc", kept_from=1, received=3)]
    assert await line.end.read() == b"onetwo"


async def test_bytes_that_do_not_arrive_open_the_stream_again() -> None:
    line = Line()
    line.opened()
    await line.end.write(b"abc")
    line.taken()

    line.end.tick(now() + RETRY_S)

    assert line.taken() == [replace(ASKED, worker=WORKER, again=True), data(3)]


async def test_a_silent_node_is_asked_again_and_then_given_up() -> None:
    line = Line()
    line.opened()
    line.taken()

    line.end.tick(now() + ALIVE_S + 0.1)
    assert [type(one) for one in line.taken()] == [OpenStream, StreamData]
    line.end.tick(now() + LOST_S + 0.1)

    with pytest.raises(StreamLostError, match="the node did not reply for 20 s"):
        await line.end.read()


async def test_a_node_that_never_replies_is_given_up() -> None:
    line = Line()

    line.end.tick(now() + OPEN_S + 0.1)

    with pytest.raises(StreamLostError):
        await line.end.wait_opened()


async def test_output_that_the_terminal_has_not_kept_is_counted() -> None:
    line = Line()
    line.opened()
    line.end.take(data(0, b"one"))

    line.opened(offset=1000, kept_from=1000)
    line.end.take(data(1000, b"two", kept_from=1000))

    assert (await line.end.read(), line.end.missed) == (b"onetwo", 997)


async def test_a_closed_stream_ends_with_its_reason_and_code() -> None:
    line = Line()
    line.opened()
    line.end.take(data(0, b"last"))
    line.end.take(StreamClosed(stream=ID, reason="ended", code=3))

    assert (await line.end.read(), await line.end.read()) == (b"last", b"")
    assert (line.end.reason, line.end.code) == ("ended", 3)


@pytest.mark.parametrize("opened", [True, False])
async def test_a_node_that_is_away_is_a_refusal_only_at_first(*, opened: bool) -> None:
    line = Line()
    if opened:
        line.opened()
    line.end.take(Failed(code="unavailable", message="node n1 is not connected", hint=""))

    assert line.end.over is not opened
    if not opened:
        with pytest.raises(UnavailableError, match="node n1 is not connected"):
            await line.end.wait_opened()


async def test_a_refusal_ends_an_open_stream() -> None:
    line = Line()
    line.opened()
    line.end.take(Failed(code="denied", message="no longer", hint=""))

    with pytest.raises(DeniedError, match="no longer"):
        await line.end.read()


async def test_a_new_size_is_sent_and_kept_for_the_next_opening() -> None:
    line = Line()
    line.opened()
    line.taken()

    line.end.resize(50, 120)
    line.end.tick(now() + ALIVE_S)

    asked = replace(ASKED, worker=WORKER, again=True, rows=50, cols=120)
    assert line.taken() == [asked, asked, data()]
