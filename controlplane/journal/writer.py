"""One thread that commits whatever is queued: one fdatasync for as many entries as there are."""

from __future__ import annotations

import errno
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from controlplane.journal.database import BROKEN, Entry, JournalError, checksum, open_for_writing
from controlplane.journal.ended import EndedRow
from controlplane.journal.records import IDLE, RecordRow, append_rows, merge, rows_of
from schemas.codec import encode
from schemas.host.files import try_lock
from schemas.ids import Seconds

RETRY_S: Final = 0.5
MAX_BATCH: Final = 2000  # entries in one transaction


RETRIED: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PROBE_BYTES: Final = 1 << 20
LOST: Final = "look at the disk and the system's log; what was said to be durable is in the journal"


class _Row(NamedTuple):
    """An entry as it is written."""

    at: Seconds
    body: bytes
    feed: list[tuple[int, bytes]]
    records: list[RecordRow | EndedRow]


Tidy = Callable[[sqlite3.Connection], None]
_Item = _Row | Tidy


def _NOTHING(_: sqlite3.Connection) -> None:  # noqa: N802 - stands for no item
    """Nothing else is waiting."""


class Writer:
    """Appends entries in order and reports how many are durable.

    A commit for which there is no room, or that another process holds up, is tried again until it
    succeeds; meanwhile nothing behind it is reported, `stalled` says why, and no effect of these
    entries may leave the process. Any other failure is the end: nobody knows what a disk holds that
    once failed to say so. `failed` is called, and nothing is committed any more.
    """

    def __init__(
        self,
        path: Path,
        committed: Callable[[int], None],
        failed: Callable[[JournalError], None] = lambda _: None,
    ) -> None:
        """Take the journal at `path` for this process.

        Args:
            path: the database file; `path.lock` is held while the writer lives.
            committed: called from the writer's thread with the number of durable entries.
            failed: called from the writer's thread, at most once, when it gave up.

        Raises:
            JournalError: if another process has it, or it cannot be used.
        """
        self._path = path
        self._lock = take_lock(path.with_suffix(".lock"))
        try:
            self._database = open_for_writing(path)
            self.base = self._last()
        except JournalError:
            os.close(self._lock)
            raise
        self._committed, self._failed = committed, failed
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._count = 0
        self._merged = IDLE
        self._closing = threading.Event()
        self.stalled = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def durable(self) -> int:
        """The number of the last input that is durable."""
        return self.base + self._count

    def append(self, entry: Entry) -> None:
        """Queue `entry`; `committed` will be called when it is durable.

        Args:
            entry: committed behind those of earlier calls, maybe together with later ones. Its id
                in the journal is `base` and the number of entries up to it.

        Raises:
            ValueError: if it cannot be written down, and so for whatever else is wrong with it
                (TypeError, OverflowError): nothing was queued.
        """
        feed = [(event.seq, encode(event)) for event in entry.feed]
        records = rows_of(entry.records)
        self._queue.put(_Row(entry.at, encode(entry.input), feed, records))

    def between_commits(self, work: Tidy) -> None:
        """Let the writer's thread do something small with the database when it is its turn.

        Args:
            work: takes no more than some milliseconds, as commits wait meanwhile. If it finds no
                room it is given up, and what it did in a transaction is undone.
        """
        self._queue.put(work)

    def close(self) -> None:
        """Commit what is queued and stop; gives up if the disk does not take it."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._database.close()
        os.close(self._lock)

    def _run(self) -> None:
        try:
            self._commit_all()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end in silence
            self._failed(JournalError(f"{self._path} cannot be written: {error!r}", LOST))

    def _commit_all(self) -> None:
        item = self._queue.get()
        while item is not None:
            if not isinstance(item, _Row):
                self._tidy(item)
                item = self._queue.get()
                continue
            batch, item = self._batch_from(item)
            if not self._commit(batch):
                return
            item = self._queue.get() if item is _NOTHING else item

    def _batch_from(self, first: _Row) -> tuple[list[_Row], _Item | None]:
        """Rows that wait, and what is behind them."""
        batch = [first]
        while len(batch) < MAX_BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, _Row):
                return batch, item
            batch.append(item)
        return batch, _NOTHING

    def _tidy(self, work: Tidy) -> None:
        """Do something between two commits; what finds no room is tried again by who asked."""
        try:
            work(self._database)
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if not self._passes(error):
                raise

    def _commit(self, batch: list[_Row]) -> bool:
        while True:
            try:
                self._write(batch)
            except sqlite3.Error as error:
                if not self._passes(error):
                    raise
                self.stalled = str(error)
                if self._closing.is_set():
                    return False
                time.sleep(RETRY_S)
            else:
                self.stalled = ""
                self._count += len(batch)
                self._committed(self._count)
                return True

    def _write(self, batch: list[_Row]) -> None:
        database, first = self._database, self.durable + 1
        database.execute("BEGIN IMMEDIATE")
        try:
            database.executemany(
                "INSERT INTO inputs VALUES (?, ?, ?, ?)",
                [
                    (number, row.at, row.body, checksum(number, row.at, row.body))
                    for number, row in enumerate(batch, first)
                ],
            )
            database.executemany(
                "INSERT INTO feed VALUES (?, ?, ?)",
                [(seq, body, checksum(seq, 0.0, body)) for row in batch for seq, body in row.feed],
            )
            added = append_rows(
                database,
                ((number, one) for number, row in enumerate(batch, first) for one in row.records),
            )
            merged = merge(database, self._merged, added)
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._merged = merged

    def _passes(self, error: sqlite3.Error) -> bool:
        """Whether it is no more than a lack of room, or another process that is at it."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in RETRIED:
            return True
        if code in {sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC}:
            return False  # pages may be lost that a second fsync would call durable
        return code & 0xFF == sqlite3.SQLITE_IOERR and _has_no_room(self._path)

    def _last(self) -> int:
        try:
            select = (
                "SELECT max(ifnull((SELECT max(id) FROM inputs), 0), "
                "ifnull((SELECT max(input) FROM snapshots), 0))"
            )
            (last,) = self._database.execute(select).fetchone()
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}", BROKEN) from None
        return int(last or 0)


def _has_no_room(path: Path) -> bool:
    """Whether a file as large as the journal's next one could not be had there (disk, quota)."""
    probe = path.with_suffix(".probe")
    wal = path.with_name(f"{path.name}-wal")
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, wal.stat().st_size, PROBE_BYTES)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.errno in NO_ROOM
    return False


def take_lock(path: Path) -> int:
    """Be the one process that writes a journal.

    Args:
        path: of the lock's file, made with its folder if it is not there.

    Returns:
        A file descriptor: closing it gives the lock up.

    Raises:
        JournalError: if another process has it, or its disk does not take it.
    """
    try:
        lock = try_lock(path)
    except OSError as error:
        raise JournalError(f"{path} cannot be locked: {error.strerror}", BROKEN) from None
    if lock is None:
        raise JournalError(
            f"{path} is held by another process", "one controller owns a journal; stop the other"
        )
    return lock
