"""Which process is which on this host: a pid and its start time name one for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

ROUNDS: Final = 1000  # of killing what forks faster than it dies


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, which with the pid names a process for ever; None if gone.

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


def belongs_to(pid: int, uid: int) -> bool | None:
    """Whether a process has the rights of a user and no others; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    uids = next((line for line in text.splitlines() if line.startswith("Uid:")), "").split()[1:]
    return set(uids) == {str(uid)}


def signal_group(group: int, what: int, uid: int | None = None) -> None:
    """Signal the processes of a group, as far as they are a user's.

    Args:
        uid: of the user; None: whoever's they are.
    """
    if uid is None:
        with contextlib.suppress(OSError):
            os.killpg(group, what)
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and belongs_to(pid := int(entry.name), uid):
            with contextlib.suppress(OSError):
                if os.getpgid(pid) == group:
                    os.kill(pid, what)


def end_all_of(uid: int) -> None:
    """Kill every process of a user, those that are born meanwhile too.

    Args:
        uid: of a job alone, and of nobody else.
    """
    for _ in range(ROUNDS):
        found = [e for e in Path("/proc").iterdir() if e.name.isdigit() and _runs_as(e, uid)]
        if not found:
            return
        for entry in found:
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)


def _runs_as(entry: Path, uid: int) -> bool:
    """Whether it is there, and not dead already."""
    try:
        text = (entry / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    words = {line.partition(":")[0]: line.split()[1:] for line in text.splitlines() if line}
    return set(words.get("Uid", ())) == {str(uid)} and words.get("State", ["Z"])[0] not in {
        "Z",
        "X",
    }
