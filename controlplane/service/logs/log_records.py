"""What a job's output file is made of.

A file is a row of records: 4 bytes big-endian header length, a MessagePack header
`[version, rank, offset, size, ended, time]`, then `size` bytes; older records have no time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO, Final

import msgspec

from schemas.codec import MAX_BYTES

LENGTH: Final = struct.Struct(">I")
LONGEST_HEADER: Final = 64  # bytes; six numbers take 40 at most
BEGINNING: Final = re.compile(rb"\0\0\0[\x06-\x40][\x95\x96]")  # of a record
WINDOW: Final = 1 << 20  # bytes looked through at once
ROW: Final = 3  # records one behind the other are no chance
Who = tuple[int, int]  # (version, rank)


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Whose output the data behind it are."""

    version: int
    rank: int
    offset: int  # in the worker's own file, bytes
    size: int  # of the data that follow, bytes
    ended: bool
    time: float = 0.0  # when it was stored, seconds since the epoch; 0: not known


_header: Final = msgspec.msgpack.Decoder(Header)


def record(who: Who, offset: int, data: bytes, *, ended: bool, now: float) -> bytes:
    """One record.

    Args:
        who: version and rank of the worker.
        offset: of `data` in the worker's own file, bytes.
        data: its output; none for the mark of its end.
        now: seconds since the epoch.
    """
    header = msgspec.msgpack.encode(Header(*who, offset, len(data), ended, now))
    return LENGTH.pack(len(header)) + header + data


def whole_records(file: BinaryIO, position: int, size: int) -> Iterator[tuple[Header, int]]:
    """The headers of records up to the first that is not whole, each with the position behind it.

    Args:
        file: may be read from within the loop: where it stands does not matter.
    """
    while (header := _header_at(file, position, size)) is not None:
        end = position + LENGTH.size + _length_at(file, position) + header.size
        if end > size:
            return
        file.seek(end - header.size)
        yield header, end
        position = end


def is_torn(file: BinaryIO, position: int, size: int) -> bool:
    """Whether what begins at `position` is the beginning of a record, cut off by the file's end.

    Args:
        position: where the last whole record ends.
    """
    if size - position < LENGTH.size:
        return True
    length = _length_at(file, position)
    if not 0 < length <= LONGEST_HEADER:
        return False
    return size - position < LENGTH.size + length or _header_at(file, position, size) is not None


def next_record(file: BinaryIO, after: int, size: int) -> int:
    """Where records go on behind damage.

    Args:
        after: the first position that may be one's first byte.
        size: of the file, bytes; returned if none begins before it.
    """
    position = after
    while position < size:
        file.seek(position)
        window = file.read(min(WINDOW, size - position))
        for found in BEGINNING.finditer(window):
            if _is_row(file, position + found.start(), size):
                return position + found.start()
        position += max(1, len(window) - LENGTH.size)
    return size


def _is_row(file: BinaryIO, position: int, size: int) -> bool:
    """Whether a few records stand there one behind the other, or all that follow."""
    ends = [end for _, end in islice(whole_records(file, position, size), ROW)]
    if not ends or len(ends) == ROW:
        return bool(ends)
    return ends[-1] == size or is_torn(file, ends[-1], size)


def _length_at(file: BinaryIO, position: int) -> int:
    file.seek(position)
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    return int(length)


def _header_at(file: BinaryIO, position: int, size: int) -> Header | None:
    if position + LENGTH.size > size:
        return None
    length = _length_at(file, position)
    if length > LONGEST_HEADER:
        return None
    try:
        header = _header.decode(file.read(length))
    except msgspec.DecodeError:
        return None
    sane = min(header.version, header.rank, header.offset, header.size) >= 0
    return header if sane and header.size <= MAX_BYTES else None
