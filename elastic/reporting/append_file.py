"""Records at the end of a file, on a disk that may be full: what finds no room waits."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

LIMIT: Final = 64 << 20  # bytes that wait for room


class AppendFile:
    """Whole records at the end of a file, in order; those that find no room wait in memory.

    Args:
        path: of the file; made if it is not there, for its owner only.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Write `record`, now or when there is room.

        Args:
            record: bytes with whatever tells them from the next; never written in part only,
                unless the process ends while it waits.

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
