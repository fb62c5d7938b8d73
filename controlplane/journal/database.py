"""The SQLite file of a journal: made by its writer, opened by its readers."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final
from urllib.parse import quote

from controlplane.journal.record import SCHEMA, SCHEMA_VERSION, JournalError

BROKEN: Final = "check the disk and the file's owner"
WHERE: Final = "name the file journal.sqlite in a controller's state folder"


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database of a journal, made if there is none.

    Args:
        path: of the SQLite file.

    Returns:
        A connection of its own, to be used by one thread at a time.

    Raises:
        JournalError: if it cannot be opened, or a release with another schema wrote it.
    """
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.executescript(SCHEMA)
        insert = "INSERT OR IGNORE INTO meta VALUES ('schema', ?)"
        database.execute(insert, (str(SCHEMA_VERSION),))
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", BROKEN) from None
    return _of_this_release(path, database)


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database of a journal that is there.

    Args:
        path: of the SQLite file; one that is not there stays away.

    Returns:
        A connection of its own, to be used by one thread at a time.

    Raises:
        JournalError: if it is not there, is no journal, or a release with another schema wrote it.
    """
    if not path.is_file():
        raise JournalError(f"{path}: there is no such file", WHERE)
    name = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        database = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", BROKEN) from None
    return _of_this_release(path, database)


def _of_this_release(path: Path, database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.Error as error:
        database.close()
        raise JournalError(f"{path}: {error}", f"{BROKEN}, or {WHERE}") from None
    found = row[0] if row else "unknown"
    if found != str(SCHEMA_VERSION):
        database.close()
        remedy = (
            f"this release reads schema {SCHEMA_VERSION}: let its jobs end under the release that "
            "wrote it, move the file away, and start with a new one"
        )
        raise JournalError(f"{path} is of schema {found}", remedy)
    return database
