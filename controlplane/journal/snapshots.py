"""Snapshots of the state in a journal: written in pieces, whole when their row is there.

The core's whole state as bytes and back: what a replay of all inputs up to there would give.
"""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Final

import msgspec

from controlplane.core.reactor import Reactor
from controlplane.core.slot_index import IndexOrder
from controlplane.core.state import State, Totals
from schemas import __version__
from schemas.ids import Seconds

FORMAT: Final = 2  # of the bytes; a field with a default may be added without a new one
NAN: Final = b"\xcb\x7f\xf8"  # as a number begins that is none


class _Image(msgspec.Struct, kw_only=True):
    state: State
    totals: Totals = msgspec.field(default_factory=Totals)
    order: IndexOrder = msgspec.field(default_factory=IndexOrder)


_images: Final = msgspec.msgpack.Decoder(_Image)


def image_of(reactor: Reactor) -> bytes:
    """Everything that `reactor` needs to go on elsewhere.

    Args:
        reactor: between two inputs; it is only read.

    Returns:
        MessagePack. What is derived from the state is not in it, but for its order.

    Raises:
        ValueError: if the state has something that cannot be written down, and so for whatever else
            is wrong with it (TypeError, OverflowError).
    """
    image = _Image(
        state=reactor.state,
        totals=reactor.totals,
        order=reactor.state.slot_index.order(),
    )
    return msgspec.msgpack.encode(image)


def reactor_from(image: bytes) -> Reactor:
    """A reactor that goes on where another one was.

    Args:
        image: as `image_of` made it, in this `FORMAT`.

    Raises:
        ValueError: if it is none.
    """
    with _uncollected():
        found: _Image = _images.decode(image)
        try:
            found.state.slot_index.arrange(found.order)
        except (LookupError, AttributeError) as error:
            raise ValueError(f"its parts do not fit together: {error!r}") from None
    return Reactor(found.state, found.totals)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that is made here is garbage: to look for it takes most of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def copy_of(reactor: Reactor) -> Reactor:
    """A second reactor in the same state.

    Args:
        reactor: between two inputs; it is only read.

    Raises:
        ValueError: if the state cannot be written down, and so TypeError and OverflowError.
    """
    return reactor_from(image_of(reactor))


def gives_back(image: bytes, reactor: Reactor) -> bool:
    """Whether an image is of the state of `reactor`, and of all of it."""
    again = reactor_from(image)
    if (again.state, again.totals) == (reactor.state, reactor.totals):
        return True
    return NAN in image and image_of(again) == image  # a number that is none equals nothing


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
