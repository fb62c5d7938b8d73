"""Streams at the relay: who may send what, where it goes, and how a stream ends."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, cast

import pytest
from msgspec.structs import replace

from controlplane.service.relay.stream_relay import MAX_OF_USER, MAX_STREAMS, StreamRelay
from schemas.codec import TO_STREAM_CLIENT, encode
from schemas.errors import DeniedError, UnavailableError
from schemas.ids import NodeId, WorkerId
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.transport.stream_ends import LOST_S
from schemas.wire import Message
from schemas.wire.client import Failed
from schemas.wire.streams import (
    PIECE,
    WINDOW,
    OpenStream,
    StreamClosed,
    StreamData,
    StreamOpened,
    StreamSignal,
)
from tests.support import builders
from tests.support.builders import N1, N2, S0, A
from tests.support.controller import Controller, cluster_of

ID: Final = "a" * 32
ANN, BOB = Identity("user", "ann"), Identity("user", "bob")
OPEN: Final = OpenStream(stream=ID, job=A)


def running_job() -> Controller:
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a")
    controller.place({A: {S0: 32}})
    controller.tell(N1, builders.started(A))
    return controller


class Port:
    """A socket that keeps what is sent, as long as it has room."""

    def __init__(self) -> None:
        self.sent: deque[tuple[bytes, ...]] = deque()
        self.room = 10_000

    def send(self, *frames: bytes) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent.append(frames)
        return True


class Audit:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, str]]] = []

    def done(self, what: str, by: str, **detail: str) -> None:
        self.lines.append((what, {"by": by, **detail}))


class Desk:
    """A relay with a client and a node on either side."""

    def __init__(self) -> None:
        self.controller, self.now = running_job(), 0.0
        self.clients, self.nodes, self.audit = Port(), Port(), Audit()
        self.asked: list[tuple[NodeId, OpenStream]] = []
        self.relay = StreamRelay(
            shippers=cast("Any", self.nodes), followers=cast("Any", self.clients),
            job=self.controller.job, ask=self._ask, audit=cast("Any", self.audit),
            clock=lambda: self.now,
        )  # fmt: skip

    def _ask(self, node: NodeId, asked: OpenStream) -> None:
        self.asked.append((node, asked))

    def client(self, message: Any, who: Identity = ANN, route: bytes = b"client") -> None:
        incoming = Incoming((route, ID.encode(), encode(message)), who)
        self.relay.from_client(incoming, who, message)

    def node(self, message: Any, node: NodeId = N1) -> None:
        incoming = Incoming((b"agent", encode(message)), Identity("node", node))
        self.relay.from_node(incoming, message)

    def opened(self) -> Desk:
        self.client(OPEN)
        self.node(data(0, b""))
        assert self.told() == [StreamOpened(stream=ID, worker=self.worker), data(0, b"")]
        return self

    @property
    def worker(self) -> Any:
        return next(iter(self.controller.job(A).workers))

    def told(self) -> list[Message]:
        """What the client was told."""
        found = [TO_STREAM_CLIENT.decode(frames[-1]) for frames in self.clients.sent]
        self.clients.sent.clear()
        return cast("list[Message]", found)


def data(offset: int, text: bytes = b"x", **fields: Any) -> StreamData:
    """Data of an end that has received nothing."""
    given = {"kept_from": 0, "received": 0, "limit": WINDOW, **fields}
    return StreamData(stream=ID, offset=offset, data=text, **given)


def test_the_node_learns_worker_user_and_journal_from_the_controller() -> None:
    desk = Desk()

    desk.client(replace(OPEN, user="root", journal="another"))

    journal = desk.controller.job(A).journal
    told = replace(OPEN, worker=desk.worker, user=str(ANN), journal=journal)
    assert desk.asked == [(N1, told)]


def test_messages_go_to_the_other_end_of_their_stream() -> None:
    desk = Desk().opened()

    desk.client(data(0, b"ls\r"))
    desk.client(StreamSignal(stream=ID, name="INT"))
    desk.node(data(0, b"a b\r\n"))

    signal = StreamSignal(stream=ID, name="INT")
    expected = [(b"agent", encode(data(0, b"ls\r"))), (b"agent", encode(signal))]
    assert [*desk.nodes.sent] == expected
    assert [*desk.clients.sent] == [(b"client", ID.encode(), encode(data(0, b"a b\r\n")))]


def test_a_stream_belongs_to_the_user_who_opened_it() -> None:
    desk = Desk().opened()

    for message in (OPEN, data(0), StreamClosed(stream=ID)):
        with pytest.raises(DeniedError, match="belongs to another user"):
            desk.client(message, BOB)

    assert not desk.nodes.sent


def test_another_node_cannot_send_into_a_stream() -> None:
    desk = Desk().opened()

    with pytest.raises(DeniedError, match="not one of node n2"):
        desk.node(data(0), N2)

    assert desk.told() == []


def test_a_client_that_sends_beyond_its_credit_loses_the_stream() -> None:
    desk = Desk().opened()
    for at in range(0, WINDOW, PIECE):
        desk.client(data(at, bytes(PIECE)))

    with pytest.raises(DeniedError, match="beyond the credit"):
        desk.client(data(WINDOW))

    assert desk.told() == [StreamClosed(stream=ID, reason="its client sent beyond its credit")]
    desk.nodes.sent.clear()
    desk.client(data(0))
    assert not desk.nodes.sent


def test_a_node_that_sends_beyond_the_credit_loses_the_stream() -> None:
    desk = Desk().opened()
    for at in range(0, WINDOW, PIECE):
        desk.node(data(at, bytes(PIECE)))
    desk.client(data(0, b"", received=PIECE, limit=WINDOW + PIECE))
    desk.node(data(WINDOW, bytes(PIECE)))

    with pytest.raises(DeniedError, match="beyond the credit"):
        desk.node(data(WINDOW + PIECE))

    assert desk.told()[-1] == StreamClosed(stream=ID, reason="its node sent beyond its credit")


async def test_output_waits_for_a_client_that_does_not_read_and_so_does_its_end() -> None:
    desk = Desk().opened()
    desk.clients.room = 1

    for at in range(3):
        desk.node(data(at))
    desk.node(StreamClosed(stream=ID, reason="ended", code=3))
    assert desk.told() == [data(0)]
    desk.clients.room = 10
    desk.relay._retry()

    assert desk.told() == [data(1), data(2), StreamClosed(stream=ID, reason="ended", code=3)]
    assert desk.audit.lines[-1][0] == "stream closed"


def test_a_client_opens_its_stream_again_from_another_connection() -> None:
    desk = Desk().opened()

    desk.client(replace(OPEN, again=True, worker=desk.worker), route=b"new")
    desk.node(data(0))

    assert [frames[0] for frames in desk.clients.sent] == [b"new", b"new"]
    assert len(desk.asked) == 2


def test_messages_of_an_unknown_stream_are_dropped() -> None:
    desk = Desk()

    desk.client(data(7))
    desk.node(data(7))

    assert desk.told() == []
    assert not desk.nodes.sent


async def test_what_waits_for_a_client_is_dropped_when_it_is_sent_again() -> None:
    desk = Desk().opened()
    desk.clients.room = 0
    desk.node(data(0))
    desk.node(data(1))

    desk.client(data(0, b"", lost=True))
    desk.clients.room = 10
    desk.node(data(0, b"xx"))

    assert desk.told() == [data(0, b"xx")]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (replace(OPEN, rank=3), "no process of rank 3 of a-1 runs"),
        (replace(OPEN, worker="b-2.v1.r0", rank=3), "no process of rank 3 of a-1 runs"),
    ],
)
def test_a_worker_that_does_not_run_is_refused(asked: OpenStream, message: str) -> None:
    desk = Desk()

    with pytest.raises(UnavailableError, match=message):
        desk.client(asked)

    assert not desk.relay._streams


AWAY: Final = Failed(
    code="unavailable", message="node n1 is not connected", hint="try again later", field=""
)


def test_a_stream_to_a_node_that_is_away_is_refused() -> None:
    desk = Desk()
    desk.client(OPEN)

    for asked in (desk.asked[0][1], replace(OPEN, stream="b" * 32)):
        desk.relay.node_away(asked)

    assert desk.told() == [StreamOpened(stream=ID, worker=desk.worker), AWAY]
    assert not desk.relay._streams


def test_an_open_stream_stays_while_its_node_is_away() -> None:
    desk = Desk().opened()
    desk.client(OPEN)

    desk.relay.node_away(replace(OPEN, worker=WorkerId("a-1.v0.r0")))  # before it moved
    desk.relay.node_away(desk.asked[0][1])
    desk.node(data(0, b"back"))

    assert desk.told()[1:] == [AWAY, data(0, b"back")]


def test_streams_are_limited_for_one_user_and_for_all() -> None:
    desk = Desk()

    def opened(number: int, who: Identity) -> None:
        desk.client(replace(OPEN, stream=f"{number:032x}"), who)

    for number in range(MAX_OF_USER):
        opened(number, ANN)
    with pytest.raises(UnavailableError, match="32 of your streams are open, the limit"):
        opened(MAX_OF_USER, ANN)
    for number in range(MAX_OF_USER, MAX_STREAMS):
        opened(number, Identity("user", f"u{number // MAX_OF_USER}"))
    with pytest.raises(UnavailableError, match="too many, the limit"):
        opened(MAX_STREAMS, BOB)

    desk.now = LOST_S + 0.1
    desk.relay.end_silent()
    opened(0, BOB)
    assert len(desk.relay._streams) == 1


def test_a_revoked_key_loses_its_streams_at_both_ends() -> None:
    desk = Desk()
    known = {b"key": ANN}
    incoming = Incoming((b"client", ID.encode(), encode(OPEN)), ANN, b"key", known)
    desk.relay.from_client(incoming, ANN, OPEN)
    desk.node(data(0, b""))
    desk.relay.end_revoked()
    assert ID in desk.relay._streams

    known.clear()
    desk.relay.end_revoked()

    closed = StreamClosed(stream=ID, reason="this key is no longer authorised")
    assert desk.told()[-1] == closed
    assert desk.nodes.sent[-1] == (b"agent", encode(closed))
    assert not desk.relay._streams


def test_opening_and_closing_are_audited_with_the_number_of_bytes() -> None:
    desk = Desk()
    asked = replace(OPEN, what="port", port=6006)
    desk.client(asked)
    desk.node(data(0, b""))
    desk.client(data(0, b"ask"))
    desk.node(data(0, b"answer"))
    desk.client(StreamClosed(stream=ID))

    detail = {"by": "user:ann", "job": A, "worker": desk.worker, "kind": "port 6006", "stream": ID}
    sizes = {"why": "its client closed it", "sent": "3", "received": "6"}
    assert desk.audit.lines == [("stream opened", detail), ("stream closed", detail | sizes)]
    assert desk.told()[-1] == StreamClosed(stream=ID, reason="closed")
