"""Files of states: what a model is after a unit, as raw frames behind a header that checks them.

A file is there whole or not at all: it is written beside its place, made durable, and renamed. Who
reads one checks it against the digest in its header, so a damaged file is no state.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from schemas.errors import OnesError

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

HEADER: Final = struct.Struct(">8s32sI")  # magic, SHA-256 of all frames, how many there are
SIZE: Final = struct.Struct(">Q")  # of each of them, bytes
MAGIC: Final = b"ONESst\x00\x01"
MAX_FRAMES: Final = 1 << 20
CHUNK: Final = 1 << 20  # bytes that are looked at at once
UNFINISHED: Final = ".new"
_NAME: Final = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,12})\.state")


class DamagedStateError(OnesError):
    """Bytes that are no state, or not the one that they should be."""

    code = "damaged_state"


@dataclass(frozen=True, slots=True, order=True)
class StateFile:
    """Whose state a file has: of a trial after so many visits, as an attempt left it."""

    trial: int
    version: int
    attempt: int  # at the unit; 0: a copy of another node's

    @property
    def name(self) -> str:
        """Of the file, in the folder of its job."""
        return f"{self.trial}-{self.version}-{self.attempt}.state"

    @classmethod
    def of(cls, name: str) -> StateFile | None:
        """What a file's name says; None: it is no state's.

        Args:
            name: as `name` gave it, maybe of a file that is not finished.
        """
        found = _NAME.fullmatch(name.removesuffix(UNFINISHED))
        return cls(*map(int, found.groups())) if found else None


def header_of(frames: Frames, digest: str) -> bytes:
    """What stands before the frames in a file and on the way.

    Args:
        digest: SHA-256 of them, hexadecimal.
    """
    sizes = b"".join(SIZE.pack(len(frame)) for frame in frames)
    return HEADER.pack(MAGIC, bytes.fromhex(digest), len(frames)) + sizes


def read_frames(content: Buffer, digest: str = "") -> list[memoryview]:
    """The frames of a file's content, without copies; each byte is checked.

    Args:
        digest: that they should have, hexadecimal; empty: the one in the header.

    Raises:
        DamagedStateError: if they have another, or it is no state.
    """
    own, frames = split_frames(content)
    whole = hashlib.sha256()
    for frame in frames:
        whole.update(frame)
    require_digest(whole.hexdigest(), digest or own)
    return frames


def split_frames(content: Buffer) -> tuple[str, list[memoryview]]:
    """The digest that a file's header names, and its frames, which are not looked at.

    Raises:
        DamagedStateError: if it is no state, or cut.
    """
    view = memoryview(content)
    own, sizes = _parse_header(view[: HEADER.size], view[HEADER.size :])
    start = HEADER.size + SIZE.size * len(sizes)
    if len(view) != start + sum(sizes):
        raise DamagedStateError("a state that is cut", "it is fetched or trained again")
    frames = []
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return own, frames


def header_size(start: Buffer) -> int | None:
    """Bytes before the first frame; None: too little of the file is there to say."""
    if len(start) < HEADER.size:
        return None
    return int(HEADER.size + SIZE.size * HEADER.unpack_from(start)[2])


def require_digest(found: str, wanted: str) -> None:
    """Refuse frames with another digest.

    Args:
        found: SHA-256, hexadecimal.

    Raises:
        DamagedStateError: if they differ.
    """
    if found != wanted:
        what = f"a state whose digest is {found[:12]}, not {wanted[:12]}"
        raise DamagedStateError(what, "it is fetched or trained again")


def _parse_header(fixed: Buffer, rest: Buffer) -> tuple[str, list[int]]:
    """Digest and sizes."""
    if len(fixed) == HEADER.size:
        magic, digest, count = HEADER.unpack(fixed)
        if magic == MAGIC and count <= MAX_FRAMES and len(rest) >= count * SIZE.size:
            sizes = [size for (size,) in SIZE.iter_unpack(rest[: count * SIZE.size])]
            return digest.hex(), sizes
    raise DamagedStateError("no file of a state", "it is fetched or trained again")


def write_state(folder: Path, file: StateFile, frames: Frames, digest: str) -> int:
    """Make a state durable in `folder`; returns the bytes of its frames.

    Args:
        folder: of the job; made if it is not there.
        file: whose it is; one that is there is replaced.
        digest: SHA-256 of them, hexadecimal.

    Raises:
        OSError: if the disk does not take it; nothing is left of it then.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = folder / (file.name + UNFINISHED)
    try:
        with fresh.open("wb") as target:
            target.write(header_of(frames, digest))
            for frame in frames:
                target.write(frame)
            target.flush()
            os.fsync(target.fileno())
        fresh.replace(folder / file.name)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return sum(map(len, frames))


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable.

    Args:
        folder: in which a file was made or renamed.

    Raises:
        OSError: if the disk does not take it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def states_in(folder: Path) -> Iterator[tuple[StateFile, Path]]:
    """The files of states in `folder`, finished or not; a folder that is not there has none."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if (file := StateFile.of(path.name)) is not None:
                yield file, path


def digest_of(path: Path) -> str | None:
    """The digest in a file's header; None: it is not finished, cut, or no state.

    Args:
        path: of the file. Its frames are not looked at, only how long they are.
    """
    if path.name.endswith(UNFINISHED):
        return None
    try:
        with _open(path) as file:
            fixed = file.read(HEADER.size)
            count = HEADER.unpack(fixed)[2] if len(fixed) == HEADER.size else 0
            digest, sizes = _parse_header(fixed, file.read(SIZE.size * min(count, MAX_FRAMES)))
            size = os.fstat(file.fileno()).st_size
    except (OSError, DamagedStateError):
        return None
    return digest if size == HEADER.size + SIZE.size * len(sizes) + sum(sizes) else None


def find_state(folder: Path, trial: int, version: int, digest: str) -> Path | None:
    """The file of a state, by its header; None: it is not there.

    Args:
        version: visits that it has behind it.
        digest: SHA-256 of its frames, hexadecimal.
    """
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.name.startswith(f"{trial}-{version}-")]
    except FileNotFoundError:
        return None
    paths = (folder / name for name in sorted(names) if StateFile.of(name) is not None)
    return next((path for path in paths if digest_of(path) == digest), None)


def map_state(path: Path) -> memoryview:
    """The content of a file, mapped into memory; it stays while somebody has the view.

    Raises:
        OSError: if it is gone, or cannot be read.
    """
    with _open(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_piece(path: Path, offset: int, most: int) -> tuple[int, bytes]:
    """Some of a file that its owner may cut meanwhile: what is mapped then ends who reads it.

    Args:
        offset: from its start, bytes.
        most: bytes.

    Returns:
        How long the file is, and what it has there.

    Raises:
        OSError: if it is gone, or cannot be read.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, os.pread(file.fileno(), most, offset) if offset < size else b""


def check_file(path: Path, digest: str) -> None:
    """Look at each byte of a file, none of which is kept.

    Args:
        digest: SHA-256 that its frames should have, hexadecimal.

    Raises:
        DamagedStateError: if they have another, or it is no state.
        OSError: if it cannot be read.
    """
    with _open(path) as file:
        fixed = file.read(HEADER.size)
        count = HEADER.unpack(fixed)[2] if len(fixed) == HEADER.size else 0
        _, sizes = _parse_header(fixed, file.read(SIZE.size * min(count, MAX_FRAMES)))
        whole, left = hashlib.sha256(), sum(sizes)
        while left and (part := file.read(min(left, CHUNK))):
            whole.update(part)
            left -= len(part)
        if left or file.read(1):
            raise DamagedStateError("a state is cut, or longer than its header says")
    require_digest(whole.hexdigest(), digest)


def _open(path: Path) -> BinaryIO:
    """A regular file at once, or an error: who wrote it may have put a FIFO in its place."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "no regular file", str(path))
