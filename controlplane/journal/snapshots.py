"""Snapshots of the state in a journal: written in pieces, whole when their row is there."""

from __future__ import annotations

import sqlite3
import zlib
from typing import Final

import msgspec

from controlplane.journal.state_image import FORMAT
from schemas import __version__
from schemas.ids import Seconds

KEPT: Final = 2  # one that is damaged has the one before, and the inputs since
PART_BYTES: Final = 1 << 20  # written at a time: whoever commits waits for no more


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The stamp of a snapshot."""

    input: int  # number of the last input that is in it
    at: Seconds  # the time of that
    release: str  # that wrote it
    format: int  # of its bytes
    size: int  # bytes
    crc: int


def snapshots_in(database: sqlite3.Connection) -> tuple[Snapshot, ...]:
    """Those that are whole, the newest first.

    Raises:
        sqlite3.Error: if they cannot be read.
    """
    select = "SELECT input, at, release, format, bytes, crc FROM snapshots ORDER BY input DESC"
    return tuple(
        Snapshot(input=number, at=at, release=release, format=kind, size=size, crc=crc)
        for number, at, release, kind, size, crc in database.execute(select)
    )


def body_of(database: sqlite3.Connection, snapshot: Snapshot) -> bytes | None:
    """The bytes of a snapshot; None: they are not those that were written.

    Raises:
        sqlite3.Error: if they cannot be read.
    """
    select = "SELECT body FROM snapshot_parts WHERE input = ? ORDER BY id"
    body = b"".join(part for (part,) in database.execute(select, (snapshot.input,)))
    return body if (len(body), zlib.crc32(body)) == (snapshot.size, snapshot.crc) else None


def write_snapshot(database: sqlite3.Connection, number: int, at: Seconds, body: bytes) -> None:
    """Add a snapshot, and drop those that it makes needless.

    Each piece is a transaction of its own; only the last one waits for the disk, and it alone makes
    a snapshot of them.

    Args:
        database: of a journal, a connection in autocommit mode.
        number: of the last input that is in it.
        at: the time of that, seconds since the epoch.

    Raises:
        sqlite3.Error: if there is no room; what was there before is there still.
    """
    database.execute("PRAGMA synchronous=NORMAL")
    _drop(database, "input NOT IN (SELECT input FROM snapshots)")  # pieces of a broken one
    _drop(database, f"input = {number:d}")
    for begin in range(0, max(1, len(body)), PART_BYTES):
        insert = "INSERT INTO snapshot_parts (input, body) VALUES (?, ?)"
        database.execute(insert, (number, body[begin : begin + PART_BYTES]))
    database.execute("PRAGMA synchronous=FULL")
    database.execute(
        "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
        (number, at, __version__, FORMAT, len(body), zlib.crc32(body)),
    )
    database.execute("PRAGMA synchronous=NORMAL")
    for old in snapshots_in(database)[KEPT:]:
        database.execute("DELETE FROM snapshots WHERE input = ?", (old.input,))
    _drop(database, "input NOT IN (SELECT input FROM snapshots)")


def _drop(database: sqlite3.Connection, which: str) -> None:
    select = f"SELECT id FROM snapshot_parts WHERE {which}"  # noqa: S608
    for (part,) in database.execute(select).fetchall():
        database.execute("DELETE FROM snapshot_parts WHERE id = ?", (part,))
