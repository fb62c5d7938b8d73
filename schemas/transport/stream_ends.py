"""One end of a stream: ordered bytes in both directions, whatever is lost on the way.

Messages arrive in order, so a message that begins after the last byte shows a loss. The receiver
says so, and the sender sends everything again from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from schemas.wire import Message
from schemas.wire.streams import MAX_REASON, PIECE, WINDOW, StreamClosed, StreamData

TICK_S: Final = 0.5
ALIVE_S: Final = 5.0  # between messages that show that an end is alive
LOST_S: Final = 20.0  # without any message of the peer; then the stream ends
RETRY_S: Final = 1.0  # between requests to send the same bytes again
TOLD_BYTES: Final = WINDOW // 4  # consumed bytes after which the peer gets credit


class StreamEnd:
    """One end of a stream.

    `send` sends a message, or loses it. `changed` is set after each change; several ends may share
    it. The first byte that is sent has the offset `first`, and the peer takes `credit` bytes.

    Attributes:
        opened: True if the peer has sent data.
        missed: bytes that the peer could not send again.
    """

    def __init__(
        self,
        stream: str,
        send: Callable[[Message], object],
        *,
        first: int = 0,
        credit: int = WINDOW,
        changed: asyncio.Event | None = None,
    ) -> None:
        self.stream = stream
        self.send = send
        self.changed = changed or asyncio.Event()
        self._closed = asyncio.Event()
        self.missed = 0
        self.opened = False
        self._kept = bytearray()  # sent, and not received by the peer
        self._kept_from = first
        self._limit = first + credit
        self._says_end = False
        self._arrived = 0
        self._unread = bytearray()
        self._reading = 0  # bytes that the last `read` returned
        self._peer_ended = False
        self._told = (0, WINDOW)  # the peer knows these bytes received, and this limit
        self._told_at = self._heard_at = time.monotonic()
        self._lost_at = float("-inf")

    # --- sending

    @property
    def sent(self) -> int:
        """Offset after the last byte that was sent."""
        return self._kept_from + len(self._kept)

    @property
    def room(self) -> int:
        """Number of bytes that may be sent now."""
        return min(self._limit - self.sent, WINDOW - len(self._kept))

    @property
    def unreceived(self) -> bool:
        """True if the peer has not received everything that was sent."""
        return bool(self._kept)

    def write_now(self, data: bytes) -> None:
        """Send bytes, which must fit into the room."""
        at = self.sent
        self._kept += data
        self._send_pieces(at)

    async def write(self, data: bytes) -> None:
        """Send bytes, as soon as the peer has room for them. Do nothing after the end."""
        while data and not self.over:
            if self.room <= 0:
                await self.wait()
            else:
                room = self.room
                self.write_now(data[:room])
                data = data[room:]

    def write_eof(self) -> None:
        """State that no more bytes will be written."""
        self._says_end = True
        self.tell()

    def tell(self, *, lost: bool = False) -> None:
        """Send how far both directions are."""
        self._send_data(self.sent, b"", lost=lost)

    def _send_pieces(self, offset: int) -> None:
        """Send all bytes from an offset."""
        data = bytes(self._kept[offset - self._kept_from :])
        for at in range(0, len(data), PIECE):
            self._send_data(offset + at, data[at : at + PIECE])

    def _send_data(self, offset: int, data: bytes, *, lost: bool = False) -> None:
        self._told_at, self._told = time.monotonic(), (self._arrived, self._peer_limit)
        received, limit = self._told
        ended = self._says_end and not data
        self.send(
            StreamData(
                stream=self.stream, offset=offset, data=data, kept_from=self._kept_from,
                received=received, limit=limit, lost=lost, ended=ended,
            )
        )  # fmt: skip

    # --- receiving

    @property
    def _peer_limit(self) -> int:
        return self._arrived - len(self._unread) - self._reading + WINDOW

    def receive(self, message: StreamData) -> None:
        """Process a message of the peer. Close the stream if it breaks the rules."""
        self._heard_at = time.monotonic()
        if message.received > self.sent:
            self.close(f"byte {message.received} was never sent")
            return
        if message.received > self._kept_from:
            del self._kept[: message.received - self._kept_from]
            self._kept_from = message.received
        self._limit = max(self._limit, message.limit)
        if message.lost:
            self._send_pieces(self._kept_from)
        self._take(message)
        self.opened = True
        self.changed.set()

    def _take(self, message: StreamData) -> None:
        if (gap := message.kept_from - self._arrived) > 0:
            self._arrived += gap
            self.missed += gap if self.opened else 0  # otherwise it is the past of a terminal
        if message.offset > self._arrived:
            if self._heard_at - self._lost_at >= RETRY_S:
                self._lost_at = self._heard_at
                self.tell(lost=True)
            return
        fresh = message.data[self._arrived - message.offset :]
        if self._arrived + len(fresh) > self._peer_limit:
            self.close(f"bytes beyond the credit of {self._peer_limit}")
            return
        self._arrived += len(fresh)
        self._unread += fresh
        self._peer_ended |= message.ended
        if not message.data and self._told != (self._arrived, self._peer_limit):
            self.tell()

    async def read(self) -> bytes:
        """Return the next bytes, and grant credit for those before. Empty: no more will come."""
        self._reading = 0
        if self._peer_limit - self._told[1] >= TOLD_BYTES and not self.over:
            self.tell()
        while not (self._unread or self._peer_ended or self.over):
            await self.wait()
        data = bytes(self._unread)
        self._unread.clear()
        self._reading = len(data)
        return data

    async def wait(self) -> None:
        """Wait for the next change."""
        self.changed.clear()
        await self.changed.wait()

    # --- life

    @property
    def over(self) -> bool:
        """True if the stream was closed or lost."""
        return self._closed.is_set()

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last message of the peer."""
        return now - self._heard_at

    def tick(self, now: float) -> None:
        """Show that this end is alive, and close it if the peer is silent."""
        if self.over or self.silent_s(now) > LOST_S:
            self.close()
            return
        changed = self._told != (self._arrived, self._peer_limit)
        if changed or self._kept or now - self._told_at >= ALIVE_S:
            self.tell()

    async def keep_alive(self) -> None:
        """Call `tick` until the stream is over."""
        while not self.over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), TICK_S)
            self.tick(time.monotonic())

    def close(self, reason: str | None = None, code: int | None = None) -> None:
        """End the stream here, and with a reason at the peer, too."""
        if reason is not None and not self.over:
            self.send(StreamClosed(stream=self.stream, reason=reason[:MAX_REASON], code=code))
        self._closed.set()
        self.changed.set()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes from and to a connection, until both directions or the stream have ended."""

        async def from_connection() -> None:
            while data := await reader.read(PIECE):
                await self.write(data)
            self.write_eof()

        async def to_connection() -> None:
            while data := await self.read():
                writer.write(data)
                await writer.drain()
            if self.over:
                writer.close()
            elif writer.can_write_eof():
                writer.write_eof()

        tasks = [asyncio.create_task(one()) for one in (from_connection, to_connection)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            writer.close()
