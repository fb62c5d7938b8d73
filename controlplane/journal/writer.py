"""One thread that commits whatever is queued: one fdatasync for as many entries as there are."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from controlplane.journal.database import BROKEN, open_for_writing
from controlplane.journal.record import Entry, JournalError
from schemas.codec import encode
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
        self._lock = _take_lock(path.with_suffix(".lock"))
        try:
            self._database = open_for_writing(path)
            self.base = self._last()
        except JournalError:
            os.close(self._lock)
            raise
        self._committed, self._failed = committed, failed
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._count = 0
        self._closing = threading.Event()
        self.stalled = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

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
        self._queue.put(_Row(entry.at, encode(entry.input), feed))

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
        while (row := self._queue.get()) is not None:
            batch = [row]
            last = False
            while len(batch) < MAX_BATCH and not last:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                last = more is None
                if more is not None:
                    batch.append(more)
            if not self._commit(batch) or last:
                return

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
        database, first = self._database, self.base + self._count + 1
        database.execute("BEGIN IMMEDIATE")
        try:
            database.executemany(
                "INSERT INTO inputs VALUES (?, ?, ?)",
                [(number, row.at, row.body) for number, row in enumerate(batch, first)],
            )
            database.executemany(
                "INSERT INTO feed VALUES (?, ?)", [event for row in batch for event in row.feed]
            )
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

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
            (last,) = self._database.execute("SELECT max(id) FROM inputs").fetchone()
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


def _take_lock(path: Path) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise JournalError(
            f"{path} is held by another process", "one controller owns a journal; stop the other"
        ) from None
    return lock
