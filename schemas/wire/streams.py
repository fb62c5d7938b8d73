"""Messages of streams: terminals of jobs, and TCP connections to their ports.

A stream has two directions of bytes, numbered from 0. A client opens it at the log relay (port
7705), which forwards the messages to the agent over port 7704. `OpenStream` alone travels over
port 7701, as requests for files do. Each receiver keeps `WINDOW` bytes of credit open, so the
sender may send up to byte `received + WINDOW`, and keeps what is not received yet. Bytes that were
lost on the way show as a gap of the offsets. The client then opens the stream again, with the same
id, and both ends send what the other one has not received.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from schemas.ids import JobId, Rank, WorkerId
from schemas.wire import Message
from schemas.wire.feed import Position

WINDOW: Final = 256 << 10  # bytes in flight in each direction
PIECE: Final = 32 << 10  # bytes of one message
MAX_REASON: Final = 500
TERMINAL: Final = "terminal"
SHELL: Final = "shell"
PORT: Final = "port"
StreamId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]  # random
Cells = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Word = Annotated[str, msgspec.Meta(max_length=32_768)]
Number = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


class OpenStream(Message, tag="streams.open.1"):
    """Open a stream to a worker of one's own job, or open it again after a loss.

    The relay sets `worker`, `user` and `journal` for the agent.
    """

    stream: StreamId
    job: JobId
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)] = Rank(0)
    what: Literal["terminal", "shell", "port"] = "terminal"  # of the job; a new one; a TCP port
    argv: Annotated[tuple[Word, ...], msgspec.Meta(max_length=4096)] = ()  # program of a shell
    term: Annotated[str, msgspec.Meta(max_length=200)] = ""  # TERM of a shell
    lang: Annotated[str, msgspec.Meta(max_length=200)] = ""  # LANG of a shell
    rows: Cells = 24
    cols: Cells = 80
    port: Number = 0
    received: Position | None = None  # bytes that the client has; None: the stream is new
    kept_from: Position = 0  # first byte of its input that the client can send again
    worker: Annotated[WorkerId, msgspec.Meta(max_length=200)] = WorkerId("")  # of an open stream
    user: str = ""
    journal: str = ""  # of the job, see `GroupDelta`


class StreamOpened(Message, tag="streams.opened.1"):
    """The stream is open. `StreamClosed` is the other possible reply."""

    stream: StreamId
    received: Position  # bytes of the client's input that were received
    offset: Position  # of the next byte of output; above `received` of the client: a gap
    worker: Annotated[WorkerId, msgspec.Meta(max_length=200)] = WorkerId("")


class StreamData(Message, tag="streams.data.1"):
    """Bytes in one of the two directions. Empty: the sender sends no more of them."""

    stream: StreamId
    offset: Position
    data: Annotated[bytes, msgspec.Meta(max_length=PIECE)]


class StreamAlive(Message, tag="streams.alive.1"):
    """Sent every 5 s, and whenever a quarter of the window was consumed."""

    stream: StreamId
    received: Position  # bytes consumed; the peer may send up to `received + WINDOW`
    sent: Position  # bytes sent, so that the peer notices a lost last message


class StreamResized(Message, tag="streams.resized.1"):
    """Client to terminal: the size of its window. A terminal has the size of the smallest one."""

    stream: StreamId
    rows: Cells
    cols: Cells


class StreamSignal(Message, tag="streams.signal.1"):
    """Client to terminal: send a signal to the program in the foreground."""

    stream: StreamId
    name: Literal["HUP", "INT", "QUIT", "TERM", "KILL"]


class StreamClosed(Message, tag="streams.closed.1"):
    """End of the stream. With `again`, the client may open it again, and loses nothing."""

    stream: StreamId
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    code: int | None = None  # exit code of the program, if it has ended
    again: bool = False


FromClient = OpenStream | StreamData | StreamAlive | StreamResized | StreamSignal | StreamClosed
FromNode = StreamOpened | StreamData | StreamAlive | StreamClosed
ToNode = StreamData | StreamAlive | StreamResized | StreamSignal | StreamClosed
