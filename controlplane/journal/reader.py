"""Reader of a journal.

An incomplete last transaction is not visible, because it was never durable.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from controlplane.core.inputs import ControllerStarted, Input
from controlplane.journal.database import (
    TERM_FLOOR,
    UNREADABLE,
    JournalError,
    RowChecks,
    checksum,
    feed_from,
    input_from,
    meta,
    open_for_reading,
)
from controlplane.journal.ended import EndedJobs, EndedSweeps
from controlplane.journal.records import JobRecords
from controlplane.journal.snapshots import Snapshot, body_of, snapshots_in
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent

DAMAGED: Final = "restore a backup (`ones admin restore`); `ones admin check` lists all damage"
PAGE: Final = 5000  # inputs per read, so that no long read delays the journal's clean-up
T = TypeVar("T")


class Reader:
    """Second connection to a journal, which reads committed rows and changes nothing.

    Every method raises JournalError if the journal cannot be read.

    Args:
        database: connection to use. None opens a new connection.
        damaged: called with the name of each damaged row of the job history. The row is skipped.

    Raises:
        JournalError: if the file is missing, cannot be opened, or has an unknown schema.
    """

    def __init__(
        self,
        path: Path,
        database: sqlite3.Connection | None = None,
        damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._database = open_for_reading(path) if database is None else database
        self.path = path
        self._past = RowChecks(self._database, damaged)
        self.records = JobRecords(self._database, self._past)
        self.ended = EndedJobs(self._database, self._past)
        self.sweeps = EndedSweeps(self._database, self._past)

    def first_and_last(self) -> tuple[int, int]:
        """Return the numbers of the oldest and newest stored inputs, or (0, 0) without inputs."""
        # In one query without subqueries, SQLite would read the whole table.
        select = "SELECT (SELECT min(id) FROM inputs), (SELECT max(id) FROM inputs)"
        ((first, last),) = self._rows(select)
        return first or 0, last or 0

    def inputs(self) -> Iterator[tuple[Seconds, Input]]:
        """Yield every stored input with its time, in order.

        Raises:
            JournalError: also if an input is damaged or missing.
        """
        for _, at, event in self.numbered_inputs():
            yield at, event

    def numbered_inputs(
        self, after: int | None = None, most: int | None = None
    ) -> Iterator[tuple[int, Seconds, Input]]:
        """Yield stored inputs with their numbers and times, in order.

        Args:
            after: number of an input; the next input must be stored and is yielded first. None
                starts with the oldest kept input.
            most: number of the last input. None ends with the newest committed input.

        Raises:
            JournalError: also if an input is damaged or missing.
        """
        for number, at, body, crc in self._input_rows(after, most):
            if not self._is_intact(number, at, body, crc):
                raise self._damage(f"input {number}", "wrong checksum")
            yield number, Seconds(at), self._decoded(input_from, body, f"input {number}")

    def input_rows(self, after: int) -> Iterator[tuple[int, float, bytes, int]]:
        """Yield number, time, body and checksum of each input after `after`, as stored.

        Raises:
            JournalError: also if an input is missing.
        """
        return self._input_rows(after, None)

    def checksum_of(self, number: int) -> int | None:
        """Return the checksum of a stored input, or None if it is not stored."""
        rows = list(self._rows("SELECT crc FROM inputs WHERE id = ?", number))
        return int(rows[0][0]) if rows else None

    def controller_starts(self, after: int) -> Iterator[tuple[int, str]]:
        """Yield the number of each start of a controller after input `after`, and its release."""
        select = "SELECT id, body FROM inputs WHERE id > ? AND instr(body, ?) ORDER BY id"
        tag = str(ControllerStarted.__struct_config__.tag).encode()
        for number, body in self._rows(select, after, tag):
            event = self._decoded(input_from, body, f"input {number}")
            if isinstance(event, ControllerStarted):
                yield number, event.release

    def feed(
        self,
        from_seq: int,
        limit: int,
        on_damage: Callable[[JournalError], None] | None = None,
    ) -> tuple[FeedEvent, ...]:
        """Return a page of the feed, at most `limit` events.

        `from_seq` is the number of the first event. Deleted events are skipped, and damaged ones
        too if `on_damage` is given, which is called for each.

        Raises:
            JournalError: also if an event is damaged and `on_damage` is None.
        """
        select = "SELECT seq, body, crc FROM feed WHERE seq >= ? ORDER BY seq LIMIT ?"
        found = []
        for seq, body, crc in self._rows(select, from_seq, limit):
            try:
                if not self._is_intact(seq, 0.0, body, crc):
                    raise self._damage(f"feed event {seq}", "wrong checksum")
                found.append(self._decoded(feed_from, body, f"feed event {seq}"))
            except JournalError as damage:
                if on_damage is None:
                    raise
                on_damage(damage)
        return tuple(found)

    def first_event(self) -> int:
        """Return the number of the oldest stored feed event, or 1 if no event is stored yet."""
        ((first,),) = self._rows("SELECT min(seq) FROM feed")
        return first or 1

    def last_event(self) -> int:
        """Return the number of the newest stored feed event, or 0 if none is stored."""
        ((last,),) = self._rows("SELECT max(seq) FROM feed")
        return last or 0

    def term_floor(self) -> int:
        """Return the lowest term that the controller's next run may use, or 0 if any is allowed."""
        return int(self._query(lambda database: meta(database, TERM_FLOOR)) or 0)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the complete snapshots, newest first."""
        return self._query(snapshots_in)

    def body_of(self, snapshot: Snapshot) -> bytes:
        """Return the bytes of a snapshot.

        Raises:
            JournalError: also if the snapshot is damaged.
        """
        body = self._query(lambda database: body_of(database, snapshot))
        if body is None:
            raise self._damage(f"snapshot {snapshot.input}", "wrong checksum")
        return body

    def problems(self) -> Iterator[str]:
        """Yield every problem of the file, the rows and the snapshots."""
        yield from self.problems_of_state()
        yield from self.problems_of_past()

    def problems_of_past(self) -> list[str]:
        """Return the damaged rows of the job history, which a replay does not need."""
        return self._query(lambda _: list(self._past.problems()))

    def problems_of_state(self) -> Iterator[str]:
        """Yield a description of all damage to inputs, events and snapshots."""
        for (said,) in self._rows("PRAGMA integrity_check"):
            if said != "ok":
                yield f"SQLite: {said}"
        expected = None
        for number, at, body, crc in self._rows("SELECT id, at, body, crc FROM inputs"):
            if expected is not None and number != expected:
                yield f"inputs {expected} to {number - 1} are missing"
            expected = number + 1
            if not self._is_intact(number, at, body, crc):
                yield f"input {number}: wrong checksum"
        expected = None
        for seq, body, crc in self._rows("SELECT seq, body, crc FROM feed"):
            if expected is not None and seq != expected:
                yield f"feed events {expected} to {seq - 1} are missing"
            expected = seq + 1
            if not self._is_intact(seq, 0.0, body, crc):
                yield f"feed event {seq}: wrong checksum"
        for snapshot in self.snapshots():
            try:
                self.body_of(snapshot)
            except JournalError as error:
                yield error.message

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def _input_rows(
        self, after: int | None, most: int | None
    ) -> Iterator[tuple[int, float, bytes, int]]:
        select = "SELECT id, at, body, crc FROM inputs WHERE id > ? AND id <= ? ORDER BY id LIMIT ?"
        last, most = after if after is not None else -1, most if most is not None else 2**62
        known = after is not None
        while page := list(self._rows(select, last, most, PAGE)):
            for row in page:
                if known and row[0] != last + 1:
                    raise self._damage(f"input {last + 1}", "it is missing")
                known, last = True, row[0]
                yield row

    def _is_intact(self, number: int, at: float, body: bytes, crc: int) -> bool:
        try:
            return crc == checksum(number, at, body)
        except (TypeError, struct.error):  # not bytes, or not a number
            return False

    def _rows(self, select: str, *values: int | bytes) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._database.execute(select, values)
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: {error}", DAMAGED) from None

    def _query(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return question(self._database)
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: {error}", DAMAGED) from None

    def _decoded(self, decode: Callable[[bytes], T], body: bytes, what: str) -> T:
        try:
            return decode(body)
        except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise self._damage(what, str(error)) from None

    def _damage(self, what: str, why: str) -> JournalError:
        return JournalError(f"{self.path}: {what}: {why}", DAMAGED)
