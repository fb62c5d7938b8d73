"""One process at a time: a file that is locked as long as its owner lives, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Be the one process that holds a file.

    Args:
        path: made with its folder if it is not there.

    Returns:
        A file descriptor: closing it gives the lock up. None: another process holds it.

    Raises:
        OSError: if the file cannot be opened, or its file system knows no locks.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock
