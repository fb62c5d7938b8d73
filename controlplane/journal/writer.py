"""Writer of a journal. One thread commits all queued entries with one fdatasync."""

from __future__ import annotations

import errno
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from controlplane.journal.database import (
    CHECK_DISK,
    JOURNAL_ID,
    Entry,
    JournalError,
    checksum,
    meta,
    open_for_writing,
)
from controlplane.journal.mark import Mark, MarkFile, read_mark, require_complete
from controlplane.journal.records import IDLE, Row, append_rows, merge, rows_of
from schemas.codec import encode
from schemas.host.files import try_lock
from schemas.ids import Seconds

RETRY_S: Final = 0.5
MAX_BATCH: Final = 2000  # entries in one transaction


RETRIED: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PROBE_BYTES: Final = 1 << 20
LOST: Final = "look at the disk and the system log; entries reported as durable are in the journal"


class _Row(NamedTuple):
    """Encoded entry."""

    at: Seconds
    body: bytes
    feed: list[tuple[int, bytes]]
    records: list[Row]
    jobs: int


Task = Callable[[sqlite3.Connection], None]
_Item = _Row | Task


def _EMPTY(_: sqlite3.Connection) -> None:  # noqa: N802 - a constant of type Task
    """Marker of an empty queue."""


class Writer:
    """Writer that appends entries in order and reports how many are durable.

    If the disk is full or another process blocks a commit, the commit is retried until it succeeds.
    Meanwhile no later entry is reported as durable, `stalled` is the reason, and the effects of
    these entries must not leave the process. Any other failure ends the writer, because the content
    of a disk is unknown after a failed write. Then `failed` is called, and nothing more is
    committed.
    """

    def __init__(
        self,
        path: Path,
        committed: Callable[[int], None],
        failed: Callable[[JournalError], None] = lambda _: None,
    ) -> None:
        """Lock and open the journal at `path`, and start the writer's thread.

        Args:
            path: database file. The file with the suffix `.lock` is locked until `close`.
            committed: called from the writer's thread with the number of durable entries.
            failed: called from the writer's thread, at most once, when the writer gives up.

        Raises:
            JournalError: if another process has locked the journal, the file cannot be used, or
                it lacks inputs that were acknowledged.
        """
        self._path = path
        self._lock = take_lock(path.with_suffix(".lock"))
        try:
            require_complete(path)
            self._database = open_for_writing(path)
            self.base = self._last()
            self._mark = self._first_mark()
            self._mark_file = MarkFile(path, self._mark)
        except JournalError:
            os.close(self._lock)
            raise
        except OSError as error:
            os.close(self._lock)
            raise JournalError(f"{path}: {error.strerror}", CHECK_DISK) from None
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
        """Number of the last durable input."""
        return self.base + self._count

    def append(self, entry: Entry) -> None:
        """Queue `entry`. `committed` is called when the entry is durable.

        Entries are committed in order, possibly several at once. The first entry gets the number
        `base` + 1 in the journal.

        Raises:
            ValueError: or TypeError or OverflowError, if the entry cannot be encoded. Nothing was
                queued.
        """
        feed = [(event.seq, encode(event)) for event in entry.feed]
        records = rows_of(entry.records)
        self._queue.put(
            _Row(entry.at, entry.body or encode(entry.input), feed, records, entry.jobs)
        )

    def between_commits(self, work: Task) -> None:
        """Let the writer's thread run a short task on the database between two commits.

        Args:
            work: task of a few milliseconds at most, because commits wait meanwhile. If the disk is
                full or the database locked, the task is dropped and its transaction rolled back.
        """
        self._queue.put(work)

    def close(self) -> None:
        """Commit the queued entries and stop. Give up if the disk is full or locked."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._database.close()
        self._mark_file.close()
        os.close(self._lock)

    def _run(self) -> None:
        try:
            self._commit_all()
        except Exception as error:  # noqa: BLE001 - the thread must not end silently
            self._failed(JournalError(f"{self._path} cannot be written: {error!r}", LOST))

    def _commit_all(self) -> None:
        item = self._queue.get()
        while item is not None:
            if not isinstance(item, _Row):
                self._run_task(item)
                item = self._queue.get()
                continue
            batch, item = self._batch_from(item)
            if not self._commit(batch):
                return
            item = self._queue.get() if item is _EMPTY else item

    def _batch_from(self, first: _Row) -> tuple[list[_Row], _Item | None]:
        batch = [first]
        while len(batch) < MAX_BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(item, _Row):
                return batch, item
            batch.append(item)
        return batch, _EMPTY

    def _run_task(self, work: Task) -> None:
        """Run a task between two commits. Drop it if the disk is full or the database locked."""
        try:
            work(self._database)
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if not self._is_transient(error):
                raise

    def _commit(self, batch: list[_Row]) -> bool:
        """Make a batch durable, then its mark. Return False if the writer closes before that."""
        mark = self._mark_after(batch)
        for step in (partial(self._write, batch), partial(self._mark_file.write, mark)):
            if not self._retried(step):
                return False
        self._mark = mark
        self._count += len(batch)
        self._committed(self._count)
        return True

    def _retried(self, step: Callable[[], None]) -> bool:
        """Repeat a step until the disk has room for it. Return False if the writer closes first."""
        while True:
            try:
                step()
            except (sqlite3.Error, OSError) as error:
                if not self._is_transient(error):
                    raise
                self.stalled = str(error)
                if self._closing.is_set():
                    return False
                time.sleep(RETRY_S)
            else:
                self.stalled = ""
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

    def _is_transient(self, error: Exception) -> bool:
        """True if the disk is full or another process has locked the database."""
        if isinstance(error, OSError):
            return error.errno in NO_ROOM
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF in RETRIED:
            return True
        if code in {sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC}:
            return False  # a second fsync would report lost pages as durable
        return code & 0xFF == sqlite3.SQLITE_IOERR and _has_no_room(self._path)

    def _mark_after(self, batch: list[_Row]) -> Mark:
        number, row = self.durable + len(batch), batch[-1]
        crc = checksum(number, row.at, row.body)
        return Mark(self.journal_id, number, crc, max(self._mark.jobs, row.jobs))

    def _first_mark(self) -> Mark:
        """Return the mark of the journal at the start, when the journal is known to be complete."""
        select = "SELECT crc FROM inputs WHERE id = ?"
        row = self._database.execute(select, (self.base,)).fetchone()
        known, journal = read_mark(self._path), meta(self._database, JOURNAL_ID)
        return Mark(journal, self.base, row[0] if row else 0, known.jobs if known else 0)

    @property
    def journal_id(self) -> str:
        """Id of the journal, which changes when a backup is restored."""
        return self._mark.journal

    @property
    def jobs_floor(self) -> int:
        """Number of jobs that were accepted, even if the journal was replaced since then."""
        return self._mark.jobs

    def _last(self) -> int:
        try:
            select = (
                "SELECT max(ifnull((SELECT max(id) FROM inputs), 0), "
                "ifnull((SELECT max(input) FROM snapshots), 0))"
            )
            (last,) = self._database.execute(select).fetchone()
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}", CHECK_DISK) from None
        return int(last or 0)


def _has_no_room(path: Path) -> bool:
    """True if the disk or the quota has no room for a file of the log's size plus `PROBE_BYTES`."""
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
    """Lock a journal for this process. Create the lock file and its folder if necessary.

    Return a file descriptor. Closing it releases the lock.

    Raises:
        JournalError: if another process has the lock, or the lock file cannot be created.
    """
    try:
        lock = try_lock(path)
    except OSError as error:
        raise JournalError(f"{path} cannot be locked: {error.strerror}", CHECK_DISK) from None
    if lock is None:
        raise JournalError(
            f"{path} is held by another process", "one controller owns a journal; stop the other"
        )
    return lock
