"""Jobs and sweeps that have ended and are no longer part of the core's state.

Each job has one row with its last version. The history of a sweep is stored in `job_records` and
read in pages. The history has one row of totals. Each trial with a history has one row; the
position of this row ends with the trial's number. Each further row has `UNITS_PER_ROW` units of the
ledger, in the order in which the units ended.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from controlplane.core.history import JobLeft, SlotsUsed, SweepHistory, TrialHistory
from controlplane.core.model.job import Job, JobOwner, number_of
from controlplane.journal.database import (
    DAMAGED,
    FIELDS,
    POSITION_BITS,
    UNREADABLE,
    JournalError,
    RowChecks,
    ended_checksum,
)
from schemas.ids import JobId, Seconds
from schemas.wire.client import JobUsage, LedgerUnit

PAGE: Final = 500  # rows read at a time
INSERT: Final = "INSERT OR REPLACE INTO ended_jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
RECORD_BYTES: Final = (
    "SELECT ifnull(sum(length(body)), 0) FROM (SELECT body FROM job_records WHERE job = ?1 "
    "UNION ALL SELECT body FROM recent_records WHERE job = ?1)"
)


class _Labels(msgspec.Struct):
    labels: dict[str, str] = {}


class _Facts(msgspec.Struct):
    """Fields by which lists filter. Decoding them alone is ten times as fast as decoding a job."""

    project: str = ""
    submitted_at: Seconds = Seconds(0.0)
    spec: _Labels = msgspec.field(default_factory=_Labels)


_jobs: Final = msgspec.msgpack.Decoder(Job)
_facts: Final = msgspec.msgpack.Decoder(_Facts)


class EndedRow(NamedTuple):
    """Row of table `ended_jobs`."""

    number: int  # in order of acceptance
    job: JobId
    user: str
    name: str
    state: str
    key: str | None
    ended: Seconds
    body: bytes


class EndedJob(NamedTuple):
    """Ended job with the fields by which lists filter. Other fields are decoded on demand."""

    number: int
    job: JobId
    user: str
    name: str
    state: str
    owner: Callable[[], JobOwner]
    read: Callable[[], Job]  # raises a JournalError if the row is damaged
    submission: Callable[[], tuple[Seconds, Mapping[str, str]]]  # its time and the job's labels


USAGE_ROW_BYTES: Final = 100  # of a row with its part of the indexes, measured


class UsageRow(NamedTuple):
    """Row of table `usage`: slots that a job held for a time."""

    number: int  # of the job
    job: JobId
    user: str
    project: str
    slots: int
    begin: Seconds
    end: Seconds


def usage_row(record: SlotsUsed) -> UsageRow:
    """Return the row of a record."""
    return UsageRow(number_of(record.job), *msgspec.structs.astuple(record))


def insert_usage(database: sqlite3.Connection, rows: Iterable[UsageRow]) -> None:
    """Add rows within the caller's transaction."""
    database.executemany("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def usage_between(
    database: sqlite3.Connection,
    since: Seconds,
    until: Seconds,
    *,
    held: Mapping[int, Seconds],
    after: int,
    most: int,
) -> dict[int, JobUsage]:
    """Return the slot seconds of jobs between two times, by the job's number.

    Args:
        held: time since which a job holds its slots, by the job's number. Rows that began at
            this time or later are left out, because they were written after `held` was read.
        after: only jobs with higher numbers.
        most: number of jobs that are returned, those with the lowest numbers.
    """
    slot_s = "sum(slots * (min(end, ?2) - max(begin, ?1)))"
    rows = "FROM usage WHERE end > ?1 AND begin < ?2"
    select = (
        f"SELECT number, job, user, project, {slot_s} {rows} "
        "AND number > ?3 GROUP BY number ORDER BY number LIMIT ?4"
    )
    later = f"SELECT {slot_s} {rows} AND number = ?3 AND begin >= ?4"
    found = {}
    for number, job, user, project, used in database.execute(select, (since, until, after, most)):
        if number in held:
            counted = database.execute(later, (since, until, number, held[number])).fetchone()[0]
            used -= counted or 0.0  # noqa: PLW2901
        found[number] = JobUsage(job=JobId(job), user=user, project=project, slot_s=used)
    return found


def forget_usage(
    database: sqlite3.Connection, before: float, most: int, user: str | None = None
) -> int:
    """Delete the oldest rows that ended before a time. Return the number of deletions.

    Args:
        user: delete only rows of this user. None: of all users.
    """
    of_user = "" if user is None else "AND user = ?3"
    select = f"SELECT rowid FROM usage WHERE end < ?1 {of_user} ORDER BY end LIMIT ?2"  # noqa: S608
    values = (before, most) if user is None else (before, most, user)
    return database.execute(f"DELETE FROM usage WHERE rowid IN ({select})", values).rowcount  # noqa: S608


