"""Waits that end when they are called off."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Final

from elastic.training_errors import CancelledError

LOOK_S: Final = 0.02  # how often a wait looks whether it was called off
BUILD_LIMIT_S: Final = 30.0  # meeting the other members
OPERATION_LIMIT_S: Final = 1800.0  # a rank may evaluate for long while the others wait
LONG: Final = timedelta(seconds=OPERATION_LIMIT_S)


def wait_for(ready: threading.Event, cancel: threading.Event, limit_s: float | None = None) -> None:
    """Wait for `ready`.

    Args:
        limit_s: how long, seconds; None: for ever.

    Raises:
        CancelledError: if `cancel` was set first, or `limit_s` is over.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while not ready.wait(LOOK_S):
        if cancel.is_set() or (deadline is not None and time.monotonic() > deadline):
            raise CancelledError


def first_line(error: BaseException) -> str:
    """What a backend's error says, without its source lines and stack; at most 300 characters.

    Args:
        error: of torch or a backend of it; one without text gives the name of its class.
    """
    line = next((part for part in str(error).splitlines() if part.strip()), type(error).__name__)
    return line.rpartition("] ")[2].partition(". This is")[0][:300]
