"""The past of jobs, in the order in which it came, merged little by little into the order of jobs.

A record that is written where its job's others are touches a page of its own: 4 KiB of log and of
file for some hundred bytes. So a record is first written behind the last one, whatever its job
(`recent_records`), and moves later with those of its job that came meanwhile, for one page: the
rolling merge of an LSM-tree of two levels (O'Neil et al., 1996, section 2.1), with the younger one
on the disk as well, since a record is durable with its input. Each commit merges twice as many as
it adds, in its own transaction: nobody waits for a merge, none goes on while nothing happens, and
the younger level has at most twice `LEAST`.

A pass goes through the jobs and copies; what it copied is deleted afterwards from the oldest on,
which frees whole pages. Meanwhile a record is there twice, and is read once (`UNION`). So a pass
needs nothing of the one before: one that was cut off begins again. Numbers of records are never
used again (`AUTOINCREMENT`): those up to the one that was last when the pass began are its own,
whatever was deleted since.
"""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from schemas.ids import JobId

LEAST: Final = 65_536  # records of the younger level, before a pass begins
SHARE: Final = 2  # records that are merged for each one that is added

_ENDS: Final = (
    "SELECT ifnull((SELECT min(id) FROM recent_records), 0), "
    "ifnull((SELECT max(id) FROM recent_records), 0)"
)
_KEY: Final = (
    "SELECT job, list, at FROM recent_records WHERE (job, list, at) > (?, ?, ?) AND id <= ? "
    "ORDER BY job, list, at LIMIT 1 OFFSET ?"
)
_COPY: Final = (
    "INSERT OR IGNORE INTO job_records SELECT job, list, at, body, crc FROM recent_records "
    "WHERE (job, list, at) > (?, ?, ?) AND id <= ? ORDER BY job, list, at LIMIT ?"
)
_COPY_LIST: Final = (
    "INSERT OR IGNORE INTO job_records SELECT job, list, at, body, crc FROM recent_records "
    "WHERE job = ? AND list = ? ORDER BY at"
)


class Pass(NamedTuple):
    """How far a pass has come."""

    upto: int = 0  # the last record that it takes, by its arrival; 0: none goes on
    behind: tuple[str, str, int] | None = None  # job, list, position copied last; None: all are


IDLE: Final = Pass()
_FIRST: Final = ("", "", -1)


def merge(database: sqlite3.Connection, done: Pass, added: int) -> Pass:
    """Do the share of the present transaction.

    Args:
        database: of the journal, within a transaction that added records.
        added: how many records this one added.

    Returns:
        How far it is when this transaction is committed.

    Raises:
        sqlite3.Error: if it cannot be written.
    """
    if not added:
        return done
    oldest, newest = database.execute(_ENDS).fetchone()
    if done == IDLE:
        if newest - oldest < LEAST:
            return IDLE
        done = Pass(newest, _FIRST)
    most = SHARE * added
    if done.behind is not None:
        return _copied(database, done.upto, done.behind, most)
    last = min(done.upto, oldest + most - 1)
    database.execute("DELETE FROM recent_records WHERE id <= ?", (last,))
    return IDLE if last == done.upto else done


def _copied(
    database: sqlite3.Connection, upto: int, behind: tuple[str, str, int], most: int
) -> Pass:
    last = database.execute(_KEY, (*behind, upto, most - 1)).fetchone()
    database.execute(_COPY, (*behind, upto, most))
    return Pass(upto, last)


def settle(database: sqlite3.Connection, job: JobId, name: str) -> None:
    """Have all records of one list in the older level, within a transaction of the caller's.

    Args:
        job: may be unknown.

    Raises:
        sqlite3.Error: if it cannot be written.
    """
    database.execute(_COPY_LIST, (job, name))
    database.execute("DELETE FROM recent_records WHERE job = ? AND list = ?", (job, name))
