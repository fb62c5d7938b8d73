"""The past of jobs that a former release kept in memory, written down once."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Final

from controlplane.journal.database import meta, open_for_reading
from controlplane.journal.ended_jobs import EndedRow
from controlplane.journal.job_records import COMPLETE, RecordRow, insert_rows, rows_of
from controlplane.journal.reader import Reader
from controlplane.journal.record import JournalError
from controlplane.journal.replay import earliest
from controlplane.journal.take_snapshot import save_state
from schemas.ids import Seconds

AT_ONCE: Final = 5000  # rows in one transaction
AGAIN: Final = "free space there and start again: what is written already stays"


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
        raise JournalError(f"{path}: {error}", AGAIN) from None


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
