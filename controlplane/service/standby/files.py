"""Files of the state folder that a standby copies: output, archives, keys, secrets, and code.

The journal is copied input by input, so its files are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from schemas.errors import BadFieldError
from schemas.ids import Seconds
from schemas.wire import standby as wire

PIECE_BYTES: Final = 1 << 20
OWN: Final = ("journal.", "standby-")  # first parts of the names that each controller has itself
OVERLAP_S: Final = 2.0  # of two listings: a file may change in the second of its listing
MAX_LISTED: Final = 10_000  # files in one reply
UNFINISHED: Final = (".new", ".part", ".copying")


def changed(folder: Path, request: wire.PullFiles) -> wire.StoredFiles:
    """List the files that changed since a time."""
    now = Seconds(_now(folder))
    since_ns = request.since * 1e9
    found = [
        one for one in stored_files(folder) if one.mtime_ns >= since_ns and one.path > request.after
    ]
    found.sort(key=lambda one: one.path)
    return wire.StoredFiles(now=now, files=tuple(found[:MAX_LISTED]), more=len(found) > MAX_LISTED)


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the files of the folder."""
    probe = folder / "standby-clock"
    probe.touch(mode=0o600)
    return max(0.0, probe.stat().st_mtime - OVERLAP_S)


def stored_files(folder: Path) -> Iterator[wire.StoredFile]:
    """Yield the files of a state folder that a standby copies."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not Path(at, name).is_symlink()]
        for name in names:
            path = Path(at, name)
            relative = str(path.relative_to(folder))
            if not is_copied(relative):
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            yield wire.StoredFile(path=relative, size=status.st_size, mtime_ns=status.st_mtime_ns)


def is_copied(relative: str) -> bool:
    """True if a standby copies the file at a path below the state folder."""
    return not relative.startswith(OWN) and not relative.endswith(UNFINISHED)


def inside(folder: Path, relative: str) -> Path:
    """Return the path of a file of the folder.

    Raises:
        BadFieldError: if the path leads out of the folder, or the file is not copied.
    """
    path = Path(relative)
    if path.is_absolute() or ".." in path.parts or not path.parts or not is_copied(relative):
        raise BadFieldError(f"path: {relative!r:.100} is not a copied file", "", "path")
    return folder / path


def piece(folder: Path, request: wire.PullFile) -> wire.StoredPiece:
    """Return a piece of a file; its size is -1 if there is no such file."""
    path = inside(folder, request.path)
    try:
        data, total = read_piece(path, request.offset)
        mtime_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        data, total, mtime_ns = b"", -1, 0
    return wire.StoredPiece(
        path=request.path, offset=request.offset, total=total, mtime_ns=mtime_ns, data=data
    )


def read_piece(path: Path, offset: int) -> tuple[bytes, int]:
    """Return a piece of a file, and the size of the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, PIECE_BYTES, offset), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
