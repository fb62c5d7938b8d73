"""The SQLite file of a journal: made and migrated by its writer, opened by its readers."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import quote

from controlplane.journal.record import (
    FIRST_VERSION,
    RECORDS_CHECKED_SINCE,
    SCHEMA,
    SCHEMA_VERSION,
    JournalError,
)

# What SQLite says of a damaged file may itself be no text.
UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
BROKEN: Final = "check the disk and the file's owner"
WHERE: Final = "name the file journal.sqlite in a controller's state folder"
UNCHECKED: Final = "unchecked_inputs"  # up to which input rows have no checksum
UNCHECKED_FEED: Final = "unchecked_feed"
UNCHECKED_RECORDS: Final = "unchecked_records"  # the last input whose records have none
UNCHECKED_ENDED: Final = "unchecked_ended"  # when the last job ended whose row has none
TERM_FLOOR: Final = "term_floor"  # of a copy: nodes have heard of terms that it does not know
LOG_PAGES: Final = (
    8000  # of the write-ahead log, 32 MiB: a page that many commits change moves once
)
READ: Final = frozenset(str(number) for number in range(FIRST_VERSION, SCHEMA_VERSION + 1))
FREED: Final = "INCREMENTAL"  # pages that were freed are given back piece by piece


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database of a journal, made if there is none, migrated if an older release made it.

    Returns:
        A connection of its own, to be used by one thread at a time.

    Raises:
        JournalError: if it cannot be opened, or has a schema that this release cannot read.
    """
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute(f"PRAGMA auto_vacuum={FREED}")  # of a new file only
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        migrate(database)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", BROKEN) from None
    return _readable(path, database, {str(SCHEMA_VERSION)})


def migrate(database: sqlite3.Connection) -> None:
    """Bring a journal to the present schema, in one transaction: all of it or nothing.

    Rows that were written without a checksum stay without one; `meta` says up to where.

    Args:
        database: of a journal, or an empty one. One that cannot be migrated is left alone.

    Raises:
        sqlite3.Error: and nothing was changed.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_schema")}
        found = schema_of(database) if "meta" in tables else ""
        if found == "" or found in READ:
            if found == str(FIRST_VERSION):
                _add_checksums(database)
            elif found and int(found) < RECORDS_CHECKED_SINCE:
                _add_record_checksums(database)
            for statement in SCHEMA.split(";"):
                database.execute(statement)
            insert = "INSERT OR REPLACE INTO meta VALUES ('schema', ?)"
            database.execute(insert, (str(SCHEMA_VERSION),))
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _add_checksums(database: sqlite3.Connection) -> None:
    for table, number, key in (("inputs", "id", UNCHECKED), ("feed", "seq", UNCHECKED_FEED)):
        database.execute(f"ALTER TABLE {table} ADD COLUMN crc INTEGER")
        insert = f"INSERT INTO meta SELECT ?, ifnull(max({number}), 0) FROM {table}"  # noqa: S608
        database.execute(insert, (key,))


def _add_record_checksums(database: sqlite3.Connection) -> None:
    """Of the schema between: it had them of inputs and events."""
    for table in ("job_records", "ended_jobs"):
        database.execute(f"ALTER TABLE {table} ADD COLUMN crc INTEGER")
    insert = (
        "INSERT INTO meta SELECT ?, max(ifnull((SELECT max(id) FROM inputs), 0), "
        "ifnull((SELECT max(input) FROM snapshots), 0))"
    )
    database.execute(insert, (UNCHECKED_RECORDS,))
    insert = (
        "INSERT INTO meta SELECT ?, CAST(ifnull(max(ended), -1) + 1 AS INTEGER) FROM ended_jobs"
    )
    database.execute(insert, (UNCHECKED_ENDED,))


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database of a journal that is there.

    Args:
        path: of the SQLite file; one that is not there stays away.

    Returns:
        A connection of its own, to be used by one thread at a time.

    Raises:
        JournalError: if it is not there, is no journal, or has a schema that this release cannot
            read.
    """
    if not path.is_file():
        raise JournalError(f"{path}: there is no such file", WHERE)
    name = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        database = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", BROKEN) from None
    return _readable(path, database, READ)


def schema_of(database: sqlite3.Connection) -> str:
    """The number of the schema that a journal has, as it is written down.

    Raises:
        sqlite3.Error: if it is no journal.
    """
    return meta(database, "schema") or "unknown"


def meta(database: sqlite3.Connection, key: str) -> str:
    """What the journal says of itself under `key`; empty: nothing.

    Raises:
        sqlite3.Error: if it is no journal.
    """
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else ""


def _readable(
    path: Path, database: sqlite3.Connection, schemas: Collection[str]
) -> sqlite3.Connection:
    try:
        found = schema_of(database)
    except UNREADABLE as error:
        database.close()
        raise JournalError(f"{path}: {error}", f"{BROKEN}, or {WHERE}") from None
    if found not in schemas:
        database.close()
        remedy = (
            f"this release reads schemas {FIRST_VERSION} to {SCHEMA_VERSION}: use the release that "
            "wrote it, or let its jobs end there, move the file away, and start with a new one"
        )
        raise JournalError(f"{path} is of schema {found}", remedy)
    return database
