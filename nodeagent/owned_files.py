"""Access to a job's files with the job's rights, so that the agent's rights cannot be misused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from schemas.host.files import open_regular

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_QUERY_ID: Final = 2**32 - 1  # an invalid id, for which the kernel only returns the current id
SHARED_FOLDERS: Final = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/dev/mqueue"))  # noqa: S108
SHARED_OBJECTS: Final = {  # options of ipcrm, and columns of /proc/sysvipc
    "shm": ("--shmem-id", "shmid"),
    "sem": ("--semaphore-id", "semid"),
    "msg": ("--queue-id", "msqid"),
}
OBJECTS_AT_ONCE: Final = 500
MAX_SMALL_BYTES: Final = 1 << 16  # bytes of a small file
MAX_SEARCH_S: Final = 60  # of the files of one user


class Owner(NamedTuple):
    """User and group. Files are accessed with their rights."""

    uid: int
    gid: int


@contextlib.contextmanager
def acting_as(owner: Owner | None) -> Iterator[None]:
    """Access files with a user's rights, in this thread only. Do not await inside the block.

    The kernel enforces this: without root's file system uid, a thread has none of root's rights to
    files (capabilities(7)). So no link, race or name opens anything that the owner could not
    open.
    """
    if owner is None:
        yield
        return
    before = _current_owner()
    try:
        _set_owner(owner)
        if _current_owner() != owner:
            raise PermissionError(errno.EPERM, f"cannot act as uid {owner.uid}")
        yield
    finally:
        _set_owner(before)
        if _current_owner() != before:
            os.abort()  # a thread that keeps another user's rights must not continue


def _set_owner(owner: Owner) -> None:
    _LIBC.setfsgid(ctypes.c_uint32(owner.gid))
    _LIBC.setfsuid(ctypes.c_uint32(owner.uid))


def _current_owner() -> Owner:
    query = ctypes.c_uint32(_QUERY_ID)
    return Owner(_LIBC.setfsuid(query) & _QUERY_ID, _LIBC.setfsgid(query) & _QUERY_ID)


def owner_of(path: Path) -> Owner | None:
    """Return the owner of a folder, or None if the agent owns it or it is missing.

    The folder has to lie in a folder of the agent, so that others cannot replace it.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    own = status.st_uid == os.geteuid() or not stat.S_ISDIR(status.st_mode)
    return None if own else Owner(status.st_uid, status.st_gid)


def read_small(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a regular file that any process might have written.

    Raises:
        OSError: if it is not a regular file, or is larger than `most` bytes.
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
    """Write a private file atomically, replacing an existing one."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    fresh.rename(path)


def make_folder(path: Path, owner: Owner | None) -> None:
    """Create a folder for `owner` (None: the agent). An existing folder and its files change owner.

    The folder has to lie in a folder of the agent.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
        if owner is not None:
            os.chown(path, *owner, follow_symlinks=False)
        return
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "not a folder", str(path))
    if owner is not None and status.st_uid != owner.uid:  # after a change of settings or release
        words = ["chown", "-R", "-h", "-P", "--", f"{owner.uid}:{owner.gid}", str(path)]
        done = subprocess.run(words, capture_output=True, check=False)  # noqa: S603
        if done.returncode:
            raise OSError(errno.EPERM, f"cannot be given to uid {owner.uid}", str(path))


def remove_tree(path: Path) -> None:
    """Delete a folder as far as possible, without following links."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:  # deeper than Python's recursion limit
        subprocess.run(["rm", "-rf", "--", str(path)], capture_output=True, check=False)  # noqa: S603, S607


def remove_shared(uid: int, folders: Sequence[Path] = SHARED_FOLDERS) -> None:
    """Remove what a uid without processes left in folders of all users and in System V IPC.

    A process with that uid deletes the files, so that it can delete nothing else.
    """
    as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    where = [str(folder) for folder in folders if folder.is_dir()]
    own = ["-mindepth", "1", "-maxdepth", "1", "-uid", str(uid)]
    repair = ["-type", "d", "-exec", "chmod", "-R", "u+rwX", "--", "{}", "+"]
    for action in (repair, ["-exec", "rm", "-rf", "--one-file-system", "--", "{}", "+"]):
        command = [*as_user, "find", *where, *own, *action]
        subprocess.run(command, capture_output=True, check=False, cwd="/")  # noqa: S603
    for kind, (option, column) in SHARED_OBJECTS.items():
        numbers = _objects_of(uid, kind, column)
        for at in range(0, len(numbers), OBJECTS_AT_ONCE):
            words = [word for one in numbers[at : at + OBJECTS_AT_ONCE] for word in (option, one)]
            subprocess.run(["ipcrm", *words], capture_output=True, check=False)  # noqa: S603, S607


def _objects_of(uid: int, kind: str, column: str) -> list[str]:
    """Return the ids of System V objects that a uid created (sysvipc(7))."""
    try:
        header, *rows = Path(f"/proc/sysvipc/{kind}").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    names = header.split()
    found = [dict(zip(names, row.split(), strict=False)) for row in rows]
    return [row[column] for row in found if row.get("cuid") == str(uid)]


def bytes_below(folder: Path) -> int:
    """Return the disk space that files at any depth below a folder use, without following links."""
    total, waiting = 0, [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # deeper than a path can say
                return _bytes_by_find(folder)
    return total


def _bytes_by_find(folder: Path) -> int:
    command = ["find", str(folder), "!", "-type", "d", "-printf", "%b\\n"]  # blocks of 512 bytes
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return 512 * sum(map(int, found.stdout.split()))


def bytes_of(uid: int, folders: Iterable[Path], most: int, skipped: Iterable[Path] = ()) -> int:
    """Return the disk space of a user's files and folders below `folders`.

    Links and other file systems are not entered, nor folders in `skipped`, which have to be
    resolved. The search ends early if the sum exceeds `most`, or after `MAX_SEARCH_S`.
    """
    if not (where := sorted({str(folder.resolve()) for folder in folders})):
        return 0
    omit = [word for path in skipped for word in ("-path", str(path), "-prune", "-o")]
    search = ["find", *where, "-xdev", *omit, "-uid", str(uid), "-printf", "%b\\n"]
    total = 0
    with subprocess.Popen(  # noqa: S603
        ["timeout", str(MAX_SEARCH_S), *search],  # noqa: S607
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as found:
        for blocks in found.stdout or ():
            total += 512 * int(blocks)
            if total > most:
                found.terminate()
                break
    return total
