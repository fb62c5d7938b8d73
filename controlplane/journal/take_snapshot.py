"""Write the state into the journal: at the end of a process that has it, or by one that replays.

`python -P -m controlplane.journal.take_snapshot FILE` is the latter, a child of the controller:
what takes long happens beside the loop, and by the way it shows that the journal tells the state.

The past of jobs that a former release kept in memory, written down once.
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
from controlplane.journal.database import JournalError, meta, open_for_reading
from controlplane.journal.ended import EndedRow
from controlplane.journal.reader import Reader
from controlplane.journal.records import COMPLETE, RecordRow, insert_rows, rows_of
from controlplane.journal.replay import earliest, recover
from controlplane.journal.snapshots import gives_back, image_of, write_snapshot
from schemas.ids import Seconds

NICE: Final = 15  # training and the controller come first
FAST: Final = 1  # zlib's level
AGAIN: Final = "free space or mend what it says; until then restarts read more inputs"


def save_state(path: Path, reactor: Reactor, number: int, at: Seconds) -> None:
    """Write the state of `reactor` into the journal, if it can be read back.

    Args:
        path: of the journal, whoever writes it beside.
        reactor: after input `number`, which is durable.
        at: the time of that, seconds since the epoch.

    Raises:
        JournalError: if it cannot be written, or would not be read back as it is.
    """
    try:
        image = image_of(reactor)
        if not gives_back(image, reactor):
            raise JournalError(f"{path}: the state is not read back as it is written", AGAIN)
        with contextlib.closing(open_for_reading(path)) as database:
            write_snapshot(database, number, at, zlib.compress(image, FAST))
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise JournalError(f"{path}: no snapshot of input {number}: {error}", AGAIN) from None


def take_snapshot(path: Path) -> int:
    """Replay what came since the last snapshot, and write the next one.

    Args:
        path: of the journal, whoever writes it beside.

    Returns:
        The number of the last input in the snapshot; 0: another process takes one just now.

    Raises:
        JournalError: if the journal is damaged, or there is no room.
        CoreError: if its inputs are none that this release could have taken.
    """
    with _alone(path) as alone:
        if not alone:
            return 0
        with contextlib.closing(Reader(path)) as reader:
            found = recover(reader)
        if found.last > found.snapshot:
            save_state(path, found.reactor, found.last, found.at)
        return found.last


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    lock = os.open(path.with_suffix(".snapshot.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def main() -> None:
    """Take one; exit code 1 and the reason on standard error if that cannot be."""
    os.nice(NICE)
    setproctitle(f"ones: snapshot of {sys.argv[1]}")
    try:
        taken = take_snapshot(Path(sys.argv[1]))
    except (JournalError, CoreError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    sys.stdout.write(f"{taken}\n")


if __name__ == "__main__":
    main()


AT_ONCE: Final = 5000  # rows in one transaction
RETRY_S: Final = "free space there and start again: what is written already stays"


def complete_records(path: Path, reader: Reader) -> None:
    """Write the records of all inputs, if that was never done; those of new ones come with them.

    It replays what is kept of the journal, and leaves a snapshot of the state that this comes to.

    Args:
        path: of the journal; nobody appends to it meanwhile.

    Raises:
        JournalError: if the journal is damaged, or there is no room.
        CoreError: if its inputs are none that this release could have taken.
    """
    try:
        with contextlib.closing(open_for_reading(path)) as database:
            if not meta(database, COMPLETE):
                _complete(path, database, reader)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", RETRY_S) from None


def _complete(path: Path, database: sqlite3.Connection, reader: Reader) -> None:
    reactor, first = earliest(reader)
    last, at = first, Seconds(0.0)
    rows: list[tuple[int, RecordRow | EndedRow]] = []
    for number, when, event in reader.numbered_inputs(first):
        reactor.handle(event, when)
        rows += [(number, row) for row in rows_of(reactor.records)]
        last, at = number, when
        if len(rows) >= AT_ONCE:
            _write(database, rows)
            rows = []
    _write(database, rows)
    database.execute("INSERT OR REPLACE INTO meta VALUES (?, '1')", (COMPLETE,))
    if last > first:
        save_state(path, reactor, last, at)


def _write(database: sqlite3.Connection, rows: list[tuple[int, RecordRow | EndedRow]]) -> None:
    database.execute("BEGIN IMMEDIATE")
    insert_rows(database, rows)
    database.execute("COMMIT")
