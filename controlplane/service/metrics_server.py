"""HTTP for Prometheus: GET /metrics, and nobody who is slow or idle keeps others from it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11

from schemas.errors import SettingsError

MAX_CONNECTIONS: Final = 64
MAX_HEADER: Final = 16 << 10  # bytes of a request: its line and headers
REQUEST_S: Final = 5.0  # from its connection until a request has come
REPLY_S: Final = 10.0  # until a reply has gone
PAGE_S: Final = 0.5  # for so long a page is handed out again
CHUNK: Final = 4096
Render = Callable[[str], tuple[bytes, str]]  # of an Accept header, the page and its type


@dataclass(frozen=True, slots=True, eq=False)
class _Visitor:
    host: str
    writer: asyncio.StreamWriter


class MetricsServer:
    """Answers one request of each connection, and closes it.

    When there are as many as may be, the one that came first of those hosts gives way that have
    the most.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._pages: dict[str, tuple[float, bytes, str]] = {}
        self._visitors: dict[_Visitor, None] = {}  # in order of their arrival
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def served(self, host: str, port: int) -> AsyncIterator[None]:
        """Answer meanwhile.

        Args:
            port: 0 is none.

        Raises:
            SettingsError: if the port cannot be had.
        """
        if not port:
            yield
            return
        try:
            server = await asyncio.start_server(self._arrived, host, port, limit=CHUNK)
        except OSError as error:
            what = f"listen.metrics: {host}:{port}: {error.strerror}"
            raise SettingsError(what, "choose another port, or 0 for none", "metrics") from None
        try:
            yield
        finally:
            server.close()
            for visitor in list(self._visitors):
                visitor.writer.transport.abort()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("",)
        visitor = _Visitor(str(peer[0]), writer)
        self._visitors[visitor] = None
        if len(self._visitors) > MAX_CONNECTIONS:
            hosts = Counter(each.host for each in self._visitors)
            most = max(hosts.values())
            first = next(each for each in self._visitors if hosts[each.host] == most)
            del self._visitors[first]
            first.writer.transport.abort()
        task = asyncio.create_task(self._answer(reader, visitor))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, visitor: _Visitor) -> None:
        writer = visitor.writer
        writer.transport.set_write_buffer_limits(high=0)  # drained is sent
        talk = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await _request(talk, reader)
            if request is not None:
                async with asyncio.timeout(REPLY_S):
                    await self._reply(talk, writer, request)
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            self._visitors.pop(visitor, None)
            writer.close()

    async def _reply(
        self, talk: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request | int
    ) -> None:
        kind, page = "text/plain; charset=utf-8", b""
        if not isinstance(request, h11.Request):
            status = request
        elif request.target.partition(b"?")[0] != b"/metrics":
            status, page = HTTPStatus.NOT_FOUND, b"/metrics is here\n"
        elif request.method not in {b"GET", b"HEAD"}:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        else:
            status = HTTPStatus.OK
            accept = b",".join(value for name, value in request.headers if name == b"accept")
            page, kind = self._page(accept.decode("latin-1"))
        headers = {"Content-Type": kind, "Content-Length": str(len(page)), "Connection": "close"}
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        head = h11.Response(status_code=int(status), headers=fields)
        for event in (head, h11.Data(data=page), h11.EndOfMessage()):
            writer.write(talk.send(event) or b"")
        await writer.drain()

    def _page(self, accept: str) -> tuple[bytes, str]:
        kept = self._pages.get(accept)
        now = time.monotonic()
        if kept is None or now - kept[0] > PAGE_S:
            if len(self._pages) > MAX_CONNECTIONS:
                self._pages.clear()
            kept = self._pages[accept] = (now, *self._render(accept))
        return kept[1:]


async def _request(talk: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | int | None:
    """What is asked; or the status that is all there is to say; None: nothing is."""
    try:
        while True:
            event = talk.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            talk.receive_data(await reader.read(CHUNK))
    except h11.RemoteProtocolError as error:
        return error.error_status_hint
