"""What a journal holds and how it is written down."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

from controlplane.core.history_records import Record
from controlplane.core.inputs import Input
from schemas.errors import OnesError
from schemas.ids import Seconds
from schemas.messages.feed import FeedEvent

SCHEMA_VERSION: Final = 5
RECORDS_CHECKED_SINCE: Final = 4  # the schema with checksums of the past of jobs
RECENT_SINCE: Final = 5  # the schema with a table of recent records
FIRST_VERSION: Final = 2  # that is read; inputs of older ones mean something else

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inputs
    (id INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL, crc INTEGER);
CREATE TABLE IF NOT EXISTS feed (seq INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER);
CREATE TABLE IF NOT EXISTS snapshots
    (input INTEGER PRIMARY KEY, at REAL NOT NULL, release TEXT NOT NULL, format INTEGER NOT NULL,
     bytes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS job_records
    (job TEXT NOT NULL, list TEXT NOT NULL, at INTEGER NOT NULL, body BLOB NOT NULL,
     crc INTEGER, PRIMARY KEY (job, list, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS recent_records
    (id INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, list TEXT NOT NULL,
     at INTEGER NOT NULL, body BLOB NOT NULL, crc INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS recent_by_job ON recent_records (job, list, at);
CREATE TABLE IF NOT EXISTS dropped_records
    (job TEXT NOT NULL, list TEXT NOT NULL, rows INTEGER NOT NULL, PRIMARY KEY (job, list))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended_jobs
    (number INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, user TEXT NOT NULL, name TEXT NOT NULL,
     state TEXT NOT NULL, key TEXT, ended REAL NOT NULL, body BLOB NOT NULL, crc INTEGER);
CREATE INDEX IF NOT EXISTS ended_jobs_by_end ON ended_jobs (ended);
CREATE INDEX IF NOT EXISTS ended_jobs_by_key ON ended_jobs (key) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS snapshot_parts
    (id INTEGER PRIMARY KEY, input INTEGER NOT NULL, body BLOB NOT NULL);
"""

_NUMBERED: Final = struct.Struct("<qd")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One input with its time, and what handling it produced."""

    at: Seconds
    input: Input
    feed: tuple[FeedEvent, ...] = ()
    records: tuple[Record, ...] = ()  # of the past of jobs


class JournalError(OnesError):
    """The journal cannot be used as it stands."""

    code = "journal"


_inputs: Final = msgspec.msgpack.Decoder(Input)
_feed: Final = msgspec.msgpack.Decoder(FeedEvent)


def input_from(body: bytes) -> Input:
    """The input that was written as `body`.

    Args:
        body: MessagePack, from the table `inputs`.

    Raises:
        ValueError: if it is none of this release.
    """
    decoded: Input = _inputs.decode(body)
    return decoded


def feed_from(body: bytes) -> FeedEvent:
    """The feed event that was written as `body`.

    Args:
        body: MessagePack, from the table `feed`.

    Raises:
        ValueError: if it is none of this release.
    """
    return _feed.decode(body)


def checksum(number: int, at: float, body: bytes) -> int:
    """Of one row, so that neither its content nor its place can change unnoticed.

    Args:
        at: its time, seconds since the epoch; 0 of an event, which has it inside.

    Returns:
        CRC-32.
    """
    return zlib.crc32(body, zlib.crc32(_NUMBERED.pack(number, at)))
