"""Two ends of a stream, without I/O or clock: offsets, credit, losses and silence.

An end keeps what its peer has not received, at most `WINDOW` bytes. It therefore never sends beyond
its credit, and can send everything again when the stream is opened again.
"""

from __future__ import annotations

from typing import Final

from schemas.errors import OnesError
from schemas.wire import Message
from schemas.wire.streams import PIECE, WINDOW, StreamAlive, StreamData

ALIVE_S: Final = 5.0  # between messages that show that an end is alive
LOST_S: Final = 20.0  # without any message of the peer; then the attachment ends
TOLD_BYTES: Final = WINDOW // 4  # consumed bytes after which the peer gets credit


class StreamError(OnesError):
    """A peer broke the rules of a stream."""

    code = "stream"


class StreamGapError(StreamError):
    """Bytes of the stream were lost on the way. The client has to open it again."""


class Outgoing:
    """Direction in which this end sends."""

    def __init__(self, offset: int = 0) -> None:
        self._kept = bytearray()  # sent, and not received yet
        self.received = offset  # by the peer
        self.ended = False

    @property
    def sent(self) -> int:
        """Offset after the last byte."""
        return self.received + len(self._kept)

    @property
    def room(self) -> int:
        """Number of bytes that may be sent now."""
        return 0 if self.ended else WINDOW - len(self._kept)

    def send(self, stream: str, data: bytes) -> list[StreamData]:
        """Return the messages for more bytes, which must fit into the room."""
        at = self.sent
        self._kept += data
        return _pieces(stream, at, data)

    def end(self, stream: str) -> list[StreamData]:
        """Return the message that ends this direction."""
        self.ended = True
        return [StreamData(stream=stream, offset=self.sent, data=b"")]

    def mark_received(self, offset: int) -> None:
        """Forget what the peer has. An older offset than the last one changes nothing.

        Raises:
            StreamError: if these bytes were never sent.
        """
        if offset > self.sent:
            raise StreamError(f"byte {offset} was never sent")
        if offset > self.received:
            del self._kept[: offset - self.received]
            self.received = offset

    def again(self, stream: str) -> list[StreamData]:
        """Return the messages for everything that the peer has not received."""
        ending = [StreamData(stream=stream, offset=self.sent, data=b"")] if self.ended else []
        return [*_pieces(stream, self.received, bytes(self._kept)), *ending]


class Incoming:
    """Direction in which this end receives."""

    def __init__(self, offset: int = 0) -> None:
        self.arrived = offset
        self.consumed = offset
        self._told = offset
        self.ended = False

    def take(self, message: StreamData) -> bytes:
        """Return the new bytes of a message, which are empty for a repeated one.

        Raises:
            StreamGapError: if bytes before it are missing.
            StreamError: if it exceeds the credit.
        """
        end = message.offset + len(message.data)
        if message.offset > self.arrived:
            raise StreamGapError(f"bytes {self.arrived} to {message.offset} were lost")
        if end > self.consumed + WINDOW:
            raise StreamError(f"byte {end} is beyond the credit of {self.consumed + WINDOW}")
        if not message.data and message.offset == self.arrived:
            self.ended = True
        fresh = message.data[self.arrived - message.offset :] if end > self.arrived else b""
        self.arrived = max(self.arrived, end)
        return fresh

    def consume(self, count: int) -> bool:
        """Grant credit for consumed bytes. Return True if the peer should be told now."""
        self.consumed += count
        return self.consumed - self._told >= TOLD_BYTES

    def mark_told(self) -> None:
        """Record that the peer is told now."""
        self._told = self.consumed

    def skip_to(self, offset: int) -> None:
        """Continue at a later byte, because the peer does not have those before it any more."""
        self.arrived = self.consumed = self._told = offset


class StreamEnd:
    """One end of a stream. Times are seconds of a monotonic clock of the caller."""

    def __init__(self, stream: str, now: float, offset: int = 0, input_offset: int = 0) -> None:
        self.stream = stream
        self.outgoing = Outgoing(offset)
        self.incoming = Incoming(input_offset)
        self._heard_at = self._told_at = now

    def heard(self, now: float) -> None:
        """Record a sign of the peer."""
        self._heard_at = now

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last sign of the peer."""
        return now - self._heard_at

    def take(self, message: Message, now: float) -> bytes:
        """Process a message of the peer, and return new bytes.

        Raises:
            StreamError: as in `Incoming.take`, or if the peer received what was never sent.
        """
        self.heard(now)
        if isinstance(message, StreamData):
            return self.incoming.take(message)
        if isinstance(message, StreamAlive):
            self.outgoing.mark_received(message.received)
            if message.sent > self.incoming.arrived:
                raise StreamGapError(f"bytes up to {message.sent} were lost")
        return b""

    def consume(self, count: int, now: float) -> list[Message]:
        """Grant credit for consumed bytes, and return the message that tells the peer, if any."""
        return [self.alive(now)] if self.incoming.consume(count) else []

    def alive(self, now: float) -> StreamAlive:
        """Return a message that tells the peer how far both directions are."""
        self._told_at = now
        self.incoming.mark_told()
        received, sent = self.incoming.consumed, self.outgoing.sent
        return StreamAlive(stream=self.stream, received=received, sent=sent)

    def due(self, now: float) -> list[Message]:
        """Return the message that is due now, if any."""
        return [self.alive(now)] if now - self._told_at >= ALIVE_S else []


def _pieces(stream: str, offset: int, data: bytes) -> list[StreamData]:
    return [
        StreamData(stream=stream, offset=offset + at, data=data[at : at + PIECE])
        for at in range(0, len(data), PIECE)
    ]
