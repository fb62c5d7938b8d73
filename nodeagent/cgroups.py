"""Control groups of this host. Find writable trees, and read and write the files of groups."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger("cgroups")
MOUNTS: Final = Path("/proc/self/mounts")
OWN_CGROUP: Final = Path("/proc/self/cgroup")
PROCS: Final = "cgroup.procs"
CONTROL: Final = "cgroup.subtree_control"
MEMORY, PIDS, CPU = "memory", "pids", "cpu"
PERIOD_US: Final = 100_000  # in which a group may use its part of the cores
REST_GROUP: Final = "ones-rest"  # for processes of a divided group; version 2 needs them in leaves
KILL_TIMEOUT_S: Final = 5.0  # a process that the kernel blocks for longer is left alone
POLL_INTERVAL_S: Final = 0.005
MAX_ATTEMPTS: Final = 20  # attempts to empty a group, since its processes may fork meanwhile


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Tree of control groups."""

    base: Path  # parent of the jobs' groups
    controllers: frozenset[str]  # a subset of `MEMORY`, `PIDS` and `CPU`
    unified: bool  # version 2


def find(group: str = "", mounts: Path = MOUNTS, own: Path = OWN_CGROUP) -> tuple[Hierarchy, ...]:
    """Return the trees in which this process can create groups below `group` (default: its own).

    Return the tree of version 2 if it offers a controller, else the trees of version 1. If there
    are none, return the tree of version 2 anyway, because its groups can be killed as a whole.
    """
    try:
        table = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
        mine = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ()
    paths = {name: path for _, names, path in mine for name in names.split(",")}
    unified, former = list[Hierarchy](), list[Hierarchy]()
    for _, mount, kind, options, *_ in table:
        if kind == "cgroup2" and (base := _base(mount, group or paths.get("", ""))):
            offered = _words(base / "cgroup.controllers") & {MEMORY, PIDS, CPU}
            unified.append(Hierarchy(base, frozenset(offered), unified=True))
        offered = set(options.split(",")) & {MEMORY, PIDS, CPU}
        path = group or paths.get(min(offered, default=""), "")
        if kind == "cgroup" and offered and (base := _base(mount, path)):
            former.append(Hierarchy(base, frozenset(offered), unified=False))
    if any(tree.controllers for tree in unified):
        return tuple(unified)
    return tuple(former or unified)


def _base(mount: str, path: str) -> Path | None:
    if ".." in Path(path).parts:  # the group is not visible in this namespace
        return None
    base = Path(mount) / path.lstrip("/")
    if base.name == REST_GROUP:
        base = base.parent
    return base if os.access(base, os.W_OK) and os.access(base / PROCS, os.W_OK) else None


def _words(path: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(path.read_text(encoding="ascii").split())
    return set()


def divide(group: Path, controllers: frozenset[str]) -> None:
    """Enable controllers for the groups below a group of version 2.

    The processes of the group are moved into a new group below it.
    """
    if controllers <= _words(group / CONTROL):
        return
    words = " ".join(f"+{name}" for name in sorted(controllers))
    for turn in range(MAX_ATTEMPTS):
        try:
            write(group / CONTROL, words)
        except OSError as error:
            if error.errno != errno.EBUSY or turn == MAX_ATTEMPTS - 1:
                raise
        else:
            return
        (group / REST_GROUP).mkdir(exist_ok=True)
        for pid in members(group):
            enter(group / REST_GROUP, pid)


def enter(group: Path, pid: int) -> None:
    """Move a process into a group, where its later children will start. Ignore an exited process.

    Raises:
        ValueError: if the number is not positive. The kernel would move the caller for 0.
        OSError: if the kernel refuses the move.
    """
    if pid <= 0:
        raise ValueError(f"{pid} is not the number of a process")
    with contextlib.suppress(ProcessLookupError):
        write(group / PROCS, str(pid))


def members(group: Path) -> list[int]:
    """Return the processes in a group, without the groups below it. A missing group has none."""
    try:
        return [int(word) for word in (group / PROCS).read_text(encoding="ascii").split()]
    except OSError:
        return []


def below(group: Path) -> Iterator[Path]:
    """Yield the groups directly below a group. A missing group has none."""
    with contextlib.suppress(OSError):
        yield from [path for path in group.iterdir() if path.is_dir()]


def end_all(group: Path, limit_s: float = KILL_TIMEOUT_S) -> None:
    """Kill every process of a group, including new ones. Wait at most `limit_s` for the exits.

    If this process is in the group, nothing is killed.
    """
    deadline = time.monotonic() + limit_s
    while found := members(group):
        if os.getpid() in found:
            log.error("this process is in the group of a worker", group=str(group))
            return
        try:
            write(group / "cgroup.kill", "1")
        except OSError:  # version 1, or a kernel before 5.14
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_INTERVAL_S)


def remove(group: Path) -> bool:
    """Remove a group and its subgroups if they are empty. Return True if the group is gone."""
    for inner in below(group):
        remove(inner)
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def killed_for_memory(tree: Hierarchy, job: Path, worker: Path) -> int:
    """Return how many processes the kernel has killed because a job exceeded its memory limit.

    Version 1 counts them in the worker's group (`worker`), version 2 in the job's group (`job`).
    """
    path = job / "memory.events" if tree.unified else worker / "memory.oom_control"
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return next(int(line[1]) for line in lines if line[0] == "oom_kill")
    return 0


def bound_memory(tree: Hierarchy, group: Path, most: int) -> None:
    """Limit the memory, including swap, of the processes in and below a group. 0 is unlimited.

    Raises:
        OSError: if the kernel refuses the limit. Version 1 refuses it if more memory is in use.
    """
    if tree.unified:
        if most or (group / "memory.max").exists():
            write(group / "memory.max", str(most or "max"))
            with contextlib.suppress(FileNotFoundError, PermissionError):  # the host has no swap
                write(group / "memory.swap.max", "0" if most else "max")
        return
    limit, swap = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes"
    value = str(most or -1)
    try:
        write(limit, value)
        _write_if_there(swap, value)
    except OSError as error:  # EINVAL: memory must not exceed memory plus swap
        if error.errno != errno.EINVAL:
            raise
        _write_if_there(swap, value)
        write(limit, value)


def bound_pids(group: Path, most: int) -> None:
    """Limit the number of processes and threads in and below a group. 0 is unlimited."""
    if most or (group / "pids.max").exists():
        write(group / "pids.max", str(most or "max"))


def bound_cpus(tree: Hierarchy, group: Path, most: float) -> None:
    """Limit the cores that the processes in and below a group use. 0 is unlimited."""
    quota = round(most * PERIOD_US)
    if tree.unified:
        if most or (group / "cpu.max").exists():
            write(group / "cpu.max", f"{quota or 'max'} {PERIOD_US}")
    elif most or (group / "cpu.cfs_quota_us").exists():
        write(group / "cpu.cfs_period_us", str(PERIOD_US))
        write(group / "cpu.cfs_quota_us", str(quota or -1))


def write(path: Path, value: str) -> None:
    """Write to an existing control file of a group, in one call.

    Raises:
        OSError: if it cannot be written; the error names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, value.encode("ascii"))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write_if_there(path: Path, value: str) -> None:
    if path.exists():
        write(path, value)
