"""Messages of the feed and of the log relay.

The feed publishes state changes as hints. The journal is authoritative. Bulk data has its own
sockets, for logs and sample records from agents, snapshots to agents, and output to followers.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from schemas.ids import JobId, NodeId, Rank, Seconds, Time, Version
from schemas.wire import Message

Detail = dict[str, str | int | float | bool | None]


class FeedEvent(Message, tag="feed.event.1"):
    """An event visible to users, numbered without gaps for the life of the cluster."""

    seq: int  # 1-based
    time: Seconds  # seconds since the epoch
    event: str  # name, such as job.submitted
    job: JobId | None
    node: NodeId | None
    detail: Detail


LOG: Final = "log"
SAMPLES: Final = "samples"
Stream = Literal["log", "samples"]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # bytes


class LogHello(Message, tag="logs.hello.1"):
    """Agent to relay: ask how many bytes of a worker's stream are stored."""

    node: NodeId
    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream
    journal: str = ""  # of the job, see `GroupDelta`


class LogChunk(Message, tag="logs.chunk.1"):
    """Agent to relay: bytes of a worker's file from `offset` on, complete lines if they fit."""

    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream
    offset: Position
    data: bytes
    journal: str = ""  # of the job, see `GroupDelta`


class LogEnded(Message, tag="logs.ended.1"):
    """Agent to relay: the worker has exited, and its file ends at `size`."""

    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream
    size: Position
    journal: str = ""  # of the job, see `GroupDelta`


class LogStored(Message, tag="logs.stored.1"):
    """Relay to agent: `size` bytes are stored, and the agent may send `credit` more bytes."""

    job: JobId
    version: Version
    rank: Rank
    stream: Stream
    size: Position
    ended: bool
    credit: int
    full: bool = False  # the job's store is full: send only `LogEnded` until this is False


class ReadLog(Message, tag="logs.read.1"):
    """Follower to relay: request a page of output. While it is empty, the reply is delayed."""

    job: JobId
    stream: Stream = LOG
    rank: Rank | None = None
    cursor: Position = 0  # position in the job's store; 0 is the start
    max_bytes: int = 262_144
    wait_s: float = 0.0
    since: Time = 0.0  # output stored earlier is skipped


class LogPiece(Message, tag="logs.piece.1"):
    """Output of one worker, in the order in which it was stored."""

    version: Version
    rank: Rank
    offset: int  # position in the worker's own file, bytes
    data: bytes
    time: float = 0.0  # time of storage, seconds since the epoch; 0: not known
    node: str = ""  # node of the worker; empty: not known


class LogPage(Message, tag="logs.page.1"):
    """Relay to follower: a page of output."""

    job: JobId
    pieces: tuple[LogPiece, ...]
    cursor: int  # cursor of the next page
    ended: bool  # no more output will come
    missing: tuple[str, ...] = ()  # workers of the requested rank with incomplete output, and why


class GetSnapshot(Message, tag="logs.get_snapshot.1"):
    """Agent to relay: request a piece of a working directory's archive."""

    digest: str
    offset: Position


class SnapshotPiece(Message, tag="logs.snapshot_piece.1"):
    """Relay to agent: a piece of the archive."""

    digest: str
    offset: Position
    data: bytes
    total: int  # bytes; -1: no such archive


FromShipper = LogHello | LogChunk | LogEnded | GetSnapshot
ToShipper = LogStored | SnapshotPiece
