"""Snapshots of the core's state. They are encoded as MessagePack and stored in pieces.

A snapshot is complete once its row in `snapshots` exists.
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
from controlplane.journal.releases import own_release
from schemas.ids import Seconds

FORMAT: Final = 5  # number of the encoding; a new field with a default does not change it
NAN: Final = b"\xcb\x7f\xf8"  # first bytes of a NaN in MessagePack


class _Image(msgspec.Struct, kw_only=True):
    state: State
    totals: Totals = msgspec.field(default_factory=Totals)
    order: IndexOrder = msgspec.field(default_factory=IndexOrder)


_images: Final = msgspec.msgpack.Decoder(_Image)


def image_of(reactor: Reactor) -> bytes:
    """Encode the reactor as MessagePack, so that `reactor_from` can continue elsewhere.

    The reactor must be between two inputs. Of the data derived from the
    state, only the order of the slot index is included.

    Raises:
        ValueError: if the state cannot be encoded; also TypeError and OverflowError.
    """
    image = _Image(
        state=reactor.state,
        totals=reactor.totals,
        order=reactor.state.slot_index.order(),
    )
    return msgspec.msgpack.encode(image)


def reactor_from(image: bytes) -> Reactor:
    """Decode an image of this `FORMAT`. Return a reactor that continues from the encoded state.

    Raises:
        ValueError: if the image is invalid.
    """
    with _uncollected():
        found: _Image = _images.decode(image)
        try:
            found.state.slot_index.arrange(found.order)
        except (LookupError, AttributeError) as error:
            raise ValueError(f"its parts are inconsistent: {error!r}") from None
    return Reactor(found.state, found.totals)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection, which would take most of the time and free nothing here."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def copy_of(reactor: Reactor) -> Reactor:
    """Return a second reactor in the same state.

    Raises:
        ValueError: if the state cannot be encoded; also TypeError and OverflowError.
    """
    return reactor_from(image_of(reactor))


def round_trips(image: bytes, reactor: Reactor) -> bool:
    """True if `image` decodes to the complete state of `reactor`."""
    decoded = reactor_from(image)
    if (decoded.state, decoded.totals) == (reactor.state, reactor.totals):
        return True
    return NAN in image and image_of(decoded) == image  # NaN is not equal to itself


KEPT_SNAPSHOTS: Final = 2  # if the newest is damaged, the previous one and later inputs are used
PART_BYTES: Final = 1 << 20  # bytes in one transaction; commits wait meanwhile


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a snapshot."""

    input: int  # number of the last input in the snapshot
    at: Seconds  # time of that input
    release: str  # release that wrote the snapshot
    format: int  # of the encoding
    size: int  # bytes
    crc: int


def snapshots_in(database: sqlite3.Connection) -> tuple[Snapshot, ...]:
    """Return the complete snapshots, newest first."""
    select = "SELECT input, at, release, format, bytes, crc FROM snapshots ORDER BY input DESC"
    return tuple(
        Snapshot(input=number, at=at, release=release, format=kind, size=size, crc=crc)
        for number, at, release, kind, size, crc in database.execute(select)
    )


def body_of(database: sqlite3.Connection, snapshot: Snapshot) -> bytes | None:
    """Return the bytes of a snapshot, or None if the bytes are damaged."""
    select = "SELECT body FROM snapshot_parts WHERE input = ? ORDER BY id"
    body = b"".join(part for (part,) in database.execute(select, (snapshot.input,)))
    return body if (len(body), zlib.crc32(body)) == (snapshot.size, snapshot.crc) else None


def write_snapshot(database: sqlite3.Connection, number: int, at: Seconds, body: bytes) -> None:
    """Add a snapshot of the state after input `number`, handled at `at`. Delete old snapshots.

    Each piece is written in a separate transaction. Only the last transaction, which completes the
    snapshot, waits for the disk. `database` is in autocommit mode.

    Raises:
        sqlite3.Error: if there is no room; earlier snapshots are unchanged.
    """
    database.execute("PRAGMA synchronous=NORMAL")
    # pieces of an incomplete snapshot
    _drop(database, "input NOT IN (SELECT input FROM snapshots)")
    _drop(database, f"input = {number:d}")
    for begin in range(0, max(1, len(body)), PART_BYTES):
        insert = "INSERT INTO snapshot_parts (input, body) VALUES (?, ?)"
        database.execute(insert, (number, body[begin : begin + PART_BYTES]))
    database.execute("PRAGMA synchronous=FULL")
    database.execute(
        "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?)",
        (number, at, own_release(), FORMAT, len(body), zlib.crc32(body)),
    )
    database.execute("PRAGMA synchronous=NORMAL")
    for old in snapshots_in(database)[KEPT_SNAPSHOTS:]:
        database.execute("DELETE FROM snapshots WHERE input = ?", (old.input,))
    _drop(database, "input NOT IN (SELECT input FROM snapshots)")


def _drop(database: sqlite3.Connection, which: str) -> None:
    select = f"SELECT id FROM snapshot_parts WHERE {which}"  # noqa: S608
    for (part,) in database.execute(select).fetchall():
        database.execute("DELETE FROM snapshot_parts WHERE id = ?", (part,))
