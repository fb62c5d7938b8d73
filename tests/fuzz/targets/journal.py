"""A journal that the disk damaged: it is read as it was written, or the damage is told."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from controlplane.core.commands import CoreError
from controlplane.journal.database import JournalError, feed_from, input_from
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover
from controlplane.journal.snapshots import image_of, reactor_from
from schemas.codec import encode
from tests.fuzz.choices import Choices
from tests.fuzz.targets.folders import base

GOLDEN: Final = Path(__file__).parents[2] / "golden" / "journal"
FILES: Final = tuple(sorted(path.name for path in GOLDEN.glob("*.sqlite")))


@cache
def _rows(name: str, table: str) -> tuple[bytes, ...]:
    database = sqlite3.connect(f"file:{GOLDEN / name}?mode=ro&immutable=1", uri=True)
    with contextlib.closing(database):
        return tuple(body for (body,) in database.execute(f"SELECT body FROM {table}"))  # noqa: S608


def _damaged(choices: Choices, whole: bytes) -> bytes:
    found = bytearray(whole)
    for _ in range(1 + choices.below(4)):
        at, how = choices.below(len(found)), choices.below(4)
        if how == 0:
            del found[at:]
        elif how == 1:
            found[at:at] = choices.take(choices.below(8))
        else:
            found[at] = choices.below(256)
        if not found:
            break
    return bytes(found)


def rows(data: bytes) -> None:
    """Inputs, feed events and snapshots: bytes become what can be written again, or `ValueError`."""
    choices = Choices(data)
    name = choices.pick(FILES)
    match choices.below(4):
        case 0:
            with contextlib.suppress(ValueError):
                encode(feed_from(_damaged(choices, choices.pick(_rows(name, "feed")))))
        case 1 if parts := _rows(name, "snapshot_parts"):
            image = zlib.decompress(b"".join(parts))
            with contextlib.suppress(ValueError):
                image_of(reactor_from(_damaged(choices, image)))
        case _:
            with contextlib.suppress(ValueError):
                event = input_from(_damaged(choices, choices.pick(_rows(name, "inputs"))))
                with contextlib.suppress(OverflowError):
                    msgspec.msgpack.encode(event)


def files(data: bytes) -> None:
    """A file whose bytes were exchanged is read, or its damage is told: no other error comes of it."""
    choices = Choices(data)
    path = base() / "journal.sqlite"
    for beside in base().glob("journal.sqlite*"):
        beside.unlink()
    whole = bytearray((GOLDEN / choices.pick(FILES)).read_bytes())
    for _ in range(1 + choices.below(6)):
        at = choices.below(1 << 20) % len(whole)
        piece = choices.take(1 + choices.below(16))
        whole[at : at + len(piece)] = piece
    if not choices.often():
        del whole[choices.below(1 << 20) % len(whole) :]
    path.write_bytes(whole)
    try:
        reader = Reader(path)
    except JournalError:
        return
    with contextlib.closing(reader):
        with contextlib.suppress(JournalError, CoreError):
            recover(reader)
        with contextlib.suppress(JournalError):
            list(reader.problems())
        with contextlib.suppress(JournalError):
            reader.feed(1, 1000)
