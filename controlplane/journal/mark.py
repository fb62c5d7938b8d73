"""Mark of a journal, a small file next to the database that names the last acknowledged input.

A database that lost its last commits, or was replaced by an older copy, looks intact. The mark says
what the database must contain. The writer replaces the mark after each commit and before the commit
is acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from controlplane.journal.database import JOURNAL_ID, UNREADABLE, JournalError, meta

ID_BYTES: Final = 8
SLOT_BYTES: Final = 512  # a disk writes a sector completely or not at all
_RECORD: Final = struct.Struct("<8sQIQ")
_CRC: Final = struct.Struct("<I")
LOST_INPUTS: Final = (
    "restore a backup (`ones admin restore`), or continue without them (`ones admin accept-loss`)"
)


class LostInputsError(JournalError):
    """Raised when a journal lacks inputs that were acknowledged, or its mark is damaged."""

    needs_person = True


class Mark(NamedTuple):
    """The last acknowledged input of a journal."""

    journal: str  # id of the journal, hexadecimal
    input: int  # number of the last acknowledged input; 0: none
    crc: int  # checksum of that input's row; 0: not known
    jobs: int  # number of accepted jobs


def mark_path(journal: Path) -> Path:
    """Return the path of a journal's mark."""
    return journal.with_suffix(".mark")


class MarkFile:
    """Open mark of a journal. Two slots are written in turn, so a torn write spares one of them."""

    def __init__(self, journal: Path, mark: Mark) -> None:
        path = mark_path(journal)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._slot = 0
        self.write(mark)
        self.write(mark)

    def write(self, mark: Mark) -> None:
        """Replace the mark durably."""
        record = _RECORD.pack(bytes.fromhex(mark.journal), mark.input, mark.crc, mark.jobs)
        data = (record + _CRC.pack(zlib.crc32(record))).ljust(SLOT_BYTES, b"\0")
        os.pwrite(self._fd, data, self._slot * SLOT_BYTES)
        os.fdatasync(self._fd)
        self._slot = 1 - self._slot

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_mark(journal: Path) -> Mark | None:
    """Return the mark of a journal, or None if there is no mark.

    Raises:
        LostInputsError: if the mark is damaged.
        OSError: if the mark cannot be read.
    """
    path = mark_path(journal)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    slots = [data[at : at + SLOT_BYTES] for at in (0, SLOT_BYTES)]
    found = [mark for slot in slots if (mark := _decoded(slot)) is not None]
    if not found:
        raise LostInputsError(f"{path} is damaged", LOST_INPUTS)
    return max(found, key=lambda mark: mark.input)


def _decoded(slot: bytes) -> Mark | None:
    end = _RECORD.size
    if len(slot) < end + _CRC.size or _CRC.unpack_from(slot, end) != (zlib.crc32(slot[:end]),):
        return None
    journal, last, crc, jobs = _RECORD.unpack_from(slot)
    return Mark(journal.hex(), last, crc, jobs)


def require_complete(journal: Path) -> None:
    """Refuse a journal that lacks acknowledged inputs. The files are not changed.

    A journal without a mark is refused only if it is missing or empty although its folder contains
    output or archives of jobs.

    Raises:
        LostInputsError: if inputs are missing. It names these inputs and the remedy.
    """
    for problem in losses(journal):
        raise LostInputsError(f"{journal}: {problem}", LOST_INPUTS)


def losses(journal: Path) -> Iterator[str]:
    """Yield at most one description of acknowledged inputs that the journal lacks.

    Raises:
        LostInputsError: if the mark is damaged.
    """
    mark = read_mark(journal)
    if not has_tables(journal):
        if mark is not None and mark.input:
            yield f"the journal is missing or empty, inputs 1 to {mark.input} were acknowledged"
        elif mark is None and (used := _used_folders(journal.parent)):
            yield f"the journal is missing or empty, but {' and '.join(used)} has files of jobs"
    elif mark is not None:
        with contextlib.suppress(*UNREADABLE):  # opening the journal names this damage
            yield from _missing(journal, mark)


def has_tables(journal: Path) -> bool:
    """True unless the journal is missing, or is a database without tables."""
    if not journal.is_file() or not journal.stat().st_size:
        return False  # even with a log, because SQLite deletes the log of an empty file
    with contextlib.suppress(*UNREADABLE), contextlib.closing(_read_only(journal)) as database:
        return database.execute("SELECT 1 FROM sqlite_schema").fetchone() is not None
    return True


def _read_only(journal: Path) -> sqlite3.Connection:
    """Open a journal without changing its write-ahead log, even as the last connection."""
    return sqlite3.connect(f"file:{quote(str(journal.absolute()))}?mode=ro", uri=True)


def _used_folders(state: Path) -> list[str]:
    folders = (state / "logs", state / "snapshots")
    return [str(path) for path in folders if path.is_dir() and any(path.iterdir())]


def _missing(journal: Path, mark: Mark) -> Iterator[str]:
    with contextlib.closing(_read_only(journal)) as database:
        own = meta(database, JOURNAL_ID)
        (last,) = database.execute(
            "SELECT max(ifnull((SELECT max(id) FROM inputs), 0), "
            "ifnull((SELECT max(input) FROM snapshots), 0))"
        ).fetchone()
        row = database.execute("SELECT crc FROM inputs WHERE id = ?", (mark.input,)).fetchone()
    if own != mark.journal:
        yield f"{mark_path(journal).name} belongs to journal {mark.journal}, this is {own or '?'}"
    elif last < mark.input:
        what = f"inputs {last + 1} to {mark.input} were acknowledged and are missing"
        yield "; ".join(filter(None, (what, damage_of_log(journal))))
    elif mark.crc and row is not None and row[0] != mark.crc:
        yield f"input {mark.input} is not the input that was acknowledged"


_LOG_HEADER: Final = struct.Struct(">IIIIIIII")
_FRAME_HEADER: Final = struct.Struct(">IIIIII")
_LITTLE_ENDIAN: Final = 0x377F0682  # magic number of logs with little-endian checksums


def damage_of_log(journal: Path) -> str:
    """Describe a damaged frame of the write-ahead log that intact frames follow, or return "".

    SQLite ignores the intact frames, because it reads the log only up to the first frame with a
    wrong checksum (https://www.sqlite.org/fileformat2.html, section 4.1).
    """
    log = journal.with_name(f"{journal.name}-wal")
    data = log.read_bytes() if log.is_file() else b""
    if len(data) < _LOG_HEADER.size:
        return ""
    magic, _, page, _, *salts, _, _ = _LOG_HEADER.unpack_from(data)
    order = "<" if magic == _LITTLE_ENDIAN else ">"
    size = _FRAME_HEADER.size + page
    sums = _checksum(order, data[:24], (0, 0))
    bad, follow = 0, 0
    for number, at in enumerate(range(_LOG_HEADER.size, len(data) - size + 1, size), 1):
        _, _, *own, first, second = _FRAME_HEADER.unpack_from(data, at)
        if own != salts and not bad:
            return ""  # frames of an earlier log
        expected = _checksum(order, data[at : at + 8], sums)
        expected = _checksum(order, data[at + _FRAME_HEADER.size : at + size], expected)
        sums = (first, second)
        if expected != sums:
            bad = bad or number
        elif own == salts and bad:
            follow += 1
    return f"frame {bad} of {log.name} is damaged, {follow} intact ones follow" if follow else ""


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    for one, other in struct.iter_unpack(f"{order}II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
