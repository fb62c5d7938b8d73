"""Identity of processes on this host. A pid and its start time together are never reused."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

KILLER: Final = """
import os, sys
uid, own = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setresgid(uid, uid, uid)
try:
    os.setresuid(own, uid, own)
except OSError:  # not a uid of this user namespace
    os.setresuid(uid, uid, uid)
os.kill(-1, 9)
"""
KILLER_UIDS: Final = 0xFF000000  # first of 2**23 uids that no account has
KILLER_TIMEOUT_S: Final = 10.0
MAX_ROUNDS: Final = 1000  # rounds of kills, because processes may fork between them


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot (proc(5)), or None if it exited."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def session_members(leader: int) -> list[int]:
    """Return the living processes in the session of a leader that has exited, else none."""
    if not _is_dead(leader):  # it may also be another process with the pid of the leader
        return []
    return [pid for pid in in_session(leader) if not _is_dead(pid)]


def in_session(leader: int) -> list[int]:
    """Return the processes in the session of a leader, whether or not the leader has exited."""
    return [pid for pid in _pids() if _stat(pid)[3:4] == [str(leader)]]


def open_process(pid: int, ticks: int) -> int | None:
    """Return a pidfd of exactly this process, or None if it has exited. The caller closes it.

    `ticks` is the start time (clock ticks since boot), needed because the pid may be reused.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start_ticks(pid) != ticks:
        os.close(descriptor)
        return None
    return descriptor


def is_child(pid: int, parent: int) -> bool:
    """Return whether `parent` is the parent of a process."""
    return _stat(pid)[1:2] == [str(parent)]


def leads_session(pid: int) -> bool:
    """Return whether a process leads a session."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def runs(pid: int, ticks: int) -> bool:
    """Return whether exactly this process exists and has not exited."""
    return start_ticks(pid) == ticks and not _is_dead(pid)


def has_exited(pidfd: int) -> bool:
    """Return whether the process of a pidfd has exited."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def belongs_to(pid: int, uid: int) -> bool | None:
    """Return whether a process has only this user's rights, or None if the process has exited."""
    status = _status(pid)
    return None if status is None else set(status.get("Uid", ())) == {str(uid)}


def signal_group(group: int, what: int, uid: int | None = None) -> None:
    """Send a signal to the processes of a group. With `uid`, skip processes of other users.

    The group of this process is skipped.
    """
    if group == os.getpgrp():
        return
    if uid is None:
        with contextlib.suppress(OSError):
            os.killpg(group, what)
        return
    for pid in _pids():
        with contextlib.suppress(OSError):
            if belongs_to(pid, uid) and os.getpgid(pid) == group:
                os.kill(pid, what)


def end_all_of(uid: int) -> None:
    """Kill every process of a uid that belongs to one job, including new processes.

    A process with that effective uid sends the signal to all others at once, which no fork can
    escape. Its real and saved uid are others, so that they cannot stop or kill it first (kill(2)).
    """
    own = KILLER_UIDS + uid % 2**23
    for _ in range(MAX_ROUNDS):
        command = [sys.executable, "-I", "-S", "-c", KILLER, str(uid), str(own)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603
                command, capture_output=True, check=False, timeout=KILLER_TIMEOUT_S
            )
        found = [pid for pid in _pids() if belongs_to(pid, uid) and not _is_dead(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_dead(pid: int) -> bool:
    """Return whether a process has exited. Threads may outlive the first thread."""
    fields = _stat(pid)
    return not fields or (fields[0] in {"Z", "X"} and int(fields[17]) <= 1)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name. An exited process has no fields."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _status(pid: int) -> dict[str, list[str]] | None:
    lines = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: words.split() for name, _, words in lines} or None


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
