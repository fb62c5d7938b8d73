"""SQLite file of a journal, with its schema, connections and checksums."""

from __future__ import annotations

import secrets
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from controlplane.core.history import Record
from controlplane.core.inputs import Input
from schemas.errors import OnesError
from schemas.ids import Seconds
from schemas.wire import union_of
from schemas.wire.feed import FeedEvent

SCHEMA_VERSION: Final = 7

SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE inputs
    (id INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE feed
    (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE snapshots
    (input INTEGER PRIMARY KEY, at REAL NOT NULL, release TEXT NOT NULL, format INTEGER NOT NULL,
     bytes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE job_records
    (job TEXT NOT NULL, list TEXT NOT NULL, at INTEGER NOT NULL, body BLOB NOT NULL,
     crc INTEGER NOT NULL, PRIMARY KEY (job, list, at)) WITHOUT ROWID;
CREATE TABLE recent_records
    (id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, list TEXT NOT NULL,
     at INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE UNIQUE INDEX recent_by_job ON recent_records (job, list, at);
CREATE TABLE dropped_records
    (job TEXT NOT NULL, list TEXT NOT NULL, rows INTEGER NOT NULL, PRIMARY KEY (job, list))
    WITHOUT ROWID;
CREATE TABLE ended_jobs
    (number INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, user TEXT NOT NULL, name TEXT NOT NULL,
     state TEXT NOT NULL, key TEXT, ended REAL NOT NULL, body BLOB NOT NULL,
     crc INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE INDEX ended_jobs_by_user ON ended_jobs (user, bytes);
CREATE INDEX ended_jobs_by_end ON ended_jobs (ended);
CREATE INDEX ended_jobs_by_key ON ended_jobs (key) WHERE key IS NOT NULL;
CREATE TABLE usage
    (number INTEGER NOT NULL, job TEXT NOT NULL, user TEXT NOT NULL, project TEXT NOT NULL,
     slots INTEGER NOT NULL, begin REAL NOT NULL, end REAL NOT NULL);
CREATE INDEX usage_by_end ON usage (end);
CREATE INDEX usage_by_user ON usage (user, end);
CREATE INDEX usage_by_number ON usage (number);
CREATE TABLE snapshot_parts
    (id INTEGER PRIMARY KEY, input INTEGER NOT NULL, body BLOB NOT NULL);
"""

_NUMBERED: Final = struct.Struct("<qd")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Input with its time, and the events and records that its handler produced."""

    at: Seconds
    input: Input
    feed: tuple[FeedEvent, ...] = ()
    records: tuple[Record, ...] = ()  # for the history of jobs
    jobs: int = 0  # number of jobs accepted so far
    body: bytes = b""  # the encoded input if it is known: encoding a set again changes its order


class JournalError(OnesError):
    """Raised when a journal cannot be used in its present condition."""

    code = "journal"


_inputs: Final = msgspec.msgpack.Decoder(union_of(Input))
_feed: Final = msgspec.msgpack.Decoder(FeedEvent)


def input_from(body: bytes) -> Input:
    """Decode an input from MessagePack, as stored in table `inputs`.

    Raises:
        ValueError: if this release does not know the input.
    """
    decoded: Input = _inputs.decode(body)
    return decoded


def feed_from(body: bytes) -> FeedEvent:
    """Decode a feed event from MessagePack, as stored in table `feed`.

    Raises:
        ValueError: if this release does not know the event.
    """
    return _feed.decode(body)


def checksum(number: int, at: float, body: bytes) -> int:
    """Return the CRC-32 of a row's number, time and content.

    `at` is the row's time in seconds since the epoch. It is 0 for a feed event, because the body of
    an event includes the time.
    """
    return zlib.crc32(body, zlib.crc32(_NUMBERED.pack(number, at)))


# SQLite's error message about a damaged file is not always valid text.
UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError, MemoryError)  # the last: a damaged length
CHECK_DISK: Final = "check the disk and the file's owner"
NAME_JOURNAL: Final = "name the file journal.sqlite in a controller's state folder"
JOURNAL_ID: Final = "journal"  # random; a restored copy gets a new one
TERM_FLOOR: Final = "term_floor"  # set in a restored copy, because nodes might know later terms
# Pages of the write-ahead log, 32 MiB. A page that many commits change is copied only once.
LOG_PAGES: Final = 8000
AUTO_VACUUM: Final = "INCREMENTAL"  # freed pages are returned piece by piece


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database of a journal. Create the file if necessary.

    Only one thread at a time may use the connection.

    Raises:
        JournalError: if the database cannot be opened, or has another schema.
    """
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute(f"PRAGMA auto_vacuum={AUTO_VACUUM}")  # affects new files only
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        _create_tables(database)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", CHECK_DISK) from None
    return _with_known_schema(path, database)


def new_id() -> str:
    """Return the id of a new journal, 16 hexadecimal digits."""
    return secrets.token_hex(8)


def _create_tables(database: sqlite3.Connection) -> None:
    """Create the tables of an empty database in one transaction. Skip a database with tables.

    Raises:
        sqlite3.Error: if the disk fails; the database is then unchanged.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        new = not database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchone()
        if new:
            for statement in SCHEMA.split(";"):
                database.execute(statement)
            insert = "INSERT INTO meta VALUES ('schema', ?)"
            database.execute(insert, (str(SCHEMA_VERSION),))
        if not meta(database, JOURNAL_ID):
            database.execute("INSERT INTO meta VALUES (?, ?)", (JOURNAL_ID, new_id()))
        database.execute("COMMIT")
        if new:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # moves the tables out of the log
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database of an existing journal.

    Only one thread at a time may use the connection. A missing file is not created.

    Raises:
        JournalError: if the file is missing, is not a journal, or has another schema.
    """
    if not path.is_file():
        raise JournalError(f"{path}: there is no such file", NAME_JOURNAL)
    name = f"file:{quote(str(path.absolute()))}?mode=rw"
    try:
        database = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", CHECK_DISK) from None
    return _with_known_schema(path, database)


def meta(database: sqlite3.Connection, key: str) -> str:
    """Return the journal's metadata for `key`, or an empty string if the key is missing."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else ""


def _with_known_schema(path: Path, database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        found = meta(database, "schema") or "unknown"
    except UNREADABLE as error:
        database.close()
        raise JournalError(f"{path}: {error}", f"{CHECK_DISK}, or {NAME_JOURNAL}") from None
    if found != str(SCHEMA_VERSION):
        database.close()
        remedy = (
            f"this release reads schema {SCHEMA_VERSION}: use the release that wrote it, "
            "or let its jobs end there, move the file away, and start with a new one"
        )
        raise JournalError(f"{path} has schema {found}", remedy)
    return database


POSITION_BITS: Final = 16  # low bits of a position: the record's place within its input
DAMAGED: Final = "restore a backup (`ones admin restore`); `ones admin check` lists all damage"
MAX_DAMAGED_ROWS: Final = 1000  # maximum number of damaged rows that are remembered
FIELDS: Final = "number, job, user, name, state, key, ended, body"  # of `ended_jobs`
RECORD_TABLES: Final = ("job_records", "recent_records")  # a record can be in both


def record_checksum(job: str, name: str, at: int, body: bytes) -> int:
    """Return the CRC-32 of the key and the content of a row of `job_records`."""
    return zlib.crc32(body, zlib.crc32(f"{job}\0{name}\0{at}".encode()))


def ended_checksum(row: Sequence[Any]) -> int:
    """Return the CRC-32 of all fields of an `ended_jobs` row, since lists filter by each field."""
    return zlib.crc32(row[-1], zlib.crc32(repr((*row[:-1],)).encode()))


class RowChecks:
    """Verification of rows of the job history. It remembers the damaged rows.

    Args:
        on_damage: called once for each damaged row, with the row's name.
    """

    def __init__(
        self, database: sqlite3.Connection, on_damage: Callable[[str], None] = lambda _: None
    ) -> None:
        self._database, self._on_damage = database, on_damage
        self._damaged: dict[tuple[str, str], None] = {}  # (job, row)

    def is_intact_record(self, job: str, name: str, at: int, body: bytes, crc: int) -> bool:
        """True if a row of `job_records` is intact. A damaged row is reported."""
        good = isinstance(body, bytes) and crc == record_checksum(job, name, at, body)
        if not good:
            self.damaged(job, _record_name(job, name, at))
        return good

    def is_intact_ended_job(self, row: Sequence[Any], crc: int) -> bool:
        """True if a row of `ended_jobs` is intact. A damaged row is reported."""
        good = isinstance(row[-1], bytes) and crc == ended_checksum(row)
        if not good:
            self.damaged(row[1], f"ended job {row[1]}")
        return good

    def damaged(self, job: str, what: str) -> None:
        """Report a damaged row, unless it was reported before."""
        if (job, what) not in self._damaged and len(self._damaged) < MAX_DAMAGED_ROWS:
            self._damaged[job, what] = None
            self._on_damage(what)

    def damage_of(self, job: str) -> tuple[str, ...]:
        """Return the names of a job's damaged rows that have been found so far."""
        return tuple(what for name, what in self._damaged if name == job)

    def problems(self) -> Iterator[str]:
        """Yield a description of every damaged row of the job history."""
        columns = "job, list, at, body, crc"
        select = " UNION ".join(f"SELECT {columns} FROM {table}" for table in RECORD_TABLES)  # noqa: S608
        for job, name, at, body, crc in self._database.execute(select):
            if not self.is_intact_record(job, name, at, body, crc):
                yield f"{_record_name(job, name, at)}: wrong checksum"
        for *row, crc in self._database.execute(f"SELECT {FIELDS}, crc FROM ended_jobs"):  # noqa: S608
            if not self.is_intact_ended_job(row, crc):
                yield f"ended job {row[1]}: wrong checksum"


def _record_name(job: str, name: str, at: Any) -> str:
    """Return the name of a record, whose columns may be damaged, for messages."""
    number = at >> POSITION_BITS if isinstance(at, int) else "unknown"
    return f"{name} of {job}, record of input {number}"
