"""Checksums of the past of jobs: who proves a row, and which rows of former releases have none."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from controlplane.journal.database import UNCHECKED_ENDED, UNCHECKED_RECORDS, meta, schema_of
from controlplane.journal.record import RECENT_SINCE, RECORDS_CHECKED_SINCE

PLACES: Final = 16  # bits of a record's position, behind its input's number
DAMAGED: Final = "restore a backup (`ones admin restore`); `ones admin check` lists all damage"
TOLD: Final = 1000  # damaged rows that are remembered
FIELDS: Final = "number, job, user, name, state, key, ended, body"  # of `ended_jobs`


def record_checksum(job: str, name: str, at: int, body: bytes) -> int:
    """Of one row of `job_records`, so that neither its content nor its place can change unnoticed.

    Returns:
        CRC-32.
    """
    return zlib.crc32(body, zlib.crc32(f"{job}\0{name}\0{at}".encode()))


def ended_checksum(row: Sequence[Any]) -> int:
    """The same of one row of `ended_jobs`: lists choose by any of its fields."""
    return zlib.crc32(row[-1], zlib.crc32(repr((*row[:-1],)).encode()))


class RowChecks:
    """Proves rows, and remembers which were damaged.

    Args:
        told: of each damaged row, by its name, once.
    """

    def __init__(
        self, database: sqlite3.Connection, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self._database, self._told = database, told
        self._damaged: dict[tuple[str, str], None] = {}  # jobs, and what of them
        schema = int(schema_of(database))
        has_checksums = schema >= RECORDS_CHECKED_SINCE
        recent = ("recent_records",) if schema >= RECENT_SINCE else ()
        self.tables = ("job_records", *recent)  # where records are, some in both
        self.crc = "crc" if has_checksums else "NULL"  # the column
        everything = float("inf")
        self._input = int(meta(database, UNCHECKED_RECORDS) or 0) if has_checksums else everything
        self._end = float(meta(database, UNCHECKED_ENDED) or 0) if has_checksums else everything

    def proves_record(self, job: str, name: str, at: int, body: bytes, crc: int | None) -> bool:
        """Whether a row of `job_records` is as it was written; it is told of if it is not."""
        if crc is None:
            good = at >> PLACES <= self._input
        else:
            good = isinstance(body, bytes) and crc == record_checksum(job, name, at, body)
        if not good:
            self.damaged(job, f"{name} of {job}, record of input {at >> PLACES}")
        return good

    def proves_ended(self, row: Sequence[Any], crc: int | None) -> bool:
        """The same of a row of `ended_jobs`."""
        if crc is None:
            good = isinstance(row[-2], float) and row[-2] <= self._end
        else:
            good = isinstance(row[-1], bytes) and crc == ended_checksum(row)
        if not good:
            self.damaged(row[1], f"ended job {row[1]}")
        return good

    def damaged(self, job: str, what: str) -> None:
        """Tell of a row that is not as it was written, unless that was done."""
        if (job, what) not in self._damaged and len(self._damaged) < TOLD:
            self._damaged[job, what] = None
            self._told(what)

    def damage_of(self, job: str) -> tuple[str, ...]:
        """Damaged rows about a job that were met by now."""
        return tuple(what for name, what in self._damaged if name == job)

    def problems(self) -> Iterator[str]:
        """Every row of the past that is not as it was written, in words.

        Raises:
            sqlite3.Error: if they cannot be read.
        """
        tables = {row[0] for row in self._database.execute("SELECT name FROM sqlite_schema")}
        if "job_records" in tables:
            columns = f"job, list, at, body, {self.crc}"
            select = " UNION ".join(f"SELECT {columns} FROM {table}" for table in self.tables)  # noqa: S608
            for job, name, at, body, crc in self._database.execute(select):
                if not self.proves_record(job, name, at, body, crc):
                    what = f"{name} of {job}, record of input {at >> PLACES}"
                    yield f"{what}: its checksum is another one"
        if "ended_jobs" in tables:
            select = f"SELECT {FIELDS}, {self.crc} FROM ended_jobs"  # noqa: S608
            for *row, crc in self._database.execute(select):
                if not self.proves_ended(row, crc):
                    yield f"ended job {row[1]}: its checksum is another one"
