"""Deletion of old journal rows in small pieces."""

from __future__ import annotations

import math
import sqlite3
from collections import deque
from typing import Final

import msgspec

from controlplane.journal.database import feed_from
from controlplane.journal.ended import forget_ended, forget_usage, largest_user
from controlplane.journal.records import drop_oldest
from controlplane.journal.snapshots import KEPT_SNAPSHOTS, snapshots_in
from schemas.ids import JobId, Seconds

JOBS_PER_CHECK: Final = 4  # number of jobs with lists checked between two commits
ENDED_JOBS_PER_PIECE: Final = 50  # ended jobs deleted in one transaction
SHARED_JOBS_PER_PIECE: Final = 10  # the same, before the shares of the users are compared again
PIECE: Final = 2000  # rows deleted in one transaction
FREE_SHARE: Final = 0.25  # share of the file that stays free for later use
FREED_PAGES: Final = 1000  # pages returned in one transaction


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for the rows that a journal keeps."""

    inputs_s: float  # age of inputs in seconds; inputs that a restart may need are always kept
    events_s: float  # age of feed events in seconds
    used_bytes: int  # size of the used pages; above this limit younger rows are deleted, too
    jobs_s: float = math.inf  # age of ended jobs with their history in seconds
    records: int = 1 << 62  # number of latest records kept in each list of a job


def forget(database: sqlite3.Connection, keep: Retention, now: Seconds) -> int:
    """Delete the next piece of expired rows, and return the number of deleted rows and jobs.

    Inputs are deleted up to the second newest snapshot, so that damage to the newest snapshot
    loses nothing. If the file is still too large, data of the user with the most bytes are deleted:
    first this user's ended jobs, then the records of this user's slot usage. `database` is in
    autocommit mode. `now` is in seconds since the epoch.
    """
    crowded = used_bytes(database) > keep.used_bytes
    deleted = _forget_inputs(database, float("inf") if crowded else now - keep.inputs_s)
    deleted += _forget_events(database, now - keep.events_s)
    deleted += len(forget_ended(database, before=now - keep.jobs_s, most=ENDED_JOBS_PER_PIECE))
    deleted += forget_usage(database, now - keep.jobs_s, PIECE)
    if not deleted and crowded:
        deleted = _forget_events(database, float("inf"))
    if not deleted and crowded:
        most = largest_user(database)
        deleted = len(forget_ended(database, math.inf, most, SHARED_JOBS_PER_PIECE))
        deleted = deleted or forget_usage(database, math.inf, PIECE, most)
    if not deleted:
        _shrink(database)
    return deleted


def forget_records(database: sqlite3.Connection, jobs: deque[JobId], keep: Retention) -> None:
    """Delete the next piece of the job histories that exceed the limit of records.

    `database` is in autocommit mode. Jobs within the limit are removed from `jobs`.
    """
    for _ in range(min(JOBS_PER_CHECK, len(jobs))):
        if drop_oldest(database, jobs[0], keep.records, PIECE):
            return
        jobs.popleft()


def used_bytes(database: sqlite3.Connection) -> int:
    """Return the size of the file's used pages in bytes."""
    return (_pragma(database, "page_count") - _pragma(database, "freelist_count")) * _pragma(
        database, "page_size"
    )


def _forget_inputs(database: sqlite3.Connection, before: float) -> int:
    snapshots = snapshots_in(database)
    if len(snapshots) < KEPT_SNAPSHOTS:
        return 0
    covered = snapshots[KEPT_SNAPSHOTS - 1].input
    delete = (
        "DELETE FROM inputs WHERE id IN "
        "(SELECT id FROM inputs WHERE id <= ? AND at < ? ORDER BY id LIMIT ?)"
    )
    first = database.execute("SELECT at FROM inputs ORDER BY id LIMIT 1").fetchone()
    if first is None or first[0] >= before:
        return 0
    return database.execute(delete, (covered, before, PIECE)).rowcount


def _forget_events(database: sqlite3.Connection, before: float) -> int:
    """Delete the oldest `PIECE` events if all are old enough. Return the number of deletions."""
    select = "SELECT seq, body FROM feed ORDER BY seq LIMIT 1 OFFSET ?"
    row = database.execute(select, (PIECE,)).fetchone()
    if row is None or feed_from(row[1]).time >= before:
        return 0
    return database.execute("DELETE FROM feed WHERE seq < ?", (row[0],)).rowcount


def _shrink(database: sqlite3.Connection) -> None:
    """Return free pages to the file system, except a share for later use."""
    free, pages = _pragma(database, "freelist_count"), _pragma(database, "page_count")
    if free > FREE_SHARE * pages:
        database.executescript(f"PRAGMA incremental_vacuum({FREED_PAGES})")  # a step for each page


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])
