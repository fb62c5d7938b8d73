"""Sweeps that have left the state: their past, in the table of the past of jobs, read in pages.

One row with what is counted, one for each trial that has a past (its position ends with its
number), and one for each `UNITS` units of the ledger, in the order in which they ended.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from controlplane.core.sweep_read_model import SweepHistory, TrialHistory
from controlplane.journal.database import UNREADABLE
from controlplane.journal.record import JournalError
from controlplane.journal.row_checks import DAMAGED, PLACES, RowChecks
from schemas.ids import JobId
from schemas.messages.client import LedgerUnit

COUNTS: Final = "counts"
TRIALS: Final = "trials"
LEDGER: Final = "units"
UNITS: Final = 250  # of a row
LEFT_OUT: Final = "its past is left out, as damaged in the journal: `ones admin check`"


class _Counts(msgspec.Struct, kw_only=True):
    units: int  # of the ledger
    per_row: int
    history: SweepHistory  # without units and trials


_counts: Final = msgspec.msgpack.Decoder(_Counts)
_trials: Final = msgspec.msgpack.Decoder(TrialHistory)
_ledger: Final = msgspec.msgpack.Decoder(list[LedgerUnit])


class SweepRow(NamedTuple):
    """A part of a sweep's past as it is written: its list, its place there, its bytes."""

    list: str
    place: int
    body: bytes


def sweep_rows(history: SweepHistory) -> Iterator[SweepRow]:
    """The past of a sweep, encoded.

    Yields:
        Each part.
    """
    pack = msgspec.msgpack.encode
    rest = msgspec.structs.replace(history, units=[], trials={})
    counts = _Counts(units=len(history.units), per_row=UNITS, history=rest)
    yield SweepRow(COUNTS, 0, pack(counts))
    for number, trial in history.trials.items():
        yield SweepRow(TRIALS, number, pack(trial))
    for place, first in enumerate(range(0, len(history.units), UNITS)):
        yield SweepRow(LEDGER, place, pack(history.units[first : first + UNITS]))


class EndedSweeps:
    """Reads them.

    Args:
        database: of a journal, used by the caller's thread alone.
    """

    def __init__(self, database: sqlite3.Connection, checks: RowChecks) -> None:
        self._database = database
        self._checks = checks

    def history(self, job: JobId, first: int, most: int) -> SweepHistory:
        """The past of a sweep without its ledger; of a damaged trial no more than that it is.

        Args:
            job: that is a sweep, and has left.
            first: number of the first trial that is wanted.

        Raises:
            JournalError: if it cannot be read.
        """
        at, counts = self._counts(job)
        found = msgspec.structs.replace(counts.history, trials={})
        for place, body in self._rows(job, TRIALS, at + first, at + first + most - 1):
            trial = self._decoded(_trials, job, TRIALS, place, body)
            found.trials[place - at] = trial or TrialHistory(why=LEFT_OUT)
        return found

    def units(self, job: JobId, first: int, most: int) -> tuple[list[LedgerUnit], int]:
        """A page of its ledger, and how many units that has in all.

        Args:
            job: that is a sweep, and has left.
            first: unit that is wanted, from 0.

        Raises:
            JournalError: if one cannot be read: a ledger with a hole is none.
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
        """With the position that those of all rows begin at."""
        for at, body in self._rows(job, COUNTS, 0, 2**62):
            counts = self._decoded(_counts, job, COUNTS, at, body)
            if counts is not None:
                return at, counts
        raise _damaged(job, COUNTS)

    def _rows(self, job: JobId, name: str, first: int, last: int) -> list[tuple[int, Any]]:
        select = (
            f"SELECT at, body, {self._checks.crc} FROM job_records "  # noqa: S608
            "WHERE job = ? AND list = ? AND at BETWEEN ? AND ? ORDER BY at"
        )
        try:
            rows = self._database.execute(select, (job, name, first, last)).fetchall()
        except UNREADABLE as error:
            raise JournalError(f"the journal's sweeps: {error}", DAMAGED) from None
        prove = self._checks.proves_record
        return [(at, body if prove(job, name, at, body, crc) else None) for at, body, crc in rows]

    def _decoded(self, decoder: Any, job: JobId, name: str, at: int, body: bytes | None) -> Any:
        """What is written there; None: it is damaged."""
        try:
            return None if body is None else decoder.decode(body)
        except ValueError:  # msgspec's errors are ValueErrors
            self._checks.damaged(job, f"{name} of {job}, record of input {at >> PLACES}")
            return None


def _damaged(job: JobId, name: str) -> JournalError:
    return JournalError(
        f"the journal's sweep {job}: its {name} cannot be read, as damaged", DAMAGED
    )
