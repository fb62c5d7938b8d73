"""Files that a full disk may hold up and never breaks: training goes on, and says what was lost."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Final

LIMIT: Final = 64 << 20  # bytes that wait for room
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


class AppendFile:
    """Whole records at the end of a file, in order; those that find no room wait in memory."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record`, now or when there is room.

        Raises:
            OSError: when more than `LIMIT` bytes wait.
        """
        with self._lock:
            self._waiting += record
            try:
                self._write()
            except OSError:
                if len(self._waiting) > LIMIT:
                    raise

    def flush(self) -> bool:
        """Try again; whether nothing waits any more."""
        with self._lock:
            try:
                self._write()
            except OSError:
                return False
            return True

    def _write(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]


class PatientOutput(io.RawIOBase):
    """A script's stdout: where there is no room, output is dropped and counted, not raised."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor beneath."""
        return self._descriptor

    def write(self, data: object) -> int:
        """Write what there is room for; the rest is lost, and the next line that fits says so."""
        view = memoryview(data)  # type: ignore[arg-type] # whatever the text layer hands down
        size = view.nbytes
        try:
            if self._lost:
                note = f"\n[ones] {self._lost} bytes of output were lost: the disk was full\n"
                os.write(self._descriptor, note.encode())
                self._lost = 0
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._lost += view.nbytes
        return size
