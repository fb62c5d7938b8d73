"""Memory of a process: its bound, and garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from pathlib import Path
from typing import Final

NEW_OBJECTS: Final = 20_000  # per garbage collection; 700 would cost a tenth of all CPU time


def limit_memory() -> None:
    """Limit this process to half of the host's memory.

    More raises `MemoryError`. If memory runs out earlier, the kernel ends this process first.
    """
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    bound = half if hard == resource.RLIM_INFINITY else min(half, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    with contextlib.suppress(OSError):  # a host without /proc
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def collect_garbage_seldom() -> None:
    """Collect garbage after `NEW_OBJECTS` new objects, for processes with a large state."""
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
