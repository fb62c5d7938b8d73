"""Who is slow or idle on the port for Prometheus keeps nobody else from its numbers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from itertools import count

import pytest

from controlplane.service.metrics import Metrics
from schemas.errors import SettingsError
from schemas.host import metrics_server as metrics
from schemas.host.metrics_server import MAX_CONNECTIONS, MAX_HEADER, MetricsServer

GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
BOUND_S = 60.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """A server of pages that number themselves."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        pages = count(1)
        self.unready = ""
        self.server = MetricsServer(
            lambda accept: (b"page %d\n" % next(pages), f"text/{accept}"), lambda: self.unready
        )
        self._opened: list[asyncio.StreamWriter] = []

    async def connect(self, host: str = "127.0.0.1") -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        self._opened.append(streams[1])
        return streams

    async def ask(self, said: bytes) -> bytes:
        """Everything that is answered, until the connection is closed."""
        reader, writer = await self.connect()
        writer.write(said)
        return await asyncio.wait_for(reader.read(), BOUND_S)

    def close(self) -> None:
        for writer in self._opened:
            writer.transport.abort()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    async with house.server.served("127.0.0.1", house.port):
        yield house
    house.close()


async def test_a_scrape_is_answered_and_the_connection_closed(house: House) -> None:
    said = b"GET /metrics?name=x HTTP/1.1\r\nHost: here\r\nAccept: plain\r\n\r\n"

    reply = await house.ask(said)

    assert reply.split()[1] == b"200"
    assert reply.split(b"\r\n")[1:] == [
        b"Content-Type: text/plain", b"Content-Length: 7", b"Connection: close", b"", b"page 1\n",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "unready", "status", "page"),
    [
        (b"/healthz", "", b"200", b"ok\n"),
        (b"/healthz", "no session", b"200", b"ok\n"),  # no reason to end the process
        (b"/readyz", "", b"200", b"ok\n"),
        (b"/readyz", "no session", b"503", b"no session\n"),
    ],
)
async def test_a_probe_tells_life_from_readiness(
    house: House, path: bytes, unready: str, status: bytes, page: bytes
) -> None:
    house.unready = unready

    reply = await house.ask(b"GET " + path + b" HTTP/1.1\r\nHost: here\r\n\r\n")

    assert (reply.split()[1], reply.partition(b"\r\n\r\n")[2]) == (status, page)


async def test_three_hundred_idle_connections_block_no_scrape(house: House) -> None:
    threads = threading.active_count()
    for place in range(300):
        _, writer = await house.connect()
        if place % 2:
            writer.write(GET[: 1 + place % 30])

    answered = await house.ask(GET)

    assert answered.endswith(b"page 1\n")
    assert threading.active_count() == threads
    assert len(house.server._connections) <= MAX_CONNECTIONS


async def test_the_host_with_the_most_connections_loses_its_oldest(house: House) -> None:
    reader, writer = await house.connect("127.0.0.2")
    for _ in range(2 * MAX_CONNECTIONS):
        await house.connect()
    await house.ask(GET)

    writer.write(GET)

    assert (await asyncio.wait_for(reader.read(), BOUND_S)).endswith(b"page 1\n")


async def test_a_silent_connection_is_closed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.01)

    assert await house.ask(b"") == b""
    assert await house.ask(GET[:-2]) == b""


async def test_a_connection_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REPLY_TIMEOUT_S", 0.01)
    house = House()
    house.server = MetricsServer(lambda _: (bytes(16 << 20), "text/plain"))
    async with house.server.served("127.0.0.1", house.port):
        _, writer = await house.connect()
        writer.write(GET)
        async with asyncio.timeout(BOUND_S):
            while not house.server._answering:
                await asyncio.sleep(0.001)
            while house.server._answering:
                await asyncio.sleep(0.001)
        house.close()


@pytest.mark.parametrize(("said", "status"), [
    (b"GET /metrics HTTP/1.1\r\nHost: here\r\nX: " + bytes([120]) * 2 * MAX_HEADER, b"431"),
    (b"\x16\x03\x01 no HTTP at all\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"404"),
    (b"POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n", b"405"),
], ids=["too long", "garbage", "elsewhere", "not to be read"])  # fmt: skip
async def test_an_invalid_scrape_is_refused_with_its_status(
    house: House, said: bytes, status: bytes
) -> None:
    assert (await house.ask(said)).split(b" ")[1] == status


async def test_a_rendered_page_is_reused_briefly_and_not_sent_for_head(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await house.ask(GET)
    again = await house.ask(GET)
    head = await house.ask(GET.replace(b"GET", b"HEAD"))
    monkeypatch.setattr(metrics, "PAGE_REUSE_S", -1.0)

    assert again == first
    assert head.endswith(b"close\r\n\r\n")
    assert (await house.ask(GET)).endswith(b"page 2\n")


async def test_prometheus_gets_the_requested_format() -> None:
    page, kind = Metrics().registry.page("application/openmetrics-text; version=1.0.0")

    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert page.endswith(b"# EOF\n")
    for accept in ("", "application/openmetrics-text; version=abc"):
        assert Metrics().registry.page(accept)[1].startswith("text/plain")


async def test_an_occupied_port_is_named_and_port_0_serves_nothing(house: House) -> None:
    async with MetricsServer(lambda _: (b"", "")).served("", 0):
        pass
    with pytest.raises(SettingsError) as refused:
        async with MetricsServer(lambda _: (b"", "")).served("127.0.0.1", house.port):
            pass

    assert refused.value.field == "metrics"
    assert not refused.value.needs_person
