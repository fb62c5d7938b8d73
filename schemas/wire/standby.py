"""Messages between the active controller and a standby.

A standby asks and the active controller replies. A request repeats without harm.
"""

from __future__ import annotations

from schemas.ids import Seconds, Term
from schemas.wire import Message


class PullInputs(Message, tag="standby.pull_inputs.1"):
    """Standby to active: everything up to `after` is durable here; send what follows."""

    host: str  # of the standby
    release: str  # version and digest of its code
    journal: str  # id of its journal; "": it has none
    after: int  # number of its last durable input
    crc: int  # checksum of that input
    term: Term  # of the active controller, as far as known; the next two numbers belong to it
    seen: int  # number of the last urgent file that was announced
    files: int  # number of the last urgent file such that it and all earlier ones are stored here
    mirrored: bool  # all other files are stored here, too


class InputRow(Message, tag="standby.input_row.1"):
    """Input as stored in the journal."""

    at: Seconds  # since the epoch
    body: bytes  # MessagePack
    crc: int  # checksum of number, time and body


class Inputs(Message, tag="standby.inputs.1"):
    """Active to standby: the inputs after `after`, none if there are no new ones for a while."""

    term: Term
    release: str
    now: Seconds  # time of the active controller
    after: int
    rows: tuple[InputRow, ...] = ()
    last_event: int = 0  # number of the last event once these inputs are handled; 0: not known
    copy: bool = False  # the standby needs a copy of the whole journal
    files: int = 0  # number of the last urgent file
    paths: tuple[str, ...] = ()  # urgent files, which the next pull must include


class PullCopy(Message, tag="standby.pull_copy.1"):
    """Standby to active: send a piece of a copy of the journal; offset 0 begins a new copy."""

    host: str
    offset: int


class CopyPiece(Message, tag="standby.copy_piece.1"):
    """Active to standby: piece of the copy."""

    offset: int
    total: int  # bytes of the copy
    jobs: int  # number of accepted jobs
    data: bytes


class PullFiles(Message, tag="standby.pull_files.1"):
    """Standby to active: list the files that changed."""

    since: Seconds  # modification time, by the clock of the active controller; 0: list all
    after: str = ""  # path after which the list begins


class StoredFile(Message, tag="standby.stored_file.1"):
    """File in the state folder of the active controller."""

    path: str  # relative to the state folder
    size: int  # bytes
    mtime_ns: int  # modification time, nanoseconds since the epoch


class StoredFiles(Message, tag="standby.stored_files.1"):
    """Active to standby: files that changed since the requested time, in the order of paths."""

    now: Seconds  # time for the next request
    files: tuple[StoredFile, ...] = ()
    more: bool = False  # request again, after the last path


class PullFile(Message, tag="standby.pull_file.1"):
    """Standby to active: send a piece of a file."""

    path: str
    offset: int


class StoredPiece(Message, tag="standby.stored_piece.1"):
    """Active to standby: piece of a file."""

    path: str
    offset: int
    total: int  # bytes of the file; -1: there is no such file
    mtime_ns: int
    data: bytes


FromStandby = PullInputs | PullCopy | PullFiles | PullFile
ToStandby = Inputs | CopyPiece | StoredFiles | StoredPiece
