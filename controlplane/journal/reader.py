"""Read the history back; a torn tail was never reported as durable and is not there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from controlplane.core.inputs import Input
from controlplane.journal.database import open_for_reading
from controlplane.journal.record import JournalError, feed_from, input_from
from schemas.ids import Seconds
from schemas.messages.feed import FeedEvent

DAMAGED: Final = "restore a backup"
T = TypeVar("T")


class Reader:
    """A second connection to a journal: sees what is committed, changes nothing.

    Args:
        path: the database file.

    Raises:
        JournalError: if it is not there, cannot be opened, or a release with another schema wrote
            it.
    """

    def __init__(self, path: Path) -> None:
        self._database = open_for_reading(path)
        self._path = path

    def inputs(self) -> Iterator[tuple[Seconds, Input]]:
        """Every input in order, with its time.

        Raises:
            JournalError: if the file is damaged before its end.
        """
        for _, at, event in self.numbered_inputs():
            yield at, event

    def numbered_inputs(self) -> Iterator[tuple[int, Seconds, Input]]:
        """The same, each with its id; what is committed meanwhile is not among them.

        Raises:
            JournalError: if the file is damaged before its end.
        """
        select = "SELECT id, at, body FROM inputs ORDER BY id"
        for identity, at, body in self._rows(select):
            yield identity, Seconds(at), self._decoded(input_from, body, f"input {identity}")

    def feed(self, from_seq: int, limit: int) -> tuple[FeedEvent, ...]:
        """The next page of the feed.

        Args:
            from_seq: number of the first event.
            limit: most events to return.

        Raises:
            JournalError: if it cannot be read, or an event in it is damaged.
        """
        select = "SELECT seq, body FROM feed WHERE seq >= ? ORDER BY seq LIMIT ?"
        rows = self._rows(select, from_seq, limit)
        return tuple(self._decoded(feed_from, body, f"feed event {seq}") for seq, body in rows)

    def close(self) -> None:
        """Give up the connection."""
        self._database.close()

    def _rows(self, select: str, *values: int) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._database.execute(select, values)
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}", DAMAGED) from None

    def _decoded(self, decode: Callable[[bytes], T], body: bytes, what: str) -> T:
        try:
            return decode(body)
        except (TypeError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise JournalError(f"{self._path}: {what}: {error}", DAMAGED) from None
