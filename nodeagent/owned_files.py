"""Files that a job owns, touched with its rights: what it could not open, nothing opens for it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_ASK: Final = 2**32 - 1  # is nobody's number: it only answers who it is now
SMALL: Final = 1 << 16  # bytes of a file that says one thing
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Owner(NamedTuple):
    """Whose files are touched."""

    uid: int
    gid: int


@contextlib.contextmanager
def acting_as(owner: Owner | None) -> Iterator[None]:
    """Touch files with somebody's rights, in this thread and in there only; never await in there.

    The kernel decides: a thread whose file system uid is not root's has none of root's rights to
    files (capabilities(7)), so no link, race or name leads to what the owner could not have.

    Raises:
        PermissionError: if this process may not.
    """
    if owner is None:
        yield
        return
    before = _who()
    try:
        _identify(owner)
        if _who() != owner:
            raise PermissionError(errno.EPERM, f"cannot act as uid {owner.uid}")
        yield
    finally:
        _identify(before)
        if _who() != before:
            os.abort()  # a thread with the rights of somebody else would do everything wrong


def _identify(owner: Owner) -> None:
    _LIBC.setfsgid(ctypes.c_uint32(owner.gid))
    _LIBC.setfsuid(ctypes.c_uint32(owner.uid))


def _who() -> Owner:
    asked = (_LIBC.setfsuid(ctypes.c_uint32(_ASK)), _LIBC.setfsgid(ctypes.c_uint32(_ASK)))
    return Owner(*(int(one) & _ASK for one in asked))


def owner_of(path: Path) -> Owner | None:
    """Who owns a folder; None: the agent does, or there is none.

    Args:
        path: within a folder of the agent's, so that nobody else can put another in its place.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    own = status.st_uid == os.geteuid() or not stat.S_ISDIR(status.st_mode)
    return None if own else Owner(status.st_uid, status.st_gid)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, at once; not a link, a FIFO, a folder, a device.

    Args:
        path: of the file; links on the way to it are followed.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: if it is not there, or something else.
    """
    return require_regular(os.open(path, _READ), path)


def require_regular(descriptor: int, path: Path) -> int:
    """What was opened, if it is a regular file; else it is closed.

    Raises:
        OSError: if it is something else.
    """
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", str(path))


def read_small(path: Path, most: int = SMALL) -> bytes:
    """The content of a regular file, whoever wrote it.

    Args:
        most: bytes that it may have.

    Raises:
        OSError: if it is something else, or larger.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
        return os.pread(descriptor, most, 0)
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that nobody else reads; it is there whole or not at all.

    Args:
        path: of the file; one that is there is replaced.

    Raises:
        OSError: if the disk does not take it.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    fresh.rename(path)


def make_folder(path: Path, owner: Owner | None) -> None:
    """Have a folder that is its owner's, with all that is in it.

    Args:
        path: within a folder of the agent's.
        owner: None: the agent.

    Raises:
        OSError: if it cannot be had.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
        if owner is not None:
            os.chown(path, *owner, follow_symlinks=False)
        return
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "no folder", str(path))
    if owner is not None and status.st_uid != owner.uid:  # of other settings, or an older release
        words = ["chown", "-R", "-h", "-P", "--", f"{owner.uid}:{owner.gid}", str(path)]
        done = subprocess.run(words, capture_output=True, check=False)  # noqa: S603
        if done.returncode:
            raise OSError(errno.EPERM, f"cannot be given to uid {owner.uid}", str(path))


def remove_tree(path: Path) -> None:
    """Delete a folder and what is in it, as far as that can be; no link in it is followed.

    Args:
        path: within a folder of the agent's; nothing need be there.
    """
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # deeper than Python goes
        subprocess.run(["rm", "-rf", "--", str(path)], capture_output=True, check=False)  # noqa: S603, S607


def bytes_below(folder: Path) -> int:
    """Room that files take on the disk, however deep it is; links in it are not followed.

    Args:
        folder: that somebody else may change meanwhile.
    """
    total, waiting = 0, [str(folder)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
