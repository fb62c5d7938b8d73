"""One thread that commits whatever is queued: one fdatasync for as many entries as there are."""

from __future__ import annotations

import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane.journal.database import open_for_writing
from controlplane.journal.record import Entry, JournalError
from schemas.codec import encode

RETRY_S: Final = 0.5
MAX_BATCH: Final = 2000  # entries in one transaction


class Writer:
    """Appends entries in order and reports how many are durable.

    A failing commit (a full disk) is tried again until it succeeds; meanwhile nothing behind it
    is reported, `stalled` says why, and no effect of these entries may leave the process.
    """

    def __init__(self, path: Path, committed: Callable[[int], None]) -> None:
        """Take the journal at `path` for this process.

        Args:
            path: the database file; `path.lock` is held while the writer lives.
            committed: called from the writer's thread with the number of durable entries.

        Raises:
            JournalError: if another process has it, or it cannot be used.
        """
        self._lock = _take_lock(path.with_suffix(".lock"))
        try:
            self._database = open_for_writing(path)
        except JournalError:
            os.close(self._lock)
            raise
        self._committed = committed
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._count = 0
        self._closing = threading.Event()
        self.stalled = ""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def append(self, entry: Entry) -> None:
        """Queue `entry`; `committed` will be called when it is durable.

        Args:
            entry: committed behind those of earlier calls, maybe together with later ones.
        """
        self._queue.put(entry)

    def close(self) -> None:
        """Commit what is queued and stop; gives up if the disk does not take it."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._database.close()
        os.close(self._lock)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            batch = [entry]
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

    def _commit(self, batch: list[Entry]) -> bool:
        while True:
            try:
                self._write(batch)
            except sqlite3.Error as error:
                self.stalled = str(error)
                if self._closing.is_set():
                    return False
                time.sleep(RETRY_S)
            else:
                self.stalled = ""
                self._count += len(batch)
                self._committed(self._count)
                return True

    def _write(self, batch: list[Entry]) -> None:
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            database.executemany(
                "INSERT INTO inputs (at, body) VALUES (?, ?)",
                [(entry.at, encode(entry.input)) for entry in batch],
            )
            database.executemany(
                "INSERT INTO feed VALUES (?, ?)",
                [(event.seq, encode(event)) for entry in batch for event in entry.feed],
            )
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise


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
