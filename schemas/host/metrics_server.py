"""Metrics of a daemon for Prometheus: their registry, and the HTTP server for GET /metrics.

The server also answers probes: `/healthz` while the event loop runs, and `/readyz` with 503 and the
reason while the daemon is not ready. Slow or idle clients cannot block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client import Counter as Count
from prometheus_client.exposition import choose_encoder

from schemas.errors import AddressInUseError, SettingsError


class Registry:
    """Metrics of a process, with its memory, processor time and open files."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.collectors = CollectorRegistry()
        ProcessCollector(registry=self.collectors)

    def gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """Add a gauge and return it."""
        return Gauge(name, what, labels, registry=self.collectors)

    def counter(self, name: str, what: str, *labels: str) -> Count:
        """Add a counter and return it."""
        return Count(name, what, labels, registry=self.collectors)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text, in a format that `accept` allows, and the content type."""
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # an invalid version in the header
            encode, kind = choose_encoder("")
        return encode(self.collectors), kind


MAX_CONNECTIONS: Final = 64
MAX_HEADER: Final = 16 << 10  # bytes of the request line and headers
REQUEST_TIMEOUT_S: Final = 5.0  # from the start of the connection to the complete request
REPLY_TIMEOUT_S: Final = 10.0  # for sending a reply
PAGE_REUSE_S: Final = 0.5  # time for which a rendered page is reused
CHUNK: Final = 4096
PATHS: Final = frozenset({b"/metrics", b"/healthz", b"/readyz"})
Render = Callable[[str], tuple[bytes, str]]  # Accept header -> page, content type


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    host: str
    writer: asyncio.StreamWriter


class MetricsServer:
    """HTTP server that answers one request per connection and then closes the connection.

    At the connection limit, the host with the most connections loses its oldest connection.
    `unready` returns why the daemon is not ready, or "".
    """

    def __init__(self, render: Render, unready: Callable[[], str] = lambda: "") -> None:
        self._render = render
        self._unready = unready
        self._pages: dict[str, tuple[float, bytes, str]] = {}
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def served(self, host: str, port: int) -> AsyncIterator[None]:
        """Serve while the context is active. With port 0, serve nothing."""
        if not port:
            yield
            return
        try:
            server = await asyncio.start_server(self._accept, host, port, limit=CHUNK)
        except OSError as error:
            what = f"listen.metrics: {host}:{port}: {error.strerror}"
            refusal = AddressInUseError if error.errno == errno.EADDRINUSE else SettingsError
            raise refusal(what, "choose another port, or 0 to disable metrics", "metrics") from None
        try:
            yield
        finally:
            server.close()
            for connection in list(self._connections):
                connection.writer.transport.abort()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("",)
        connection = _Connection(str(peer[0]), writer)
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            hosts = Counter(each.host for each in self._connections)
            most = max(hosts.values())
            first = next(each for each in self._connections if hosts[each.host] == most)
            del self._connections[first]
            first.writer.transport.abort()
        task = asyncio.create_task(self._answer(reader, connection))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        writer = connection.writer
        writer.transport.set_write_buffer_limits(high=0)  # so that drain() returns once all is sent
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await _request(http, reader)
            if request is not None:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await self._reply(http, writer, request)
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            self._connections.pop(connection, None)
            writer.close()

    async def _reply(
        self, http: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request | int
    ) -> None:
        kind, page = "text/plain; charset=utf-8", b""
        if not isinstance(request, h11.Request):
            status = request
        elif (path := request.target.partition(b"?")[0]) not in PATHS:
            status, page = HTTPStatus.NOT_FOUND, b"use /metrics\n"
        elif request.method not in {b"GET", b"HEAD"}:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        elif path != b"/metrics":
            why = self._unready() if path == b"/readyz" else ""
            status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
            page = f"{why or 'ok'}\n".encode()
        else:
            status = HTTPStatus.OK
            accept = b",".join(value for name, value in request.headers if name == b"accept")
            page, kind = self._page(accept.decode("latin-1"))
        headers = {"Content-Type": kind, "Content-Length": str(len(page)), "Connection": "close"}
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        head = h11.Response(status_code=int(status), headers=fields)
        for event in (head, h11.Data(data=page), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()

    def _page(self, accept: str) -> tuple[bytes, str]:
        kept = self._pages.get(accept)
        now = time.monotonic()
        if kept is None or now - kept[0] > PAGE_REUSE_S:
            if len(self._pages) > MAX_CONNECTIONS:
                self._pages.clear()
            kept = self._pages[accept] = (now, *self._render(accept))
        return kept[1:]


async def _request(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | int | None:
    """Return the request, None if none arrives, or the error status for a malformed request."""
    try:
        while True:
            event = http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            http.receive_data(await reader.read(CHUNK))
    except h11.RemoteProtocolError as error:
        return error.error_status_hint
