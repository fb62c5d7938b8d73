"""Published state changes: a hint for those who follow; the journal is the truth.

Bulk traffic on sockets of its own: logs and sample records up, snapshots down, tails out.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from schemas.ids import JobId, NodeId, Rank, Seconds, Version
from schemas.wire import Message

Detail = dict[str, str | int | float | bool | None]


class FeedEvent(Message, tag="feed.event.1"):
    """Something that users can see happened, numbered without gaps for the cluster's life."""

    seq: int  # 1-based
    time: Seconds  # since the epoch
    event: str  # such as job.submitted
    job: JobId | None
    node: NodeId | None
    detail: Detail


LOG: Final = "log"
SAMPLES: Final = "samples"
Stream = Literal["log", "samples"]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # bytes


class LogHello(Message, tag="logs.hello.1"):
    """Agent to relay: what do you hold of this worker's stream?"""

    node: NodeId
    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream


class LogChunk(Message, tag="logs.chunk.1"):
    """Agent to relay: bytes of a worker's file from `offset` on; whole lines where they fit."""

    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream
    offset: Position
    data: bytes


class LogEnded(Message, tag="logs.ended.1"):
    """Agent to relay: the worker has exited and its file ends at `size`."""

    job: JobId
    version: Annotated[Version, msgspec.Meta(ge=0, le=2**53)]
    rank: Annotated[Rank, msgspec.Meta(ge=0, le=2**53)]
    stream: Stream
    size: Position


class LogStored(Message, tag="logs.stored.1"):
    """Relay to agent: stored through `size`, and you may be `credit` bytes ahead of it."""

    job: JobId
    version: Version
    rank: Rank
    stream: Stream
    size: Position
    ended: bool
    credit: int
    full: bool = False  # no more of this job is kept: send nothing until that is over, but the end


class ReadLog(Message, tag="logs.read.1"):
    """Follower to relay: one page from `cursor`, at most `max_bytes`; waits if there is none."""

    job: JobId
    stream: Stream = LOG
    rank: Rank | None = None
    cursor: Position = 0  # position in the job's store; 0 is the start
    max_bytes: int = 262_144
    wait_s: float = 0.0
    since: float = 0.0  # seconds since the epoch; what was stored before is passed over


class LogPiece(Message, tag="logs.piece.1"):
    """Some output of one worker, in the order in which it was stored."""

    version: Version
    rank: Rank
    offset: int  # in the worker's own file
    data: bytes
    time: float = 0.0  # when it was stored, seconds since the epoch; 0: not known
    node: str = ""  # where the worker ran; empty: not known


class LogPage(Message, tag="logs.page.1"):
    """Relay to follower."""

    job: JobId
    pieces: tuple[LogPiece, ...]
    cursor: int  # ask from here next
    ended: bool  # nothing can follow
    missing: tuple[str, ...] = ()  # workers of that rank whose output ends early, and why


class GetSnapshot(Message, tag="logs.get_snapshot.1"):
    """Agent to relay: a piece of a working directory's archive."""

    digest: str
    offset: Position


class SnapshotPiece(Message, tag="logs.snapshot_piece.1"):
    """Relay to agent."""

    digest: str
    offset: Position
    data: bytes
    total: int  # bytes; -1: there is no such archive here


FromShipper = LogHello | LogChunk | LogEnded | GetSnapshot
ToShipper = LogStored | SnapshotPiece
