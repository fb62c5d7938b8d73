"""What a worker takes of its host beside a GPU: processor time, and gradients that it sends."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WINDOW_S: Final = 5.0
USER_TICKS, SYSTEM_TICKS = 11, 12  # places in a process's stat, behind its name
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Means over the last window."""

    cpu_cores: float  # of this process and its children
    sent_bytes_per_s: float  # gradients


class UsageMeter:
    """Rates of what is counted elsewhere; time comes in from outside.

    Steps count in one thread what they send, and another one asks.
    """

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._sent = 0.0  # bytes in all
        self._mark: tuple[float, float, float] | None = None  # time, CPU seconds, bytes
        self._latest: Usage | None = None

    def exchanged(self, many: int, members: int) -> None:
        """A ring summed so many bytes: each member sends 2 (w - 1)/w times as much.

        Args:
            many: bytes of the sum.
        """
        self._sent += 2.0 * (members - 1) / members * many

    def usage(self, cpu_s: float, now: float) -> Usage | None:
        """Means over the last whole window; None before the first one is over.

        Args:
            cpu_s: processor time so far, seconds, any origin.
            now: seconds, any origin.
        """
        if self._mark is None:
            self._mark = (now, cpu_s, self._sent)
        began, cpu_then, sent_then = self._mark
        elapsed = now - began
        if elapsed >= WINDOW_S:
            cores = (
                max(0.0, cpu_s - cpu_then) / elapsed
            )  # a child that ended may take its time away
            self._latest = Usage(cores, (self._sent - sent_then) / elapsed)
            self._mark = (now, cpu_s, self._sent)
        return self._latest


def cpu_seconds() -> float:
    """Processor time of this process and its children, such as those that load data.

    Children that run are asked of /proc, where it has them; those that ended and were waited for
    are remembered by the kernel.

    Returns:
        Seconds since it began.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    for listed in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            seconds += sum(map(_seconds_of, listed.read_text(encoding="ascii").split()))
    return seconds


def _seconds_of(pid: str) -> float:
    """Of a process that may just have ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / TICKS_PER_S
    return 0.0