def ended_row(record: JobLeft) -> EndedRow:
    """Encode an ended job.

    Raises:
        ValueError: or TypeError or OverflowError, if the job cannot be encoded.
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
    """Write ended jobs within the caller's transaction, with the size of each job's history."""
    for row in rows:
        (records,) = database.execute(RECORD_BYTES, (row.job,)).fetchone()
        database.execute(INSERT, (*row, ended_checksum(row), len(row.body) + records))


def largest_user(database: sqlite3.Connection) -> str | None:
    """Return the user with the most bytes of ended jobs and usage, or None if there are none."""
    select = (
        "SELECT user FROM (SELECT user, sum(bytes) AS bytes FROM ended_jobs GROUP BY user "
        "UNION ALL SELECT user, ? * count(*) FROM usage GROUP BY user) "
        "GROUP BY user ORDER BY sum(bytes) DESC, user LIMIT 1"
    )
    row = database.execute(select, (USAGE_ROW_BYTES,)).fetchone()
    return row[0] if row else None


def forget_ended(
    database: sqlite3.Connection, before: float, user: str | None = None, most: int = 100
) -> tuple[JobId, ...]:
    """Delete the oldest ended jobs with their history in one transaction, and return their ids.

    Args:
        database: connection in autocommit mode.
        before: delete jobs that ended before this time, seconds since the epoch.
        user: delete only jobs of this user. None: of all users.
        most: maximum number of jobs deleted in one call, because commits wait meanwhile.

    Raises:
        sqlite3.Error: if the deletion fails; nothing was deleted.
    """
    select = (
        "SELECT number, job FROM ended_jobs WHERE ended < ?1 AND ifnull(user = ?2, 1) "
        "ORDER BY ended LIMIT ?3"
    )
    found = database.execute(select, (before, user, most)).fetchall()
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
    """Reader of ended jobs. Every method raises JournalError if the rows cannot be read.

    Only the caller's thread uses `database`. `checks` verifies the rows.
    """

    def __init__(self, database: sqlite3.Connection, checks: RowChecks | None = None) -> None:
        self._database = database
        self._checks = RowChecks(database) if checks is None else checks

    def get(self, job: JobId) -> Job | None:
        """Return the last version of a job, or None if the job has not ended or is not kept.

        Raises:
            JournalError: also if the job's row is damaged.
        """
        rows = self._rows("WHERE job = ?", job)
        return self._decoded(rows[0]) if rows else None

    def owner(self, job: JobId) -> JobOwner | None:
        """Return the owner of a job, or None if the job has not ended or is not kept."""
        rows = self._rows("WHERE job = ?", job)
        return _owner(rows[0]) if rows else None

    def of_key(self, key: str) -> JobId | None:
        """Return the ended job that was submitted with `key`, or None if no such job is kept."""
        rows = self._rows("WHERE key = ? LIMIT 1", key)
        return JobId(rows[0][1]) if rows else None

    def after(self, number: int) -> Iterator[EndedJob]:
        """Yield the jobs that were accepted after job `number`, in order of acceptance."""
        return self._each("WHERE number > ? ORDER BY number LIMIT ?", number)

    def before(self, number: int) -> Iterator[EndedJob]:
        """Yield the jobs that were accepted before job `number`, the latest first."""
        return self._each("WHERE number < ? ORDER BY number DESC LIMIT ?", number)

    def _each(self, which: str, number: int) -> Iterator[EndedJob]:
        while page := self._rows(which, number, PAGE):
            for row in page:
                at, job, user, name, state, *_ = row
                owner, read = partial(_owner, row), partial(self._decoded, row)
                submission = partial(_submission, row)
                yield EndedJob(at, job, user, name, state, owner, read, submission)
            number = page[-1][0]

    def latest(self, most: int) -> list[Job]:
        """Return the ended jobs that were accepted last, oldest first, without damaged rows."""
        found = []
        for row in reversed(self._rows("ORDER BY number DESC LIMIT ?", most)):
            with contextlib.suppress(JournalError):
                found.append(self._decoded(row))
        return found

    def _rows(self, which: str, *values: str | int) -> list[Any]:
        select = f"SELECT {FIELDS}, crc FROM ended_jobs {which}"  # noqa: S608
        try:
            return self._database.execute(select, values).fetchall()
        except UNREADABLE as error:
            raise JournalError(f"the journal's ended jobs: {error}", DAMAGED) from None

    def _decoded(self, row: Sequence[Any]) -> Job:
        job = row[1]
        if not self._checks.is_intact_ended_job(row[:-1], row[-1]):
            what = f"the journal's ended job {job}: wrong checksum"
            raise JournalError(what, DAMAGED)
        try:
            return _jobs.decode(row[-2])
        except ValueError as error:  # msgspec's errors are ValueErrors
            self._checks.damaged(job, f"ended job {job}")
            raise JournalError(f"the journal's ended job {job}: {error}", DAMAGED) from None


def _owner(row: Sequence[Any]) -> JobOwner:
    """Return the owner of a job. If the row is damaged, use the user's name as the project."""
    user = row[2]
    with contextlib.suppress(ValueError):
        return JobOwner(user, _facts.decode(row[-2]).project or user)
    return JobOwner(user, user)


