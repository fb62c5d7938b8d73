"""Snapshot process, which replays a journal and writes the resulting state into the journal.

Run as `python -P -m controlplane.journal.take_snapshot FILE [LAST]`, as a child of the controller,
so that the event loop does not wait. The replay also proves that the journal reproduces the state.
A controller that stops writes the snapshot in its own process. Later releases run this module of
an earlier release with the number of that release's last input, so its arguments do not change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from setproctitle import setproctitle

from controlplane.core.commands import CoreError
from controlplane.core.reactor import Reactor
from controlplane.journal.database import JournalError, open_for_reading
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover
from controlplane.journal.snapshots import image_of, round_trips, write_snapshot
from schemas.ids import Seconds

NICENESS: Final = 15  # training and the controller come first
ZLIB_LEVEL: Final = 1
LOCK_SUFFIX: Final = ".snapshot.lock"
SNAPSHOT_REMEDY: Final = "free space or fix the cause; until then restarts read more inputs"


def save_state(path: Path, reactor: Reactor, number: int, at: Seconds) -> None:
    """Write the state of `reactor` into the journal, after a check that the state can be read back.

    Input `number`, handled at `at`, is the last input in the state and is durable. Another
    process may be writing the journal at the same time.

    Raises:
        JournalError: if the state cannot be written, or would not be read back equal.
    """
    try:
        image = image_of(reactor)
        if not round_trips(image, reactor):
            raise JournalError(f"{path}: the state does not read back as written", SNAPSHOT_REMEDY)
        with contextlib.closing(open_for_reading(path)) as database:
            write_snapshot(database, number, at, zlib.compress(image, ZLIB_LEVEL))
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")  # moves the commits out of the log
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise JournalError(
            f"{path}: no snapshot of input {number}: {error}", SNAPSHOT_REMEDY
        ) from None


def take_snapshot(path: Path, last: int | None = None) -> int:
    """Replay the inputs since the last snapshot up to number `last`, and write the next one.

    Return the number of the last input in the snapshot, or 0 if another process is taking one.
    Another process may be writing inputs at the same time.

    Raises:
        JournalError: if the journal is damaged, or there is no room.
        CoreError: if this release cannot handle the inputs.
    """
    with contextlib.closing(Reader(path)) as reader:
        _, newest = reader.first_and_last()  # what arrives later is left to the next snapshot
        most = last if last is not None else newest or None
        found = recover(reader, most=most)  # without the lock, which a child may need for this
    with _exclusive(path) as alone:
        if not alone:
            return 0
        if found.last > found.snapshot:
            save_state(path, found.reactor, found.last, found.at)
        return found.last


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    lock = os.open(path.with_suffix(LOCK_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def main() -> None:
    """Take a snapshot. On failure, print the reason to standard error and exit with code 1."""
    os.nice(NICENESS)
    setproctitle(f"ones: snapshot of {sys.argv[1]}")
    try:
        journal, *last = sys.argv[1:]
        taken = take_snapshot(Path(journal), int(last[0]) if last else None)
    except (JournalError, CoreError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    sys.stdout.write(f"{taken}\n")


if __name__ == "__main__":
    main()
