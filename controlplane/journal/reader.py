"""Read the history back; a torn tail was never reported as durable and is not there."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from controlplane.core.inputs import Input
from controlplane.journal.database import (
    BROKEN,
    FIRST_VERSION,
    TERM_FLOOR,
    UNCHECKED,
    UNCHECKED_FEED,
    UNREADABLE,
    JournalError,
    RowChecks,
    checksum,
    feed_from,
    input_from,
    meta,
    open_for_reading,
    schema_of,
)
from controlplane.journal.ended import EndedJobs, EndedSweeps
from controlplane.journal.records import JobRecords
from controlplane.journal.snapshots import Snapshot, body_of, snapshots_in
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent

DAMAGED: Final = "restore a backup (`ones admin restore`); `ones admin check` lists all damage"
PAGE: Final = 5000  # inputs read at a time, so that no long read holds up the journal's clean-up
T = TypeVar("T")


class Reader:
    """A second connection to a journal: sees what is committed, changes nothing.

    Args:
        database: a connection to it; None: one that may wait for others and be waited for.
        damaged: told of each row of the past of jobs that is met and damaged; it is passed over.

    Raises:
        JournalError: if it is not there, cannot be opened, or has a schema that this release cannot
            read.
    """

    def __init__(
        self,
        path: Path,
        database: sqlite3.Connection | None = None,
        damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._database = open_for_reading(path) if database is None else database
        self._path = path
        try:
            self._past = RowChecks(self._database, damaged)
            self._unchecked = int(meta(self._database, UNCHECKED) or 0)
            self._unchecked_feed = int(meta(self._database, UNCHECKED_FEED) or 0)
            self._checked = schema_of(self._database) != str(FIRST_VERSION)
        except (sqlite3.Error, ValueError) as error:
            self._database.close()
            raise JournalError(f"{path}: {error}", BROKEN) from None
        self.records = JobRecords(self._database, self._past)
        self.ended = EndedJobs(self._database, self._past)
        self.sweeps = EndedSweeps(self._database, self._past)

    def first_and_last(self) -> tuple[int, int]:
        """Numbers of the oldest input that is kept and of the newest one; 0 if there is none.

        Raises:
            JournalError: if it cannot be read.
        """
        ((first, last),) = self._rows("SELECT min(id), max(id) FROM inputs")
        return first or 0, last or 0

    def inputs(self) -> Iterator[tuple[Seconds, Input]]:
        """Every input that is kept, in order, with its time.

        Raises:
            JournalError: if the file is damaged before its end.
        """
        for _, at, event in self.numbered_inputs():
            yield at, event

    def numbered_inputs(
        self, after: int | None = None, most: int | None = None
    ) -> Iterator[tuple[int, Seconds, Input]]:
        """The same, each with its number.

        Args:
            after: those behind this one, of which none may be missing; None: all that are kept.
            most: not beyond this one; None: all that are committed by then.

        Raises:
            JournalError: if the file is damaged before its end.
        """
        for number, at, body, crc in self._input_rows(after, most):
            if not self._proves(number, at, body, crc, self._unchecked):
                raise self._damage(f"input {number}", "its checksum is another one")
            yield number, Seconds(at), self._decoded(input_from, body, f"input {number}")

    def feed(self, from_seq: int, limit: int) -> tuple[FeedEvent, ...]:
        """The next page of the feed.

        Args:
            from_seq: number of the first event; older ones than are kept are passed over.
            limit: most events to return.

        Raises:
            JournalError: if it cannot be read, or an event in it is damaged.
        """
        select = f"SELECT seq, body, {self._crc} FROM feed WHERE seq >= ? ORDER BY seq LIMIT ?"  # noqa: S608
        found = []
        for seq, body, crc in self._rows(select, from_seq, limit):
            if not self._proves(seq, 0.0, body, crc, self._unchecked_feed):
                raise self._damage(f"feed event {seq}", "its checksum is another one")
            found.append(self._decoded(feed_from, body, f"feed event {seq}"))
        return tuple(found)

    def first_event(self) -> int:
        """The number of the oldest feed event that is kept; 1 if there is none yet.

        Raises:
            JournalError: if it cannot be read.
        """
        ((first,),) = self._rows("SELECT min(seq) FROM feed")
        return first or 1

    def term_floor(self) -> int:
        """The least term that the next incarnation may have; 0: whatever follows.

        Raises:
            JournalError: if it cannot be read.
        """
        return int(self._asked(lambda database: meta(database, TERM_FLOOR)) or 0)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Snapshots of the state that are whole, the newest first.

        Raises:
            JournalError: if they cannot be read.
        """
        return self._asked(snapshots_in) if self._checked else ()

    def body_of(self, snapshot: Snapshot) -> bytes:
        """The state in a snapshot, as `state_image` made it.

        Raises:
            JournalError: if it is damaged.
        """
        body = self._asked(lambda database: body_of(database, snapshot))
        if body is None:
            raise self._damage(f"snapshot {snapshot.input}", "its checksum is another one")
        return body

    def problems(self) -> Iterator[str]:
        """Everything that is wrong with the file, its rows and snapshots, in words.

        Raises:
            JournalError: if it cannot be read at all.
        """
        yield from self.problems_of_state()
        yield from self.problems_of_past()

    def problems_of_past(self) -> list[str]:
        """Of these, damaged rows of the past of jobs: nothing but that they are shown is lost.

        Raises:
            JournalError: if they cannot be read at all.
        """
        return self._asked(lambda _: list(self._past.problems()))

    def problems_of_state(self) -> Iterator[str]:
        """All others: what was said to be durable may be another.

        Raises:
            JournalError: if it cannot be read at all.
        """
        for (said,) in self._rows("PRAGMA integrity_check"):
            if said != "ok":
                yield f"SQLite: {said}"
        expected = None
        for number, at, body, crc in self._rows(f"SELECT id, at, body, {self._crc} FROM inputs"):  # noqa: S608
            if expected is not None and number != expected:
                yield f"inputs {expected} to {number - 1} are missing"
            expected = number + 1
            if not self._proves(number, at, body, crc, self._unchecked):
                yield f"input {number}: its checksum is another one"
        expected = None
        for seq, body, crc in self._rows(f"SELECT seq, body, {self._crc} FROM feed"):  # noqa: S608
            if expected is not None and seq != expected:
                yield f"feed events {expected} to {seq - 1} are missing"
            expected = seq + 1
            if not self._proves(seq, 0.0, body, crc, self._unchecked_feed):
                yield f"feed event {seq}: its checksum is another one"
        for snapshot in self.snapshots():
            try:
                self.body_of(snapshot)
            except JournalError as error:
                yield error.message

    def close(self) -> None:
        """Give up the connection."""
        self._database.close()

    @property
    def _crc(self) -> str:
        return "crc" if self._checked else "NULL"

    def _input_rows(
        self, after: int | None, most: int | None
    ) -> Iterator[tuple[int, float, bytes, int | None]]:
        select = (
            f"SELECT id, at, body, {self._crc} FROM inputs "  # noqa: S608
            "WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
        )
        last, most = after if after is not None else -1, most if most is not None else 2**62
        known = after is not None
        while page := list(self._rows(select, last, most, PAGE)):
            for row in page:
                if known and row[0] != last + 1:
                    raise self._damage(f"input {last + 1}", "it is missing")
                known, last = True, row[0]
                yield row

    def _proves(self, number: int, at: float, body: bytes, crc: int | None, unchecked: int) -> bool:
        if crc is None:
            return not self._checked or number <= unchecked
        try:
            return crc == checksum(number, at, body)
        except (TypeError, struct.error):  # no bytes, no number
            return False

    def _rows(self, select: str, *values: int) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._database.execute(select, values)
        except UNREADABLE as error:
            raise JournalError(f"{self._path}: {error}", DAMAGED) from None

    def _asked(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return question(self._database)
        except UNREADABLE as error:
            raise JournalError(f"{self._path}: {error}", DAMAGED) from None

    def _decoded(self, decode: Callable[[bytes], T], body: bytes, what: str) -> T:
        try:
            return decode(body)
        except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise self._damage(what, str(error)) from None

    def _damage(self, what: str, why: str) -> JournalError:
        return JournalError(f"{self._path}: {what}: {why}", DAMAGED)
