"""Identity of processes on this host: a pid together with the start time is never reused."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

MAX_ROUNDS: Final = 1000  # of kills, against processes that fork fast


def start_ticks(pid: int) -> int | None:
    """Return a process's start time (clock ticks since boot, see proc(5)); None if it exited."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def session_members(leader: int) -> list[int]:
    """Return the processes in the session of a leader that has exited; empty while it exists."""
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
    """Return a pidfd of exactly this process; None if it has exited. The caller closes it.

    `ticks` is the start time (clock ticks since boot), since the pid may be reused.
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
    """Return whether a process has the rights of a user and no others; None if it has exited."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    uids = next((line for line in text.splitlines() if line.startswith("Uid:")), "").split()[1:]
    return set(uids) == {str(uid)}


def signal_group(group: int, what: int, uid: int | None = None) -> None:
    """Send a signal to the processes of a group; `uid` restricts it to those of a user."""
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
    """Kill every process of a job's own uid, including new ones."""
    for _ in range(MAX_ROUNDS):
        found = [e for e in Path("/proc").iterdir() if e.name.isdigit() and _runs_as(e, uid)]
        if not found:
            return
        for entry in found:
            with contextlib.suppress(OSError):
                os.kill(int(entry.name), signal.SIGKILL)


def _runs_as(entry: Path, uid: int) -> bool:
    try:
        text = (entry / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    words = {line.partition(":")[0]: line.split()[1:] for line in text.splitlines() if line}
    return set(words.get("Uid", ())) == {str(uid)} and words.get("State", ["Z"])[0] not in {
        "Z",
        "X",
    }
