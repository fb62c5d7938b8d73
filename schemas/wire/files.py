"""Messages about files of a job, which are lists, pieces, and the states of a sweep's models.

A client sends requests to the log relay, which forwards them to the agent over port 7701. The
agent replies over port 7704, the bulk port, so that orders and events are not delayed. States are
sent directly from a worker or an agent to the worker that trains next.
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
    """A file that a job created or changed."""

    area: Area
    path: str  # relative to the job's folder of this area, with slashes
    size: int  # bytes
    stamp: str  # changes whenever the file changes


# --- follower to relay


class ListFiles(Message, tag="files.list.1"):
    """List the files of a job on a node. Only the job's owner and admins may send this."""

    job: JobId
    node: NodeId


class ReadFile(Message, tag="files.read.1"):
    """Request a piece of a file of a job. Only the job's owner and admins may send this."""

    job: JobId
    node: NodeId
    area: Area
    path: str
    offset: Position


# --- relay to agent, and its replies


class AskFiles(Message, tag="files.ask_list.1"):
    """List the files on this node that the job created or changed."""

    request: str  # id that the reply repeats
    job: JobId


class AskPiece(Message, tag="files.ask_piece.1"):
    """Request a piece of a file."""

    request: str
    job: JobId
    area: Area
    path: str
    offset: Position


class FileList(Message, tag="files.files.1"):
    """Reply to AskFiles. The relay forwards it as the reply to ListFiles."""

    request: str
    files: tuple[FileInfo, ...]
    left_out: int = 0  # files that do not fit into the message
    refused: tuple[
        str, ...
    ] = ()  # entries that are not regular files, or links out of the folder, and why


class FilePiece(Message, tag="files.piece.1"):
    """Reply to AskPiece. The relay forwards it as the reply to ReadFile."""

    request: str
    offset: Position
    data: bytes  # at most 1 MiB; empty at the end of the file
    size: int  # current size of the whole file, bytes
    stamp: str  # stamp of the file that was read
    digest: str  # SHA-256 of `data`, hexadecimal


class FilesRefused(Message, tag="files.refused.1"):
    """Reply of an agent that cannot execute the request."""

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
    """Request the bytes of a state file from `offset` on.

    `mac` proves the right to read the state. Its key is the sweep's key, which only agents and
    workers of the sweep receive, see `schemas.transport.state_transfer.mac_of`.
    """

    job: JobId
    trial: int
    version: int
    digest: str  # SHA-256 of the state's frames, hexadecimal
    offset: Offset
    mac: str = ""  # hexadecimal


class StatePiece(Message, tag="states.piece.1"):
    """Reply: the bytes follow in the other frames of the message."""

    digest: str
    offset: Offset
    total: Offset  # bytes of the whole file


class StateRefused(Message, tag="states.refused.2"):
    """Reply: this process cannot provide the state."""

    digest: str
    reason: str


FromStates = StatePiece | StateRefused
