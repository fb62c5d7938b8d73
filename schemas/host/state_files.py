"""State files. Each has a model after a unit of a sweep, as raw frames after a header with digest.

A file is written under another name, made durable and renamed, so it is complete or does not exist.
Readers check it against the digest in its header, so that a damaged file is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from schemas.errors import OnesError
from schemas.host.files import open_regular

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

HEADER: Final = struct.Struct(">8s32sI")  # magic, SHA-256 of all frames, number of frames
SIZE: Final = struct.Struct(">Q")  # size of a frame, bytes
MAGIC: Final = b"ONESst\x00\x01"
MAX_FRAMES: Final = 1 << 20
CHUNK: Final = 1 << 20  # number of bytes that are hashed at once
UNFINISHED: Final = ".new"
_NAME: Final = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,12})\.state")


class DamagedStateError(OnesError):
    """Bytes that are not a state, or not the expected state."""

    code = "damaged_state"


@dataclass(frozen=True, slots=True, order=True)
class StateFile:
    """Identity of a state file, with trial, number of visits, and the attempt that wrote it."""

    trial: int
    version: int
    attempt: int  # attempt that wrote the file; 0: a copy from another node

    @property
    def name(self) -> str:
        """Name of the file in the folder of its job."""
        return f"{self.trial}-{self.version}-{self.attempt}.state"

    @classmethod
    def of(cls, name: str) -> StateFile | None:
        """Parse the name of a file, finished or not. Return None if it is not a state file's."""
        found = _NAME.fullmatch(name.removesuffix(UNFINISHED))
        return cls(*map(int, found.groups())) if found else None


def header_of(frames: Frames, digest: str) -> bytes:
    """Return the header that precedes the frames. `digest` is their SHA-256 in hexadecimal."""
    sizes = b"".join(SIZE.pack(len(frame)) for frame in frames)
    return HEADER.pack(MAGIC, bytes.fromhex(digest), len(frames)) + sizes


def read_frames(content: Buffer, digest: str = "") -> list[memoryview]:
    """Check each byte of a file's content, and return its frames without copying.

    Without a `digest`, the content is checked against the digest in its header.

    Raises:
        DamagedStateError: if the digest differs, or the content is not a state.
    """
    own, frames = split_frames(content)
    whole = hashlib.sha256()
    for frame in frames:
        whole.update(frame)
    require_digest(whole.hexdigest(), digest or own)
    return frames


def split_frames(content: Buffer) -> tuple[str, list[memoryview]]:
    """Return the digest in the header of a file's content, and the frames, which are not checked.

    Raises:
        DamagedStateError: if the content is not a state, or is truncated.
    """
    view = memoryview(content)
    own, sizes = _parse_header(view[: HEADER.size], view[HEADER.size :])
    start = HEADER.size + SIZE.size * len(sizes)
    if len(view) != start + sum(sizes):
        raise DamagedStateError("truncated state", "it will be fetched or trained again")
    frames = []
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return own, frames


def header_size(start: Buffer) -> int | None:
    """Return the number of bytes before the first frame, or None if `start` is too short."""
    if len(start) < HEADER.size:
        return None
    return int(HEADER.size + SIZE.size * HEADER.unpack_from(start)[2])


def require_digest(found: str, wanted: str) -> None:
    """Raise `DamagedStateError` if the digests differ."""
    if found != wanted:
        what = f"the digest of the state is {found[:12]}, not {wanted[:12]}"
        raise DamagedStateError(what, "it will be fetched or trained again")


def _parse_header(fixed: Buffer, rest: Buffer) -> tuple[str, list[int]]:
    if len(fixed) == HEADER.size:
        magic, digest, count = HEADER.unpack(fixed)
        if magic == MAGIC and count <= MAX_FRAMES and len(rest) >= count * SIZE.size:
            sizes = [size for (size,) in SIZE.iter_unpack(rest[: count * SIZE.size])]
            return digest.hex(), sizes
    raise DamagedStateError("not a state file", "it will be fetched or trained again")


def write_state(folder: Path, file: StateFile, frames: Frames, digest: str) -> int:
    """Write a state durably into `folder`, and return the number of bytes in its frames.

    The folder is created if it is missing. An existing file of the same name is replaced.

    Raises:
        OSError: if the file cannot be written. An incomplete file is removed.
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
    """Make files that were created or renamed in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def states_in(folder: Path) -> Iterator[tuple[StateFile, Path]]:
    """Yield the state files in `folder`, finished or not. A missing folder has none."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if (file := StateFile.of(path.name)) is not None:
                yield file, path


def digest_of(path: Path) -> str | None:
    """Return the digest in a file's header, or None if the file is unfinished or invalid."""
    if path.name.endswith(UNFINISHED):
        return None
    try:
        with _open(path) as file:
            digest, sizes = _read_header(file)
            size = os.fstat(file.fileno()).st_size
    except (OSError, DamagedStateError):
        return None
    return digest if size == HEADER.size + SIZE.size * len(sizes) + sum(sizes) else None


def find_state(folder: Path, trial: int, version: int, digest: str) -> Path | None:
    """Return the state file of a trial's version with this digest in its header, or None."""
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.name.startswith(f"{trial}-{version}-")]
    except FileNotFoundError:
        return None
    paths = (folder / name for name in sorted(names) if StateFile.of(name) is not None)
    return next((path for path in paths if digest_of(path) == digest), None)


def map_state(path: Path) -> memoryview:
    """Return the content of a file, mapped into memory until the view is released."""
    with _open(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_piece(path: Path, offset: int, most: int) -> tuple[int, bytes]:
    """Return the size of a file, and at most `most` bytes from `offset` on.

    The file is not mapped into memory. If its owner truncated the file meanwhile, access to the map
    would crash the reader.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, os.pread(file.fileno(), most, offset) if offset < size else b""


def check_file(path: Path, digest: str) -> None:
    """Check each byte of a file against a digest, without keeping the content in memory.

    Raises:
        DamagedStateError: if the digest differs, or the file is not a state.
        OSError: if the file cannot be read.
    """
    with _open(path) as file:
        _, sizes = _read_header(file)
        whole, left = hashlib.sha256(), sum(sizes)
        while left and (part := file.read(min(left, CHUNK))):
            whole.update(part)
            left -= len(part)
        if left or file.read(1):
            raise DamagedStateError("state is truncated, or longer than its header states")
    require_digest(whole.hexdigest(), digest)


def _open(path: Path) -> BinaryIO:
    return os.fdopen(open_regular(path), "rb")  # the owner may have replaced it by a FIFO


def _read_header(file: BinaryIO) -> tuple[str, list[int]]:
    fixed = file.read(HEADER.size)
    count = HEADER.unpack(fixed)[2] if len(fixed) == HEADER.size else 0
    return _parse_header(fixed, file.read(SIZE.size * min(count, MAX_FRAMES)))
