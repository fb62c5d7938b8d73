"""Archives of working directories: what may come out of one, wherever it is read."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Annotated, Final, cast

import msgspec

from schemas.errors import TooLargeError

UNREADABLE: Final = (  # what the tar, gzip and zlib modules raise of strange archives
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    tarfile.TarError,
    zlib.error,
)
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**50)]
OTHERS: Final = (b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # bzip2, xz, zstd
OVERHEAD: Final = 4096  # bytes of headers, for each file
LEAVE_OUT: Final = "leave out of it what is data (.onesignore), and read that from its own place"


class ArchiveBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What one archive may come to when it is unpacked."""

    size: Positive = 2 << 30  # bytes of all files
    files: Positive = 100_000  # and folders, and links
    depth: Positive = 64  # folders within folders


USUAL: Final = ArchiveBounds()


class ArchiveTooLargeError(TooLargeError):
    """An archive that comes to more than its bounds."""


@contextmanager
def opened(archive: IO[bytes], bounds: ArchiveBounds) -> Iterator[tarfile.TarFile]:
    """The tar file in `archive`, packed with gzip or not, of which no more is read than is allowed.

    Args:
        archive: at its beginning.
        bounds: of what comes out.

    Raises:
        ArchiveTooLargeError: while it is read, as soon as a bound is exceeded.
        OSError: or another of `UNREADABLE`, if it is none.
    """
    magic = archive.read(6)
    archive.seek(0)
    plain = cast("IO[bytes]", _decompressed(archive, magic))
    most = bounds.size + bounds.files * OVERHEAD
    with tarfile.open(fileobj=_Limited(plain, most, bounds.size), mode="r:") as tar:  # type: ignore[call-overload]
        yield tar


def members(tar: tarfile.TarFile, bounds: ArchiveBounds) -> Iterator[tarfile.TarInfo]:
    """What is in the archive, one by one, before anything of it is unpacked.

    Args:
        tar: as `opened` gave it.
        bounds: of all of it.

    Raises:
        ArchiveTooLargeError: at the member that is too much.
    """
    size = many = 0
    for member in tar:
        size, many = size + member.size, many + 1
        name = member.name[:200]
        if size > bounds.size:
            raise _too_large(f"more than {bounds.size} bytes, at {name!r}")
        if many > bounds.files:
            raise _too_large(f"more than {bounds.files} files, at {name!r}")
        if len([part for part in member.name.split("/") if part]) > bounds.depth + 1:
            raise _too_large(f"folders more than {bounds.depth} deep, at {name!r}")
        yield member


def inspect(archive: IO[bytes], bounds: ArchiveBounds) -> None:
    """Refuse an archive that no node would unpack, without unpacking it.

    Args:
        archive: at its beginning.
        bounds: of what comes out.

    Raises:
        ArchiveTooLargeError: if it exceeds one.
        OSError: or another of `UNREADABLE`, if it is none, or a link or device that leaves its
            folder is in it.
    """
    with opened(archive, bounds) as tar:
        for member in members(tar, bounds):
            tarfile.data_filter(member, "/nowhere/that/is")


def _decompressed(archive: IO[bytes], magic: bytes) -> object:
    if magic.startswith(OTHERS):  # what they ask for in memory while they are read has no bound
        raise tarfile.ReadError("pack it with gzip, or not at all")
    return gzip.GzipFile(fileobj=archive) if magic.startswith(b"\x1f\x8b") else archive


def _too_large(what: str) -> ArchiveTooLargeError:
    return ArchiveTooLargeError(f"the working directory unpacks to {what}", LEAVE_OUT, "workdir")


class _Limited:
    """A file of which no more than so many bytes exist, whatever a header says of them."""

    def __init__(self, file: IO[bytes], most: int, told: int) -> None:
        self._file = file
        self._most = most
        self._told = told

    def read(self, size: int = -1) -> bytes:
        left = self._most - self._file.tell()
        if size < 0 or size > left:
            self._refuse()
        return self._file.read(size)

    def seek(self, place: int, whence: int = 0) -> int:
        if whence == 0 and place > self._most:
            self._refuse()
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _refuse(self) -> None:
        raise _too_large(f"more than {self._told} bytes, with its headers")
