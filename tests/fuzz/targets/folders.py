"""What targets share: a folder for each input, in memory where the host has some, and no log lines."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import structlog


@cache
def base() -> Path:
    """Where all of them are; it goes with the process."""
    memory = Path("/dev/shm")  # noqa: S108 - only if it is there
    found = Path(tempfile.mkdtemp(prefix="ones-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    return found


@contextmanager
def folder() -> Iterator[Path]:
    """An empty one."""
    found = base() / "input"
    shutil.rmtree(found, ignore_errors=True)
    found.mkdir()
    yield found


def without_log_lines() -> None:
    """Drop every log line from now on."""
    structlog.configure(processors=[_dropped])


def _dropped(*_: Any) -> Any:
    raise structlog.DropEvent
