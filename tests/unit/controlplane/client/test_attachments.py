"""The client's end of a stream: opened again after losses, given up after silence."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import pytest
from msgspec.structs import replace

from controlplane.client.attachments import (
    AGAIN_S,
    OPEN_S,
    QUIET_S,
    Attachment,
    StreamLostError,
)
from schemas.errors import DeniedError, UnavailableError
from schemas.ids import JobId, WorkerId
from schemas.transport.stream_ends import LOST_S
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.streams import (
    WINDOW,
    OpenStream,
    StreamAlive,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamResized,
)

ID: Final = "c" * 32
ASKED: Final = OpenStream(stream=ID, job=JobId("a-1"))
WORKER: Final = WorkerId("a-1.v1.r0")


class Line:
    """The channel of an attachment: keeps what is sent, or loses it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.works = True
        self.end = Attachment(cast("Any", self), ASKED)
        self.end.ask(asyncio.get_running_loop().time())

    def send(self, _: str, message: Message) -> bool:
        if self.works:
            self.sent.append(message)
        return self.works

    def opened(self, received: int = 0, offset: int = 0) -> None:
        self.end.receive(StreamOpened(stream=ID, received=received, offset=offset, worker=WORKER))

    def taken(self) -> list[Message]:
        found, self.sent = self.sent, []
        return found


def data(offset: int, text: bytes) -> StreamData:
    return StreamData(stream=ID, offset=offset, data=text)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_output_is_read_and_its_credit_granted() -> None:
    line = Line()
    line.opened(offset=100)
    line.end.receive(data(100, bytes(WINDOW // 4)))
    line.taken()

    assert len(await line.end.read()) == WINDOW // 4
    line.end.receive(data(100 + WINDOW // 4, b"more"))
    assert await line.end.read() == b"more"

    assert line.taken() == [StreamAlive(stream=ID, received=100 + WINDOW // 4, sent=0)]
    assert line.end.missed == 0  # output before the first opening


async def test_a_gap_opens_the_stream_again_and_both_ends_repeat() -> None:
    line = Line()
    line.opened()
    await line.end.write(b"abc")
    line.end.receive(data(0, b"one"))
    line.taken()

    line.end.receive(data(5, b"late"))
    line.end.tick(now() + AGAIN_S)
    assert line.taken() == [replace(ASKED, worker=WORKER, received=3, kept_from=0)]
    line.end.receive(data(5, b"late"))  # still from before
    line.opened(received=1, offset=3)

    assert line.taken()[0] == data(1, b"bc")
    line.end.receive(data(3, b"two"))
    assert await line.end.read() == b"onetwo"


async def test_a_message_that_cannot_be_sent_opens_the_stream_again() -> None:
    line = Line()
    line.opened()
    line.works = False
    await line.end.write(b"abc")
    line.works = True
    line.taken()

    line.end.tick(now() + AGAIN_S)
    line.opened()

    assert line.taken()[1] == data(0, b"abc")


async def test_a_silent_node_is_asked_again_and_then_given_up() -> None:
    line = Line()
    line.opened()
    line.taken()

    line.end.tick(now() + QUIET_S + 0.1)
    assert [type(one) for one in line.taken()] == [OpenStream]
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
    line.end.receive(data(0, b"one"))
    line.end.receive(StreamClosed(stream=ID, again=True))

    line.opened(offset=1000)
    line.end.receive(data(1000, b"two"))

    assert (await line.end.read(), line.end.missed) == (b"onetwo", 997)


async def test_a_closed_stream_ends_with_its_reason_and_code() -> None:
    line = Line()
    line.opened()
    line.end.receive(data(0, b"last"))
    line.end.receive(StreamClosed(stream=ID, reason="ended", code=3))

    assert (await line.end.read(), await line.end.read()) == (b"last", b"")
    assert (line.end.reason, line.end.code) == ("ended", 3)


@pytest.mark.parametrize("opened", [True, False])
async def test_a_node_that_is_away_is_a_refusal_only_at_first(*, opened: bool) -> None:
    line = Line()
    if opened:
        line.opened()
    line.end.receive(Failed(code="unavailable", message="node n1 is not connected", hint=""))

    assert line.end.over is not opened
    if not opened:
        with pytest.raises(UnavailableError, match="node n1 is not connected"):
            await line.end.wait_opened()


async def test_a_refusal_ends_an_open_stream() -> None:
    line = Line()
    line.opened()
    line.end.receive(Failed(code="denied", message="no longer", hint=""))

    with pytest.raises(DeniedError, match="no longer"):
        await line.end.read()


async def test_a_new_size_is_sent_and_kept_for_the_next_opening() -> None:
    line = Line()
    line.opened()
    line.taken()

    line.end.resize(50, 120)
    assert line.taken() == [StreamResized(stream=ID, rows=50, cols=120)]
    line.end.receive(StreamClosed(stream=ID, again=True))
    line.end.tick(now() + AGAIN_S)

    (again,) = line.taken()
    assert isinstance(again, OpenStream)
    assert (again.rows, again.cols) == (50, 120)
