"""Run one benchmark so that nothing of it is left: `python -m tests.bench NAME ...`.

The benchmark is a process of its own with a temporary folder of its own. Ctrl-C and SIGTERM interrupt it, so
that it takes its clusters down; a second one, or `GRACE_S` without an end, kills it. What it leaves is printed;
processes are killed and the folder is deleted.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from nodeagent.cgroups import remove
from tests.support.leftovers import surround

GRACE_S: Final = 30
SAME_S: Final = 1.0  # `timeout` sends its signal to the process and to the group
PR_SET_CHILD_SUBREAPER: Final = 36
CONTROL_GROUPS: Final = "/sys/fs/cgroup/"
MEMORY: Final = Path("/dev/shm")  # noqa: S108
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def supervise(command: Sequence[str]) -> int:
    """Return the command's exit status, or 1 if it succeeded and left something."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # daemons become our children
    surroundings = surround()
    began = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    # A group of its own: processes that its clean-up needs do not get the terminal's Ctrl-C.
    bench = subprocess.Popen(command, process_group=0)
    stopped: list[float] = []

    def stop(*_: Any) -> None:
        now = time.monotonic()
        if not stopped or now > stopped[0] + SAME_S:
            os.kill(bench.pid, signal.SIGKILL if stopped else signal.SIGINT)
            stopped.append(now)
            signal.alarm(GRACE_S)

    for number in SIGNALS:
        signal.signal(number, stop)
    while (ended := os.wait())[0] != bench.pid:
        pass  # a daemon of a cluster
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(ended[1])
    left = [one for one in surroundings.left() if not _is_foreign(Path(one))]
    for process in psutil.Process().children(recursive=True):
        process.kill()
    while _reaped():
        pass
    for one in left:
        if one.startswith(CONTROL_GROUPS):
            remove(Path(one))
    surroundings.end(keep=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(
        f"{time.monotonic() - began:.0f} s in all, {used.ru_utime + used.ru_stime:.0f} s of processor time, "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for one in left:
        say(f"left behind: {one}")
    return (128 - code if code < 0 else code) or bool(left)


def _is_foreign(path: Path) -> bool:
    """True for a folder in shared memory: what a benchmark leaves there are files."""
    return path.parent == MEMORY and path.is_dir()


def _reaped() -> bool:
    try:
        return bool(os.wait())
    except ChildProcessError:
        return False


def say(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(supervise([sys.executable, "-m", f"tests.bench.{sys.argv[1]}", *sys.argv[2:]]))
