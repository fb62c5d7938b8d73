"""File locks, safe opening of files of other users, and retention by age and size."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from schemas.errors import SettingsError

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK: Final = struct.Struct("@hhqqi")  # type, whence, start, length and pid of Linux's flock


def try_lock(path: Path) -> int | None:
    """Lock a file for this process. Create the file and its folder if they do not exist.

    The lock ends when the process ends, for whatever reason.

    Returns:
        A file descriptor, or None if another process has the lock. Closing it releases the lock.

    Raises:
        OSError: if the file cannot be opened, or its file system does not support locks.
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


def take_pid_file(path: Path) -> None:
    """Lock a pid file until this process ends, and write the process id into the file.

    The lock is a POSIX record lock. Other processes can query its owner without locking the file,
    and children do not inherit the lock. It is lost when this process closes any descriptor of the
    file, so nothing else in this process may open the file. The file is private, because a read
    lock of another user would prevent the start of the daemon.

    Raises:
        SettingsError: if another process has the lock.
        OSError: if the file cannot be opened, is a symbolic link or belongs to another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(file, 0o600)  # earlier releases made the file readable for everyone
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either error
        os.close(file)
        pid = pid_of(path)
        what = f"pid_file: {path} is held by {f'process {pid}' if pid else 'an unknown process'}"
        remedy = "stop that process, or give each daemon a pid file of its own"
        raise SettingsError(what, remedy, "pid_file") from None
    os.ftruncate(file, 0)
    os.write(file, f"{os.getpid()}\n".encode())


def pid_of(path: Path) -> int | None:
    """Return the id of another process that has locked a pid file, or None if no process has.

    The result is 0 if the lock exists but its owner has no usable id. Such an owner is a process in
    another PID namespace, or an open file (OFD) instead of a process.

    Raises:
        PermissionError: if the file belongs to another user.
    """
    try:
        with path.open("rb") as file:
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except PermissionError:
        raise
    except OSError:
        return None
    return max(int(pid), 0) if kind != fcntl.F_UNLCK else None


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically and durably. Only its owner can read it.

    Raises:
        OSError: if the file cannot be written; the old content is intact.
    """
    fresh = path.with_name(f"{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_regular(path: Path) -> int:
    """Open a regular file for reading without waiting. The caller closes the descriptor.

    The last part of the path must not be a link. Links in earlier parts are followed.
    """
    return require_regular(os.open(path, _READ), path)


def require_regular(descriptor: int, path: Path) -> int:
    """Return the descriptor if it belongs to a regular file. Otherwise close it."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


class AgedFile(NamedTuple):
    """A file in a folder, with its size and time."""

    name: str
    size: int  # bytes
    at: float  # time of the last change, or of the job's end, seconds since the epoch


def expired_files(
    files: Iterable[AgedFile], keep_s: float, keep_bytes: int, now: float
) -> list[AgedFile]:
    """Return files older than `keep_s`, and the oldest others until `keep_bytes` or less remain."""
    ordered = sorted(files, key=lambda file: (file.at, file.name))
    left = sum(file.size for file in ordered)
    found = []
    for file in ordered:
        if now - file.at <= keep_s and left <= keep_bytes:
            break
        found.append(file)
        left -= file.size
    return found
