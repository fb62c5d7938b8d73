"""Read the history back; a torn tail was never reported as durable and is not there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from controlplane.core.inputs import Input
from controlplane.journal.record import JournalError, feed_from, input_from
from controlplane.journal.writer import connect
from schemas.ids import Seconds
from schemas.messages.feed import FeedEvent


class Reader:
    """A second connection to a journal: sees what is committed, changes nothing.

    Args:
        path: the database file; one that is not there is made, without entries.

    Raises:
        JournalError: if it cannot be opened, or a release with another schema wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._database = connect(path)
        self._path = path

    def inputs(self) -> Iterator[tuple[Seconds, Input]]:
        """Every input in order, with its time.

        Raises:
            JournalError: if the file is damaged before its end.
        """
        try:
            for identity, at, body in self._database.execute(
                "SELECT id, at, body FROM inputs ORDER BY id"
            ):
                yield Seconds(at), _decoded(self._path, identity, body)
        except sqlite3.DatabaseError as error:
            raise JournalError(f"{self._path}: {error}", "restore a backup") from None

    def feed(self, from_seq: int, limit: int) -> tuple[FeedEvent, ...]:
        """The next page of the feed.

        Args:
            from_seq: number of the first event.
            limit: most events to return.
        """
        rows = self._database.execute(
            "SELECT body FROM feed WHERE seq >= ? ORDER BY seq LIMIT ?", (from_seq, limit)
        )
        return tuple(feed_from(body) for (body,) in rows)

    def close(self) -> None:
        """Give up the connection."""
        self._database.close()


def _decoded(path: Path, identity: int, body: bytes) -> Input:
    try:
        return input_from(body)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise JournalError(f"{path}: input {identity}: {error}", "restore a backup") from None
