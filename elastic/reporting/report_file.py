"""A worker's reports, in a file: still there when the agent or the worker has exited."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elastic.reporting.append_file import AppendFile
from schemas.codec import encode
from schemas.messages.agent import ScriptReport

FRAME: Final = struct.Struct(">I")


class ReportFile:
    """The worker's own append-only file of reports.

    Args:
        path: of the file; reports that are there already are counted.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.count = _frames(path.read_bytes())

    def append(self, make: Callable[[int], ScriptReport]) -> None:
        """Append the report that `make` builds for the next index; not in a forked child.

        Args:
            make: builds the report from its index, 1-based; what an earlier process wrote counts.

        Raises:
            OSError: if the disk takes nothing, and more waits than `append_file.LIMIT` bytes.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            data = encode(make(self.count + 1))
            self._file.append(FRAME.pack(len(data)) + data)
            self.count += 1

    def flush(self) -> bool:
        """Write what found no room before; whether all is written."""
        return self._file.flush()


_files: dict[Path, ReportFile] = {}


def report_file(path: Path) -> ReportFile:
    """The one `ReportFile` of this process for `path`: two would count apart.

    Args:
        path: compared as it is written, not as the file it names.
    """
    return _files.setdefault(path, ReportFile(path)) if path not in _files else _files[path]


def _frames(data: bytes) -> int:
    count = start = 0
    while start + FRAME.size <= len(data):
        start += FRAME.size + FRAME.unpack_from(data, start)[0]
        count += 1
    return count
