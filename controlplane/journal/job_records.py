"""The past of jobs in the journal's file: written with the input that made it, read in pages.

One row for each record, by job, list and position. A position is the number of the record's input
and its place among those of its job there: it never changes, so that a page can begin behind it,
and writing a record a second time changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from controlplane.core.history_read_model import (
    KEPT_CHANGES,
    KEPT_EPOCHS,
    GroupStory,
    JobHistories,
    JobHistory,
    stories,
)
from controlplane.core.history_records import (
    CHANGES,
    EPOCHS,
    GROUPS,
    PROCESSES,
    PROMISES,
    JobLeft,
    Record,
    list_of,
)
from controlplane.journal.database import meta
from controlplane.journal.ended_jobs import INSERT as INSERT_ENDED
from controlplane.journal.ended_jobs import EndedRow, ended_row
from controlplane.journal.record import JournalError
from schemas.codec import encode
from schemas.ids import JobId, NodeId, WorkerId
from schemas.messages.client import Change, EpochInfo, PromiseInfo

COMPLETE: Final = "records_complete"  # of `meta`
PLACES: Final = 16  # bits
PAGE: Final = 200  # rows read at a time
LATEST: Final = {CHANGES: KEPT_CHANGES, GROUPS: 4 * KEPT_CHANGES, EPOCHS: KEPT_EPOCHS}
EVERY: Final = 1_000_000
DAMAGED: Final = "restore a backup"
INSERT: Final = "INSERT OR REPLACE INTO job_records VALUES (?, ?, ?, ?)"

_records: Final = msgspec.msgpack.Decoder(Record)


class RecordRow(NamedTuple):
    """A record as it is written, but for its input's number."""

    job: JobId
    list: str
    place: int
    body: bytes


def rows_of(records: Sequence[Record]) -> list[RecordRow | EndedRow]:
    """What one input did, encoded.

    Args:
        records: in order.

    Raises:
        ValueError: if one cannot be written down, and so TypeError and OverflowError.
    """
    places: Counter[JobId] = Counter()
    found: list[RecordRow | EndedRow] = []
    for record in records:
        if isinstance(record, JobLeft):
            found.append(ended_row(record))
            continue
        found.append(RecordRow(record.job, list_of(record), places[record.job], encode(record)))
        places[record.job] += 1
    return found


def insert_rows(
    database: sqlite3.Connection, rows: Iterable[tuple[int, RecordRow | EndedRow]]
) -> None:
    """Write records, within a transaction of the caller's.

    Args:
        database: of the journal.
        rows: each with the number of its input.

    Raises:
        sqlite3.Error: if they cannot be written.
    """
    placed, ended = [], []
    for number, row in rows:
        if isinstance(row, EndedRow):
            ended.append(row)
        else:
            placed.append((row.job, row.list, number << PLACES | row.place, row.body))
    database.executemany(INSERT, placed)
    database.executemany(INSERT_ENDED, ended)


class JobRecords:
    """Reads the past of jobs.

    Args:
        database: of a journal, used by the caller's thread alone.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    @property
    def complete(self) -> bool:
        """Whether they are there of every input, also of those of former releases."""
        return bool(meta(self._database, COMPLETE))

    def of(self, job: JobId) -> JobHistory:
        """The past of `job`, the latest of each list; empty if nothing happened to it yet.

        Args:
            job: may be unknown.

        Raises:
            JournalError: if it cannot be read.
        """
        histories = JobHistories()
        for name in (CHANGES, GROUPS, EPOCHS, PROMISES, PROCESSES):
            histories.add(reversed(list(self._latest(job, name))))
        return histories.of(job)

    def last(self, job: JobId, name: str) -> int:
        """The position of the newest record of a list; 0: there is none.

        Args:
            job: may be unknown.
            name: of the list.

        Raises:
            JournalError: if it cannot be read.
        """
        select = "SELECT max(at) FROM job_records WHERE job = ? AND list = ?"
        ((last,),) = self._rows(select, job, name)
        return last or 0

    def changes(self, job: JobId, after: int) -> Iterator[tuple[int, Change]]:
        """Of its phase, each with its position.

        Args:
            job: may be unknown.
            after: those behind this position.

        Raises:
            JournalError: if they cannot be read.
        """
        return ((at, record.change) for at, record in self._behind(job, CHANGES, after))

    def epochs(self, job: JobId, after: int) -> Iterator[tuple[int, EpochInfo]]:
        """The same of its epochs.

        Args:
            job: may be unknown.
            after: those behind this position.
        """
        return ((at, record.epoch) for at, record in self._behind(job, EPOCHS, after))

    def promises(self, job: JobId, after: int) -> Iterator[tuple[int, PromiseInfo]]:
        """The same of promises of its end.

        Args:
            job: may be unknown.
            after: those behind this position.
        """
        return ((at, record.promise) for at, record in self._behind(job, PROMISES, after))

    def decisions(self, job: JobId, after: int) -> Iterator[tuple[int, GroupStory]]:
        """The same of decisions about it, with the groups that they ordered.

        Args:
            job: may be unknown.
            after: those behind this position.
        """
        return stories(self._behind(job, GROUPS, after))

    def processes(self, job: JobId) -> dict[WorkerId, NodeId]:
        """Every process that it ever had, and on which node.

        Args:
            job: may be unknown.

        Raises:
            JournalError: if they cannot be read.
        """
        found = self._behind(job, PROCESSES, 0)
        return {record.worker: record.node for _, record in found}

    def _behind(self, job: JobId, name: str, after: int) -> Iterator[tuple[int, Any]]:
        select = (
            "SELECT at, body FROM job_records WHERE job = ? AND list = ? AND at > ? "
            "ORDER BY at LIMIT ?"
        )
        while page := self._rows(select, job, name, after, PAGE):
            for at, body in page:
                yield at, self._decoded(job, at, body)
            after = page[-1][0]

    def _latest(self, job: JobId, name: str) -> Iterator[Any]:
        select = (
            "SELECT at, body FROM job_records WHERE job = ? AND list = ? ORDER BY at DESC LIMIT ?"
        )
        for at, body in self._rows(select, job, name, LATEST.get(name, EVERY)):
            yield self._decoded(job, at, body)

    def _rows(self, select: str, *values: str | int) -> list[Any]:
        try:
            return self._database.execute(select, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"the journal's records: {error}", DAMAGED) from None

    def _decoded(self, job: JobId, at: int, body: bytes) -> Any:
        try:
            return _records.decode(body)
        except ValueError as error:  # msgspec's errors are ValueErrors
            what = f"the journal's record {at >> PLACES} of {job}: {error}"
            raise JournalError(what, DAMAGED) from None
