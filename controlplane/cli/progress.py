"""Progress of what takes long, on the terminal of stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from controlplane.cli.terminal import terminal_console
from controlplane.client.formats import byte_count

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN_AFTER_S: Final = 1.0
BYTES: Final = "bytes"
OnDone = Callable[[int, int | None], None]  # what is done, and the total; None: not known


@contextlib.contextmanager
def progress(output: str, text: str, later: str = "", unit: str = BYTES) -> Iterator[OnDone]:
    """Show a line with what is done and the time, once the block has lasted `SHOWN_AFTER_S`.

    The line disappears at the end. It is shown only for the output format `table`, and only if
    stderr is a terminal. What the block writes to stderr stays above it.

    Args:
        output: output format of the command.
        text: what goes on, such as "fetching JOB".
        later: replaces `text` once something is done.
        unit: what the yielded function counts.
    """
    line = _Line(text, later or text, unit)
    timer = threading.Timer(SHOWN_AFTER_S, line.show)
    timer.daemon = True
    if output == "table" and sys.stderr.isatty():
        timer.start()
    try:
        yield line.update
    finally:
        timer.cancel()
        line.close()


class _Line:
    """A line that a timer's thread shows, and that the thread of the command updates."""

    def __init__(self, text: str, later: str, unit: str) -> None:
        self._text, self._later, self._unit = text, later, unit
        self._done = 0
        self._total: int | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._began = time.monotonic()  # the clock of rich
        self._bar: Progress | None = None

    def show(self) -> None:
        from rich import progress as rich  # noqa: PLC0415 - slow to import and seldom needed

        text, count = "{task.description}", "{task.fields[count]}"
        columns = [rich.TextColumn(text), rich.BarColumn(), rich.TextColumn(count)]
        with self._lock:
            if self._closed:
                return
            self._bar = rich.Progress(
                *columns, rich.TimeElapsedColumn(), console=terminal_console(on_stderr=True),
                transient=True, redirect_stdout=False,  # it may be a file

            )  # fmt: skip
            self._bar.add_task(self._text, total=None, count="")
            self._bar.tasks[0].start_time = self._began
            self._bar.start()
        self.update(self._done, self._total)

    def update(self, done: int, total: int | None) -> None:
        self._done, self._total = done, total
        with self._lock:
            if self._bar is not None:
                (task,) = self._bar.task_ids
                text = self._later if done else self._text
                self._bar.update(
                    task, completed=done, total=total, description=text, count=self._count()
                )

    def _count(self) -> str:
        done, total = self._done, self._total
        if self._unit == BYTES:
            parts = [byte_count(one) for one in (done, total) if one]
            return " of ".join(parts)
        of = "" if total is None else f" of {total}"
        return f"{done}{of} {self._unit}" if done or total else ""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
