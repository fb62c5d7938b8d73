"""Work in a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Call of a function in a separate thread, which does not keep the process alive."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        """Start a thread named `name` that calls `work`."""
        self.over = threading.Event()  # set when `work` has returned or failed
        self.seconds = 0.0  # duration of the work
        self._results: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        began = time.monotonic()
        try:
            self._results.append(work())
        except Exception as error:  # noqa: BLE001 - raised again in the waiting thread
            self._error = error
        self.seconds = time.monotonic() - began
        self.over.set()

    def result(self) -> T:
        """Wait until the work is over; return its result, or raise its error."""
        self.over.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
