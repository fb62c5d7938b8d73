"""Reading of the archives of working directories within fixed bounds."""

from __future__ import annotations

import gzip
import os
import posixpath
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Final, cast

import msgspec

from schemas.errors import TooLargeError

UNREADABLE: Final = (  # errors of the tar, gzip and zlib modules for invalid archives
    OSError, EOFError, ValueError, OverflowError, LookupError, RecursionError, tarfile.TarError,
    zlib.error,
)  # fmt: skip
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**50)]
UNSUPPORTED_MAGIC: Final = (b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # bzip2, xz, zstd
HEADER_BYTES_PER_FILE: Final = 4096  # average bytes of headers for each file
MAX_HEADERS: Final = 64 << 10  # limit for all headers before one file, bytes
DIGITS: Final = re.compile(rb"\d{101}")  # refused, as tarfile needs quadratic time for such numbers
FAST_HEADER_BYTES: Final = 512  # bytes; headers up to this size are parsed quickly
MAX_RECORDS: Final = 64 << 20  # bytes of all extended headers, which stay in memory
RECORD_OVERHEAD_BYTES: Final = 100  # memory of an extended header in addition to its text
COPY_BUFFER_BYTES: Final = 16 << 10  # bytes that are unpacked at once
EXCLUDE_DATA_HINT: Final = "exclude data from it (.onesignore), and read data from its own location"


class ArchiveBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one unpacked archive."""

    size: Positive = 2 << 30  # bytes of all files
    files: Positive = 100_000  # including folders and links
    depth: Positive = 64  # number of nested folders


DEFAULT_BOUNDS: Final = ArchiveBounds()


class ArchiveTooLargeError(TooLargeError):
    """An archive exceeds its bounds."""


@contextmanager
def opened(archive: IO[bytes], bounds: ArchiveBounds) -> Iterator[tarfile.TarFile]:
    """Open a tar file, with or without gzip compression, for reading within `bounds`.

    Raises:
        ArchiveTooLargeError: while reading, as soon as a bound is exceeded.
        OSError: or another error of `UNREADABLE`, if `archive` is not a tar file.
    """
    magic = archive.read(6)
    archive.seek(0)
    plain = cast("IO[bytes]", _decompressed(archive, magic))
    most = bounds.size + bounds.files * HEADER_BYTES_PER_FILE
    limited = _Limited(plain, most, bounds)
    with tarfile.open(fileobj=limited, mode="r:", copybufsize=COPY_BUFFER_BYTES) as tar:  # type: ignore[call-overload]
        yield tar


def members(tar: tarfile.TarFile, bounds: ArchiveBounds) -> Iterator[tarfile.TarInfo]:
    """Yield the entries of the archive one by one, each before it is unpacked.

    Raises:
        ArchiveTooLargeError: at the entry that exceeds a bound.
        OSError: or another error of `UNREADABLE`, at a damaged or sparse entry.
    """
    limited = cast("_Limited", tar.fileobj)
    size = many = records = 0
    for member in tar:
        limited.headers = None
        size, many = size + member.size, many + 1
        records += sum(RECORD_OVERHEAD_BYTES + len(one) for one in member.pax_headers.values())
        name = member.name[:200]
        if records > MAX_RECORDS:
            raise _too_large(f"more than {MAX_RECORDS} bytes of extended headers, at {name!r}")
        if size > bounds.size:
            raise _too_large(f"more than {bounds.size} bytes, at {name!r}")
        if many > bounds.files:
            raise _too_large(f"more than {bounds.files} files, at {name!r}")
        if len([part for part in member.name.split("/") if part]) > bounds.depth + 1:
            raise _too_large(f"folders more than {bounds.depth} deep, at {name!r}")
        if member.issparse():  # the list of its parts can be larger than the archive
            raise tarfile.ReadError(f"{name!r} is a sparse file: pack it without holes")
        yield member
        limited.headers = MAX_HEADERS


def place_of(member: tarfile.TarInfo) -> PurePosixPath:
    """Return the path of a file or folder below the folder that an archive is unpacked into.

    The filters of the tarfile module are not used: Python has them from 3.11.4 on, and Debian 12
    has 3.11.2. Links are refused even if they lead inside, because a chain of links and long names
    deceives the filters of many versions of Python (CVE-2025-4517).

    Raises:
        tarfile.TarError: if the entry is neither a file nor a folder, or lies outside.
    """
    name = member.name[:200]
    if not (member.isreg() or member.isdir()):
        raise tarfile.ReadError(f"{name!r} is a link or a device: pack files (tar --dereference)")
    if "\0" in member.name:
        raise tarfile.ReadError(f"{name!r} is no name of a file")
    place = PurePosixPath(posixpath.normpath(member.name.lstrip("/")))
    if ".." in place.parts:
        raise tarfile.ReadError(f"{name!r} is outside of the folder")
    return place


def unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Unpack a file or folder below `folder`, with the times of the archive and modes of its owner.

    Raises:
        tarfile.TarError: if `place_of` refuses the entry.
        OSError: or another error of `UNREADABLE`, if it cannot be read or written.
    """
    path = folder / place_of(member)
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of an earlier entry with this name
    source = tar.extractfile(member)
    mode = 0o700 | member.mode & 0o055 if member.mode & 0o100 else 0o600 | member.mode & 0o044
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if source is not None:
            shutil.copyfileobj(source, file, COPY_BUFFER_BYTES)
        if file.tell() != member.size:
            raise tarfile.ReadError("unexpected end of data")
        file.flush()  # a later write would change the time
        os.fchmod(descriptor, mode)
        os.utime(descriptor, (member.mtime, member.mtime))


def inspect(archive: IO[bytes], bounds: ArchiveBounds) -> None:
    """Refuse an archive that nodes would refuse to unpack, without unpacking it.

    Raises:
        ArchiveTooLargeError: if a bound is exceeded.
        OSError: or another error of `UNREADABLE`, if `archive` is not a tar file, or contains
            anything else than files and folders inside.
    """
    with opened(archive, bounds) as tar:
        for member in members(tar, bounds):
            place_of(member)


def _decompressed(archive: IO[bytes], magic: bytes) -> object:
    if magic.startswith(UNSUPPORTED_MAGIC):  # their decompressors may need unlimited memory
        raise tarfile.ReadError("unsupported compression: use gzip or none")
    return gzip.GzipFile(fileobj=archive) if magic.startswith(b"\x1f\x8b") else archive


def _too_large(what: str) -> ArchiveTooLargeError:
    return ArchiveTooLargeError(
        f"the working directory unpacks to {what}", EXCLUDE_DATA_HINT, "workdir"
    )


class _Limited:
    """File of at most `most` bytes. tarfile reads only headers from it, and seeks over contents."""

    def __init__(self, file: IO[bytes], most: int, bounds: ArchiveBounds) -> None:
        self._file = file
        self._most = most
        self._shown_limit = bounds.size
        self._all_headers = bounds.files * HEADER_BYTES_PER_FILE  # bytes that may still follow
        self.headers: int | None = MAX_HEADERS  # before the next file; None: within a file

    def read(self, size: int = -1) -> bytes:
        left = self._most - self._file.tell()
        if size < 0 or size > left:
            self._refuse()
        if self.headers is not None:
            return self._header(size)
        return self._file.read(size)

    def _header(self, size: int) -> bytes:
        self.headers, self._all_headers = (self.headers or 0) - size, self._all_headers - size
        if self.headers < 0:
            raise _too_large(f"headers of more than {MAX_HEADERS} bytes before one file")
        if self._all_headers < 0:
            self._refuse()
        data = self._file.read(size)
        if size > FAST_HEADER_BYTES and DIGITS.search(data):
            raise tarfile.ReadError("a header with a number of more than 100 digits")
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        if whence == 0 and place > self._most:
            self._refuse()
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _refuse(self) -> None:
        raise _too_large(f"more than {self._shown_limit} bytes, including headers")
