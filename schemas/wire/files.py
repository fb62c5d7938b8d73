"""What a job made: lists of its files, and pieces of them, from the node where they lie.

A client asks the log relay, which asks the node's agent over 7701; the answer comes over 7704, the
bulk port, so that orders and events do not wait for it.

States of a sweep's models on their way: from a worker or an agent to whoever trains next.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from schemas.ids import JobId, NodeId
from schemas.wire import Message
from schemas.wire.feed import Position

WORK: Final = "work"
CHECKPOINTS: Final = "checkpoints"
STATES: Final = "states"
Area = Literal["work", "checkpoints", "states"]  # working directory, checkpoints, a sweep's states


class FileInfo(Message, tag="files.info.1"):
    """A file that a job made or changed."""

    area: Area
    path: str  # relative to the area's folder of the job, with slashes
    size: int  # bytes
    stamp: str  # changes with the file


# --- follower to relay


class ListFiles(Message, tag="files.list.1"):
    """What is there of a job on a node? For its owner and for admins."""

    job: JobId
    node: NodeId


class ReadFile(Message, tag="files.read.1"):
    """A piece of a file of a job, from `offset` on. For its owner and for admins."""

    job: JobId
    node: NodeId
    area: Area
    path: str
    offset: Position


# --- relay to agent, and its answers


class AskFiles(Message, tag="files.ask_list.1"):
    """List what a job has on this node that its snapshot had not."""

    request: str  # names the answer
    job: JobId


class AskPiece(Message, tag="files.ask_piece.1"):
    """Send a piece of a file."""

    request: str
    job: JobId
    area: Area
    path: str
    offset: Position


class FileList(Message, tag="files.files.1"):
    """Answer to AskFiles, and through the relay to ListFiles."""

    request: str
    files: tuple[FileInfo, ...]
    left_out: int = 0  # more than a message has room for
    refused: tuple[
        str, ...
    ] = ()  # what is no file, or a link that leads out of the folder, and why


class FilePiece(Message, tag="files.piece.1"):
    """Answer to AskPiece, and through the relay to ReadFile."""

    request: str
    offset: Position
    data: bytes  # at most 1 MiB; none at the end of the file
    size: int  # bytes of the whole file now
    stamp: str  # of the file from which this piece is
    digest: str  # sha256 of `data`, hex


class FilesRefused(Message, tag="files.refused.1"):
    """Answer of an agent that cannot do it."""

    request: str
    code: str
    message: str
    hint: str


FromFollower = ListFiles | ReadFile
FilesReply = FileList | FilePiece
ToNode = AskFiles | AskPiece
FromNode = FileList | FilePiece | FilesRefused


Offset = Annotated[int, msgspec.Meta(ge=0)]


class AskState(Message, tag="states.ask.1"):
    """Send the bytes of a state file from `offset` on.

    The digest is the right to read: only the controller tells it, to those who need the state.
    """

    job: JobId
    trial: int
    version: int
    digest: str  # SHA-256 of the state's frames, hexadecimal
    offset: Offset


class StatePiece(Message, tag="states.piece.1"):
    """Answer: what lies there follows in the message's further frames, as raw bytes."""

    digest: str
    offset: Offset
    total: Offset  # bytes of the whole file


class StateRefused(Message, tag="states.refused.1"):
    """Answer: it is not here."""

    digest: str
    why: str


FromStates = StatePiece | StateRefused
