"""The extremes of every field of every message, sent to a live controller and to the core's files.

A value is refused by its type, or handled. Nothing is logged as an unexpected error, and the
controller serves others afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from structlog.testing import capture_logs

from schemas.codec import (
    ASSIGNMENT,
    EXIT_STATUS,
    FROM_AGENT,
    FROM_SHIPPER,
    FROM_STATES,
    FROM_WORKER,
    FROM_ZYGOTE,
    PROCESS_MARK,
    PUBLISHED,
    READ_LOG,
    REPORT,
    REQUEST,
    TO_STATES,
    Codec,
)
from schemas.errors import OnesError
from schemas.wire.client import Cluster, GetCluster
from tests.support import builders
from tests.support.builders import N1, A
from tests.support.schemas_examples import EXAMPLES
from tests.support.schemas_links import HeldLink, connected
from tests.support.service import House, Person, served

EXTREMES: Final = (
    0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"), float("inf"), -1e308,
    "", "\0", "\x1b[2J", "\u202e", "x" * 70_000, b"", None, True, [], {}, [None], {"": None},
)  # fmt: skip
UNEXPECTED: Final = {"message dropped", "request failed"}


def hostile(codec: Codec[Any]) -> Iterator[bytes]:
    """Each message of a conversation with one field replaced, in itself and in its parts."""
    for kind in codec.kinds:
        for example in (one for one in EXAMPLES.values() if type(one) is kind):
            whole = known(msgspec.msgpack.decode(msgspec.msgpack.encode(example)))
            for changed in replaced(whole):
                yield msgspec.msgpack.encode(changed)


def known(value: Any) -> Any:
    """Name the node and the job of the test, so that a message gets as far as it can."""
    if isinstance(value, dict):
        names = {"node": N1, "job": A, "journal": ""}
        return {k: names[k] if k in names else known(one) for k, one in value.items()}
    return [known(one) for one in value] if isinstance(value, list) else value


def replaced(value: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            if name != "type":
                yield from ({**value, name: one} for one in EXTREMES)
            yield from ({**value, name: one} for one in replaced(inner, depth - 1))
    elif isinstance(value, list) and depth and value:
        yield from ([one, *value[1:]] for one in replaced(value[0], depth - 1))


@pytest.mark.parametrize(
    "codec",
    [
        FROM_WORKER,
        REPORT,
        ASSIGNMENT,
        EXIT_STATUS,
        PROCESS_MARK,
        FROM_ZYGOTE,
        TO_STATES,
        FROM_STATES,
    ],
    ids=lambda codec: codec.conversation,
)
def test_a_message_on_a_node_is_decoded_or_refused(codec: Codec[Any]) -> None:
    count = 0
    for data in hostile(codec):
        count += 1
        try:
            codec.decode(data)
        except OnesError:
            continue

    assert count >= len(EXTREMES)


PORTS: Final = {
    "agents": (FROM_AGENT, "n1", "DEALER"),
    "events": (PUBLISHED, "n1", "PUB"),
    "shippers": (FROM_SHIPPER, "n1", "DEALER"),
    "clients": (REQUEST, "root", "DEALER"),
    "followers": (READ_LOG, "bob", "DEALER"),
}


async def send_all(house: House, port: str) -> int:
    """Send all messages to a port, and read the answers."""
    codec, name, kind = PORTS[port]
    link, sent = HeldLink(house.keys[name]), 0
    address = f"tcp://127.0.0.1:{house.ports[port]}"
    socket = link.connect(kind, address, house.keys["server"].public)
    if kind == "DEALER":
        await connected(socket)
    for data in dict.fromkeys(hostile(codec)):
        if b"revoke" in data[:40] or b"wait" in data[:40]:  # would end this connection, or wait
            continue
        frames = (b"1", data) if port in {"clients", "followers"} else (data,)
        socket.send(*frames)
        sent += 1
        if sent % 20 == 0:
            await asyncio.sleep(0.01)
            while kind == "DEALER" and await socket._socket.poll(0):
                await socket.receive()
    link.close()
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("port", PORTS)
async def test_a_live_controller_serves_others_after_all_extremes(
    tmp_path: Path, port: str
) -> None:
    async with served(tmp_path) as house:
        house.controller._commit_loop.handle(builders.submission("a", project="shared"))
        with capture_logs() as logs:
            sent = await send_all(house, port)
            person = Person(house, house.keys["ann"])
            try:
                await connected(person.requests)
                answer = await person.ask(GetCluster())
            finally:
                person.close()
        found = [line for line in logs if line["event"] in UNEXPECTED]

        assert isinstance(answer, Cluster)
        assert (sent > len(EXTREMES), found) == (True, [])
