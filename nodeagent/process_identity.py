"""Which process is which on this host: a pid and its start time name one for ever."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, which with the pid names a process for ever; None if gone.

    Args:
        pid: on this host.

    Returns:
        Start time, clock ticks since the host came up (proc(5), field `starttime`).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def session_members(leader: int) -> list[int]:
    """Processes of the session that `leader` led, if it is gone; what a worker left behind.

    Args:
        leader: its pid, which is the number of its session too.

    Returns:
        Their pids; none while the leader is there, or while its pid is another process's.
    """
    if start_ticks(leader) is not None:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            if int(text.rpartition(")")[2].split()[3]) == leader:
                found.append(int(entry.name))
    return found


def open_process(pid: int, ticks: int) -> int | None:
    """A handle of exactly this process.

    Args:
        pid: which may be another process's by now.
        ticks: its start time, clock ticks since the host came up.

    Returns:
        A pidfd, which the caller closes; None if the process is gone.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start_ticks(pid) != ticks:
        os.close(descriptor)
        return None
    return descriptor
