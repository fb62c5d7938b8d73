"""Jobs that have left the state: the last that is known of each, one row."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from controlplane.core.history_records import JobLeft
from controlplane.core.model.job import Job, JobOwner, number_of
from controlplane.journal.database import UNREADABLE
from controlplane.journal.record import JournalError
from controlplane.journal.row_checks import DAMAGED, FIELDS, RowChecks, ended_checksum
from schemas.ids import JobId, Seconds

PAGE: Final = 500  # rows read at a time
INSERT: Final = "INSERT OR REPLACE INTO ended_jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class _Owned(msgspec.Struct):
    """What of a job says whose it is: to read no more is ten times as fast."""

    project: str = ""


_jobs: Final = msgspec.msgpack.Decoder(Job)
_owned: Final = msgspec.msgpack.Decoder(_Owned)


class EndedRow(NamedTuple):
    """A job that left, as it is written."""

    number: int  # its place among all that were accepted
    job: JobId
    user: str
    name: str
    state: str
    key: str | None
    ended: Seconds
    body: bytes


class EndedJob(NamedTuple):
    """What lists are chosen by; the rest is decoded when it is asked for."""

    number: int
    job: JobId
    user: str
    name: str
    state: str
    owner: Callable[[], JobOwner]
    read: Callable[[], Job]  # raises a JournalError if the row is damaged


def ended_row(record: JobLeft) -> EndedRow:
    """A job that left, encoded.

    Raises:
        ValueError: if it cannot be written down, and so TypeError and OverflowError.
    """
    job = record.last
    return EndedRow(
        number_of(job.job),
        job.job,
        job.user,
        job.spec.name,
        job.phase.value,
        job.key or None,
        Seconds(float(job.accounting.since)),
        msgspec.msgpack.encode(job),
    )


def insert_ended(database: sqlite3.Connection, rows: Iterable[EndedRow]) -> None:
    """Write jobs that left, within a transaction of the caller's.

    Raises:
        sqlite3.Error: if they cannot be written.
    """
    database.executemany(INSERT, [(*row, ended_checksum(row)) for row in rows])


def forget_ended(
    database: sqlite3.Connection, before: float = 0.0, keep: int | None = None, most: int = 100
) -> tuple[JobId, ...]:
    """Drop the oldest jobs that left, with their past; in a transaction of its own.

    Args:
        database: of the journal, a connection in autocommit mode that may write.
        before: those that ended before, seconds since the epoch.
        keep: and those that were accepted before so many of the latest; None: nobody for that.
        most: of them at a time: whoever commits waits for no more.

    Returns:
        Which ones; none if nothing is left to drop.

    Raises:
        sqlite3.Error: if it cannot be done; nothing was dropped.
    """
    (last,) = database.execute("SELECT max(number) FROM ended_jobs").fetchone()
    beyond = 0 if keep is None or last is None else last - keep
    select = "SELECT number, job FROM ended_jobs WHERE number <= ? ORDER BY number LIMIT ?"
    found = database.execute(select, (beyond, most)).fetchall()
    if not found:
        select = "SELECT number, job FROM ended_jobs WHERE ended < ? ORDER BY ended LIMIT ?"
        found = database.execute(select, (before, most)).fetchall()
    if not found:
        return ()
    database.execute("BEGIN IMMEDIATE")
    try:
        for number, job in found:
            database.execute("DELETE FROM job_records WHERE job = ?", (job,))
            database.execute("DELETE FROM recent_records WHERE job = ?", (job,))
            database.execute("DELETE FROM dropped_records WHERE job = ?", (job,))
            database.execute("DELETE FROM ended_jobs WHERE number = ?", (number,))
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
    return tuple(JobId(job) for _, job in found)


class EndedJobs:
    """Reads them.

    Args:
        database: of a journal, used by the caller's thread alone.
        checks: prove its rows; None: those of a new journal.
    """

    def __init__(self, database: sqlite3.Connection, checks: RowChecks | None = None) -> None:
        self._database = database
        self._checks = RowChecks(database) if checks is None else checks

    def get(self, job: JobId) -> Job | None:
        """The last that is known of a job; None: it did not leave, or is not kept.

        Raises:
            JournalError: if it cannot be read, or its row is damaged.
        """
        rows = self._rows("WHERE job = ?", job)
        return self._decoded(rows[0]) if rows else None

    def owner(self, job: JobId) -> JobOwner | None:
        """Whose a job was; None: it did not leave, or is not kept.

        Raises:
            JournalError: if it cannot be read.
        """
        rows = self._rows("WHERE job = ?", job)
        return _owner(rows[0]) if rows else None

    def of_key(self, key: str) -> JobId | None:
        """The job of a submission's key; None: it did not leave, or is not kept.

        Raises:
            JournalError: if it cannot be read.
        """
        rows = self._rows("WHERE key = ? LIMIT 1", key)
        return JobId(rows[0][1]) if rows else None

    def behind(self, number: int) -> Iterator[EndedJob]:
        """Those that were accepted after some other, in that order.

        Raises:
            JournalError: if they cannot be read.
        """
        while page := self._rows("WHERE number > ? ORDER BY number LIMIT ?", number, PAGE):
            for row in page:
                at, job, user, name, state, *_ = row
                owner, read = partial(_owner, row), partial(self._decoded, row)
                yield EndedJob(at, job, user, name, state, owner, read)
            number = page[-1][0]

    def latest(self, most: int) -> list[Job]:
        """Those that were accepted last, oldest first; without those whose rows are damaged.

        Raises:
            JournalError: if they cannot be read.
        """
        found = []
        for row in reversed(self._rows("ORDER BY number DESC LIMIT ?", most)):
            with contextlib.suppress(JournalError):
                found.append(self._decoded(row))
        return found

    def _rows(self, which: str, *values: str | int) -> list[Any]:
        select = f"SELECT {FIELDS}, {self._checks.crc} FROM ended_jobs {which}"  # noqa: S608
        try:
            return self._database.execute(select, values).fetchall()
        except UNREADABLE as error:
            raise JournalError(f"the journal's ended jobs: {error}", DAMAGED) from None

    def _decoded(self, row: Sequence[Any]) -> Job:
        job = row[1]
        if not self._checks.proves_ended(row[:-1], row[-1]):
            what = f"the journal's ended job {job}: its checksum is another one"
            raise JournalError(what, DAMAGED)
        try:
            return _jobs.decode(row[-2])
        except ValueError as error:  # msgspec's errors are ValueErrors
            self._checks.damaged(job, f"ended job {job}")
            raise JournalError(f"the journal's ended job {job}: {error}", DAMAGED) from None


def _owner(row: Sequence[Any]) -> JobOwner:
    """Of a damaged row its user alone, who is in a column of his own."""
    user = row[2]
    with contextlib.suppress(ValueError):
        return JobOwner(user, _owned.decode(row[-2]).project or user)
    return JobOwner(user, user)
