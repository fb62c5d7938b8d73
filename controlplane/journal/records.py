"""History of jobs in the journal's file, committed together with the inputs and read in pages.

Each record has one row with the key (job, list, position). The position combines the number of the
input and the record's place among the records of the same job and input. A position never changes,
so a page can start after a position, and writing a record twice changes nothing.

A record of some hundred bytes that is written directly next to the other records of the same job
costs a page: 4 KiB in the log and in the file. Therefore records of all jobs are first appended to
`recent_records`. Later all recent records of a job move together to `job_records`, for the cost of
one page. This is the rolling merge of a two-level LSM-tree (O'Neil et al., 1996, section 2.1). The
younger level, `recent_records`, is on disk, too, because a record must be as durable as its input.
Each commit merges twice as many records as it adds, in the same transaction. So commits never wait
for a merge, no merge runs in idle times, and the younger level has at most twice `MERGE_THRESHOLD`
records.

A merge pass copies the records of all jobs. Then it deletes the copied records, oldest first, which
frees whole pages. In between, a record is stored twice and read once (`UNION`). So a pass does not
depend on the previous pass, and an interrupted pass starts again. Record numbers are never reused
(`AUTOINCREMENT`), so a pass covers all records up to the last number at its start, regardless of
later deletions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from controlplane.core.history import (
    CHANGES,
    EPOCHS,
    GROUPS,
    KEPT_CHANGES,
    KEPT_EPOCHS,
    PROCESSES,
    PROMISES,
    GroupStory,
    JobHistories,
    JobHistory,
    JobLeft,
    Process,
    Record,
    SlotsUsed,
    SweepLeft,
    decision_outcomes,
    list_of,
)
from controlplane.journal.database import (
    DAMAGED,
    POSITION_BITS,
    RECORD_TABLES,
    UNREADABLE,
    JournalError,
    RowChecks,
    record_checksum,
)
from controlplane.journal.ended import (
    EndedRow,
    UsageRow,
    ended_row,
    insert_ended,
    insert_usage,
    sweep_rows,
    usage_row,
)
from schemas.codec import encode
from schemas.ids import JobId, WorkerId
from schemas.wire.client import Change, EpochInfo, PromiseInfo

MERGE_THRESHOLD: Final = 65_536  # records in the younger level before a pass starts
MERGE_RATIO: Final = 2  # records merged for each added record

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
    """Position of a merge pass."""

    upto: int = 0  # number of the last record of the pass; 0: no pass
    behind: tuple[str, str, int] | None = None  # last copied key; None: all records are copied


IDLE: Final = Pass()
_FIRST: Final = ("", "", -1)


def merge(database: sqlite3.Connection, done: Pass, added: int) -> Pass:
    """Merge a share of the records within the caller's transaction, which added `added` records.

    Return the position of the merge pass after the transaction.
    """
    if not added:
        return done
    oldest, newest = database.execute(_ENDS).fetchone()
    if done == IDLE:
        if newest - oldest < MERGE_THRESHOLD:
            return IDLE
        done = Pass(newest, _FIRST)
    most = MERGE_RATIO * added
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
    """Move all records of a list to `job_records`, within the caller's transaction."""
    database.execute(_COPY_LIST, (job, name))
    database.execute("DELETE FROM recent_records WHERE job = ? AND list = ?", (job, name))


PAGE: Final = 200  # rows read at a time
EVERY_LIST: Final = (CHANGES, GROUPS, EPOCHS, PROMISES, PROCESSES)
LIST_LIMITS: Final = {CHANGES: KEPT_CHANGES, GROUPS: 4 * KEPT_CHANGES, EPOCHS: KEPT_EPOCHS}
NO_LIMIT: Final = 1_000_000
INSERT: Final = "INSERT OR REPLACE INTO job_records VALUES (?, ?, ?, ?, ?)"
INSERT_RECENT: Final = (
    "INSERT OR REPLACE INTO recent_records (job, list, at, body, crc) VALUES (?, ?, ?, ?, ?)"
)

