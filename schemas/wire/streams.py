"""Messages of streams: terminals of jobs, and TCP connections to their ports.

A stream has two directions of bytes, numbered from 0. A client opens it at the log relay (port
7705), which forwards its messages to the agent over port 7704. `OpenStream` alone travels over port
7701, as requests for files do. A sender keeps what its peer has not received, and sends it again
when the peer finds that it was lost.
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
Worker = Annotated[WorkerId, msgspec.Meta(max_length=200)]


class OpenStream(Message, tag="streams.open.1"):
    """Open a stream to a worker of one's own job. Repeated every 5 s, and with each new size.

    The relay sets `worker`, `user` and `journal` for the agent.
    """

    stream: StreamId
    job: JobId
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)] = Rank(0)
    what: Literal["terminal", "shell", "port"] = "terminal"  # of the job; a new one; a TCP port
    argv: Annotated[tuple[Word, ...], msgspec.Meta(max_length=4096)] = ()  # program of a shell
    term: Annotated[str, msgspec.Meta(max_length=200)] = ""  # TERM of a shell
    lang: Annotated[str, msgspec.Meta(max_length=200)] = ""  # LANG of a shell
    rows: Cells = 24  # of the client; a terminal has the size of the smallest one
    cols: Cells = 80
    port: Number = 0
    again: bool = False  # the node has sent data before
    worker: Worker = WorkerId("")  # of an open stream
    user: str = ""
    journal: str = ""  # of the job, see `GroupDelta`


class StreamOpened(Message, tag="streams.opened.1"):
    """Relay to client: the node was asked. The node replies with `StreamData`."""

    stream: StreamId
    worker: Worker


class StreamData(Message, tag="streams.data.1"):
    """Bytes in one of the two directions, or none, and how far both directions are.

    Sent without bytes every 5 s, and when a quarter of the window was consumed.
    """

    stream: StreamId
    offset: Position  # of the first byte
    kept_from: Position  # first byte that the sender can send again
    received: Position  # bytes of the other direction that have arrived
    limit: Position  # the peer may send up to this byte
    data: Annotated[bytes, msgspec.Meta(max_length=PIECE)] = b""
    lost: bool = False  # the peer should send again from `received`
    ended: bool = False  # no bytes follow


class StreamSignal(Message, tag="streams.signal.1"):
    """Client to terminal: send a signal to the program in the foreground."""

    stream: StreamId
    name: Literal["HUP", "INT", "QUIT", "TERM", "KILL"]


class StreamClosed(Message, tag="streams.closed.1"):
    """End of the stream."""

    stream: StreamId
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    code: int | None = None  # exit code of the program, if it has ended


FromClient = OpenStream | StreamData | StreamSignal | StreamClosed
FromNode = StreamData | StreamClosed
ToClient = StreamOpened | FromNode
ToNode = StreamData | StreamSignal | StreamClosed