def _submission(row: Sequence[Any]) -> tuple[Seconds, Mapping[str, str]]:
    """Return the time of a submission and its labels. A damaged row has none, and is not old."""
    with contextlib.suppress(ValueError):
        facts = _facts.decode(row[-2])
        return facts.submitted_at, facts.spec.labels
    return Seconds(math.inf), {}


COUNTS: Final = "counts"
TRIALS: Final = "trials"
LEDGER: Final = "units"
UNITS_PER_ROW: Final = 250  # units per row
HISTORY_DAMAGED: Final = "its history is left out, as damaged in the journal: `ones admin check`"


class _Counts(msgspec.Struct, kw_only=True):
    units: int  # number of units in the ledger
    per_row: int
    history: SweepHistory  # without units and trials


_counts: Final = msgspec.msgpack.Decoder(_Counts)
_trials: Final = msgspec.msgpack.Decoder(TrialHistory)
_ledger: Final = msgspec.msgpack.Decoder(list[LedgerUnit])


class SweepRow(NamedTuple):
    """Row with a part of a sweep's history."""

    list: str
    place: int
    body: bytes


def sweep_rows(history: SweepHistory) -> Iterator[SweepRow]:
    """Yield the encoded rows of a sweep's history."""
    pack = msgspec.msgpack.encode
    rest = msgspec.structs.replace(history, units=[], trials={})
    counts = _Counts(units=len(history.units), per_row=UNITS_PER_ROW, history=rest)
    yield SweepRow(COUNTS, 0, pack(counts))
    for number, trial in history.trials.items():
        yield SweepRow(TRIALS, number, pack(trial))
    for place, first in enumerate(range(0, len(history.units), UNITS_PER_ROW)):
        yield SweepRow(LEDGER, place, pack(history.units[first : first + UNITS_PER_ROW]))


class EndedSweeps:
    """Reader of ended sweeps. Every method raises JournalError if the rows cannot be read.

    Only the caller's thread uses `database`.
    """

    def __init__(self, database: sqlite3.Connection, checks: RowChecks) -> None:
        self._database = database
        self._checks = checks

    def history(self, job: JobId, first: int, most: int) -> SweepHistory:
        """Return the history of an ended sweep, without the ledger, for at most `most` trials.

        The history of a damaged trial is empty except for a note about the damage. `first` is the
        number of the first trial.
        """
        at, counts = self._counts(job)
        found = msgspec.structs.replace(counts.history, trials={})
        for place, body in self._rows(job, TRIALS, at + first, at + first + most - 1):
            trial = self._decoded(_trials, job, TRIALS, place, body)
            found.trials[place - at] = trial or TrialHistory(reason=HISTORY_DAMAGED)
        return found

    def units(self, job: JobId, first: int, most: int) -> tuple[list[LedgerUnit], int]:
        """Return a page of an ended sweep's ledger, and the number of units in the whole ledger.

        `first` is the index of the first unit, from 0.

        Raises:
            JournalError: also if a unit is damaged, because a ledger must not have gaps.
        """
        at, counts = self._counts(job)
        row, skipped = divmod(first, counts.per_row)
        last = (first + most - 1) // counts.per_row
        found: list[LedgerUnit] = []
        for place, body in self._rows(job, LEDGER, at + row, at + last):
            units = self._decoded(_ledger, job, LEDGER, place, body)
            if units is None:
                raise _damaged(job, LEDGER)
            found += units
        if len(found) < min(skipped + most, counts.units - row * counts.per_row):
            raise _damaged(job, LEDGER)
        return found[skipped : skipped + most], counts.units

    def _counts(self, job: JobId) -> tuple[int, _Counts]:
        """Return the position of a sweep's first row, and the totals that this row contains."""
        for at, body in self._rows(job, COUNTS, 0, 2**62):
            counts = self._decoded(_counts, job, COUNTS, at, body)
            if counts is not None:
                return at, counts
        raise _damaged(job, COUNTS)

    def _rows(self, job: JobId, name: str, first: int, last: int) -> list[tuple[int, Any]]:
        select = (
            "SELECT at, body, crc FROM job_records "
            "WHERE job = ? AND list = ? AND at BETWEEN ? AND ? ORDER BY at"
        )
        try:
            rows = self._database.execute(select, (job, name, first, last)).fetchall()
        except UNREADABLE as error:
            raise JournalError(f"the journal's sweeps: {error}", DAMAGED) from None
        prove = self._checks.is_intact_record
        return [(at, body if prove(job, name, at, body, crc) else None) for at, body, crc in rows]

    def _decoded(self, decoder: Any, job: JobId, name: str, at: int, body: bytes | None) -> Any:
        try:
            return None if body is None else decoder.decode(body)
        except ValueError:  # msgspec's errors are ValueErrors
            self._checks.damaged(job, f"{name} of {job}, record of input {at >> POSITION_BITS}")
            return None


def _damaged(job: JobId, name: str) -> JournalError:
    return JournalError(f"the journal's sweep {job}: its {name} are damaged", DAMAGED)