_records: Final = msgspec.msgpack.Decoder(Record)


class RecordRow(NamedTuple):
    """A record to be stored, without the number of its input."""

    job: JobId
    list: str
    place: int
    body: bytes


Row = RecordRow | EndedRow | UsageRow
_Placed = tuple[str, str, int, bytes, int]


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Encode the records of one input, in order.

    Raises:
        ValueError: or TypeError or OverflowError, if a record cannot be encoded.
    """
    places: dict[JobId, int] = {}
    found: list[Row] = []
    for record in records:
        if isinstance(record, JobLeft):
            found.append(ended_row(record))
            continue
        if isinstance(record, SlotsUsed):
            found.append(usage_row(record))
            continue
        if isinstance(record, SweepLeft):
            found += [RecordRow(record.job, *row) for row in sweep_rows(record.history)]
            continue
        place = places.get(record.job, 0)
        found.append(RecordRow(record.job, list_of(record), place, encode(record)))
        places[record.job] = place + 1
    return found


def append_rows(database: sqlite3.Connection, rows: Iterable[tuple[int, Row]]) -> int:
    """Append rows with their input numbers, within the caller's transaction.

    Return the number of rows added to `recent_records`, which have to be merged later. The history
    of a sweep is complete at once, so it is written directly to `job_records`.
    """
    recent, settled = list[_Placed](), list[_Placed]()
    ended, usage = list[EndedRow](), list[UsageRow]()
    for number, row in rows:
        if isinstance(row, EndedRow):
            ended.append(row)
        elif isinstance(row, UsageRow):
            usage.append(row)
        else:
            at = number << POSITION_BITS | row.place
            crc = record_checksum(row.job, row.list, at, row.body)
            level = recent if row.list in EVERY_LIST else settled
            level.append((row.job, row.list, at, row.body, crc))
    database.executemany(INSERT_RECENT, recent)
    database.executemany(INSERT, settled)
    insert_usage(database, usage)
    insert_ended(database, ended)  # last, because it adds up the job's records
    return len(recent)


def drop_oldest(database: sqlite3.Connection, job: JobId, keep: int, most: int) -> int:
    """Delete all but the latest `keep` records of each list of a job. Return how many were deleted.

    The first promise stays, because the actual end is compared with it. `database` is in autocommit
    mode. One call deletes at most `most` records of each list.

    Raises:
        sqlite3.Error: if a deletion fails. Earlier lists are already shortened and recorded.
    """
    return sum(_drop_oldest(database, job, name, keep, most) for name in EVERY_LIST)


def _drop_oldest(database: sqlite3.Connection, job: JobId, name: str, keep: int, most: int) -> int:
    union = (
        "SELECT at FROM job_records WHERE job = ?1 AND list = ?2 "
        "UNION SELECT at FROM recent_records WHERE job = ?1 AND list = ?2"
    )
    select = f"{union} ORDER BY at DESC LIMIT 1 OFFSET ?3"
    if (last := database.execute(select, (job, name, keep)).fetchone()) is None:
        return 0
    delete = (
        "DELETE FROM job_records WHERE job = ? AND list = ? AND at IN (SELECT at FROM job_records "
        "WHERE job = ? AND list = ? AND at <= ? ORDER BY at LIMIT ? OFFSET ?)"
    )
    stay = int(name == PROMISES)
    count = (
        "INSERT INTO dropped_records VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET rows = rows + excluded.rows"
    )
    database.execute("BEGIN IMMEDIATE")
    try:
        settle(database, job, name)
        values = (job, name, job, name, last[0], most, stay)
        dropped = database.execute(delete, values).rowcount
        if dropped:
            database.execute(count, (job, name, dropped))
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
    return dropped


class JobRecords:
    """Reader of the job history. Damaged rows are reported and left out.

    Every method raises JournalError if the journal cannot be read. Only the caller's thread uses
    `database`. `checks` verifies the rows.
    """

    def __init__(self, database: sqlite3.Connection, checks: RowChecks | None = None) -> None:
        self._database = database
        self._checks = RowChecks(database) if checks is None else checks

    def of(self, job: JobId) -> JobHistory:
        """Return the latest records of each list of `job`. An unknown job has none."""
        histories = JobHistories()
        for name in EVERY_LIST:
            histories.add(reversed(list(self._latest(job, name))))
        return histories.of(job)

    def last(self, job: JobId, name: str) -> int:
        """Return the position of the newest record of a list, or 0 if the list is empty."""
        wanted = " UNION ".join(
            f"SELECT at FROM {table} WHERE job = ?1 AND list = ?2"  # noqa: S608
            for table in RECORD_TABLES
        )
        rows = self._rows(f"{wanted} ORDER BY at DESC LIMIT 1", job, name)
        return rows[0][0] if rows else 0

    def dropped(self, job: JobId) -> dict[str, int]:
        """Return the number of deleted records for each list of the job."""
        return dict(self._rows("SELECT list, rows FROM dropped_records WHERE job = ?", job))

    def damage_of(self, job: JobId) -> tuple[str, ...]:
        """Return the names of a job's damaged rows that have been found so far."""
        return self._checks.damage_of(job)

    def changes(self, job: JobId, after: int) -> Iterator[tuple[int, Change]]:
        """Yield the job's phase changes after position `after`, with their positions."""
        return ((at, record.change) for at, record in self._behind(job, CHANGES, after))

    def epochs(self, job: JobId, after: int) -> Iterator[tuple[int, EpochInfo]]:
        """Yield the job's epochs after position `after`, with their positions."""
        return ((at, record.epoch) for at, record in self._behind(job, EPOCHS, after))

    def promises(self, job: JobId, after: int) -> Iterator[tuple[int, PromiseInfo]]:
        """Yield the job's promised ends after position `after`, with their positions."""
        return ((at, record.promise) for at, record in self._behind(job, PROMISES, after))

    def decisions(self, job: JobId, after: int) -> Iterator[tuple[int, GroupStory]]:
        """Yield the decisions after position `after`, with their positions and ordered groups."""
        return decision_outcomes(self._behind(job, GROUPS, after))

    def processes(self, job: JobId) -> dict[WorkerId, Process]:
        """Return the processes of a job with their nodes. Some might never have started."""
        found = self._behind(job, PROCESSES, 0)
        return {record.worker: Process(record.node, record.confirmed) for _, record in found}

    def _behind(self, job: JobId, name: str, after: int) -> Iterator[tuple[int, Any]]:
        select = self._select("AND at > ?3 ", "ORDER BY at LIMIT ?4")
        while page := self._rows(select, job, name, after, PAGE):
            yield from self._intact_records(job, name, page)
            after = page[-1][0]

    def _latest(self, job: JobId, name: str) -> Iterator[Any]:
        select = self._select("", "ORDER BY at DESC LIMIT ?3")
        rows = self._rows(select, job, name, LIST_LIMITS.get(name, NO_LIMIT))
        return (record for _, record in self._intact_records(job, name, rows))

    def _select(self, which: str, order: str) -> str:
        wanted = " UNION ".join(
            f"SELECT at, body, crc FROM {table} WHERE job = ?1 AND list = ?2 {which}"  # noqa: S608
            for table in RECORD_TABLES
        )
        return f"{wanted} {order}"

    def _rows(self, select: str, *values: str | int) -> list[Any]:
        try:
            return self._database.execute(select, values).fetchall()
        except UNREADABLE as error:
            raise JournalError(f"the journal's records: {error}", DAMAGED) from None

    def _intact_records(
        self, job: JobId, name: str, rows: Iterable[tuple[int, bytes, int]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the decoded records of intact rows. Report and skip damaged rows."""
        for at, body, crc in rows:
            if not self._checks.is_intact_record(job, name, at, body, crc):
                continue
            try:
                record = _records.decode(body)
            except ValueError:  # msgspec's errors are ValueErrors
                self._checks.damaged(job, f"{name} of {job}, record of input {at >> POSITION_BITS}")
            else:
                yield at, record
