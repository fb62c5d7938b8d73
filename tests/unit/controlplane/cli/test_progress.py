"""The progress of what takes long, on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from controlplane.cli import progress as module
from controlplane.cli.progress import progress


class HandTimer:
    """A timer that a test lets expire."""

    made: ClassVar[list[HandTimer]] = []

    def __init__(self, _: float, expire: Callable[[], None]) -> None:
        self.expire, self.started, self.daemon = expire, False, False
        self.made.append(self)

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        pass


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> list[HandTimer]:
    HandTimer.made = []
    monkeypatch.setattr(module.threading, "Timer", HandTimer)
    return HandTimer.made


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """Make stderr a pseudo-terminal; yield what it shows, complete at the end."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 1 << 16):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream, monkeypatch.context() as within:
        within.setattr(sys, "stderr", stream)
        yield shown
    reader.join()
    os.close(master)


def words(shown: bytearray) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_a_terminal_shows_the_text_the_count_and_what_comes_later(
    timers: list[HandTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as shown:
        with progress("table", "packing a", "sending a") as on_done:
            timers[0].expire()
            on_done(2_000_000, 8_000_000)
        assert timers[0].started

    for text in ("packing a", "sending a", "2.0 MB of 8.0 MB"):
        assert text in words(shown)
    assert shown.endswith(b"\x1b[2K")  # the line is gone


def test_nothing_is_shown_before_the_time(
    timers: list[HandTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as shown:
        with progress("table", "packing a") as on_done:
            on_done(1, 2)
        timers[0].expire()  # too late

    assert shown == b""


@pytest.mark.parametrize("output", ["json", "jsonl", "quiet"])
def test_programs_get_no_progress(
    output: str, timers: list[HandTimer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch), progress(output, "packing a"):
        assert not timers[0].started


def test_a_pipe_gets_no_progress(timers: list[HandTimer]) -> None:
    with progress("table", "packing a"):
        assert not timers[0].started
