"""Where log lines go: a file descriptor that may be full, gone or slow, and never raises."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class LogLines:
    """Writes each line at once, and counts those that nobody takes.

    A disk that is full, a terminal that is gone and a pipe that nobody reads lose lines; they end
    no process. As soon as lines are taken again, how many were lost is said first.
    """

    def __init__(self, fd: int, lost: Callable[[int], str]) -> None:
        """Begin with nothing lost.

        Args:
            lost: the line that says how many are missing, without its end.
        """
        self._fd = fd
        self._lost = lost
        self._torn = False  # the last line is there in part
        self._lock = threading.Lock()
        self.missing = 0  # lines, since the last one that was taken

    def msg(self, line: str) -> None:
        """Write `line`, or count it.

        Args:
            line: without its end; what UTF-8 cannot say is escaped.
        """
        with self._lock:
            if self.missing and not self._written(self._lost(self.missing)):
                self.missing += 1
                return
            self.missing = 0
            if not self._written(line):
                self.missing = 1

    debug = info = warning = warn = error = exception = critical = fatal = log = failure = msg

    def _written(self, line: str) -> bool:
        text = f"\n{line}\n" if self._torn else f"{line}\n"
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
                self._torn = bool(left)
        except OSError:
            return False
        return True


class LogLinesFactory:
    """What structlog asks for a logger: all loggers of a process share one `LogLines`."""

    def __init__(self, lines: LogLines) -> None:
        """Hand out `lines`."""
        self._lines = lines

    def __call__(self, *_names: Any) -> LogLines:
        """The logger, whatever its name."""
        return self._lines
