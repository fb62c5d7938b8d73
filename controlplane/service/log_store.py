"""A job's output as one file: pieces of its workers in the order in which they arrived.

A torn last record is cut off when the file is opened; its bytes come again, because the agent keeps
them until they are stored. What is damaged otherwise stays as it is and is passed over: a page says
so in its place, and goes on with what is behind.

What a job's output file is made of.

A file is a row of records: 4 bytes big-endian header length, a MessagePack header
`[version, rank, offset, size, ended, time]`, then `size` bytes; older records have no time.
"""

from __future__ import annotations

import re
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog

from schemas.codec import MAX_BYTES
from schemas.errors import BadFieldError
from schemas.ids import JobId, Rank, Version
from schemas.wire.feed import LogPiece

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


log = structlog.get_logger("log_store")
MARK_BYTES: Final = 64 << 10  # between two positions that are known to begin a record
KNOWN: Final = 10_000  # streams of which it is remembered how far they are; others are read again
NOBODY: Final = (0, 0)  # who says what no worker said


@dataclass(slots=True)
class _Stream:
    path: Path
    size: int = 0  # of the file
    bytes_kept: int = 0  # of output
    stored: dict[Who, int] = field(default_factory=dict)  # end of each worker's output
    ended: set[Who] = field(default_factory=set)
    marks: list[int] = field(default_factory=lambda: [0])  # where records begin, some of them
    damaged: dict[int, int] = field(default_factory=dict)  # where damage begins and ends

    def grows(self, end: int) -> None:
        """A record was added, and ends there."""
        self.size = end
        if end - self.marks[-1] >= MARK_BYTES:
            self.marks.append(end)

    def passes_over(self, start: int, end: int) -> None:
        """No record can be read there."""
        self.damaged[start] = self.size = end
        self.marks.append(end)

    def whole_from(self, position: int) -> int:
        """Where the records that begin at `position` come to damage, or to the end."""
        return min((start for start in self.damaged if start >= position), default=self.size)


class LogStore:
    """All streams of all jobs, each opened when it is first used.

    Args:
        folder: where their files are; it is made if there is none.
        max_bytes: output kept of one stream of one job; what is beyond is taken and dropped.
        now: seconds since the epoch, kept with what is stored.
        known: streams that are remembered; of others the files are read again.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        now: Callable[[], float] = time.time,
        known: int = KNOWN,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.max_bytes = max_bytes
        self._now = now
        self._known = known
        self._streams: dict[tuple[JobId, str], _Stream] = {}

    def stored(self, job: JobId, stream: str, who: Who) -> tuple[int, bool]:
        """How far a worker's output is here, in bytes, and whether that is its end.

        Args:
            who: version and rank of the worker; one that sent nothing has 0 bytes here.
        """
        found = self._open(job, stream)
        return found.stored.get(who, 0), who in found.ended

    def full(self, job: JobId, stream: str) -> bool:
        """Whether no more is kept of a stream."""
        return self._open(job, stream).bytes_kept >= self.max_bytes

    def append(self, job: JobId, stream: str, who: Who, offset: int, data: bytes) -> int:
        """Store what is new in `data`; a chunk that leaves a gap, or is old, changes nothing.

        Args:
            who: version and rank of the worker.
            offset: of `data` in the worker's own file, bytes.

        Returns:
            How far the worker's output is here now, bytes.

        Raises:
            OSError: if the disk does not take it; nothing was stored.
        """
        found = self._open(job, stream)
        have = found.stored.get(who, 0)
        if offset > have or offset + len(data) <= have:
            return have
        fresh = data[have - offset :]
        if found.bytes_kept >= self.max_bytes:
            found.stored[who] = have + len(fresh)  # beyond the bound: taken, and not kept
            return found.stored[who]
        self._write(found, who, have, fresh, ended=False)
        found.bytes_kept += len(fresh)
        if found.bytes_kept >= self.max_bytes:
            note = f"\n[ones: output beyond {self.max_bytes} bytes of a job is not kept]\n"
            self._write(found, who, have + len(fresh), note.encode(), ended=False)
        found.stored[who] = have + len(fresh)
        return found.stored[who]

    def end(self, job: JobId, stream: str, who: Who, size: int) -> bool:
        """Note that a worker's output ends at `size` bytes; False while some of it is missing.

        Of a stream that is full nothing is missing.

        Args:
            who: version and rank of the worker.
            size: of the worker's own file, bytes.

        Raises:
            OSError: if the disk does not take it.
        """
        found = self._open(job, stream)
        have = found.stored.setdefault(who, 0)
        if have < size and found.bytes_kept < self.max_bytes:
            return False
        if who not in found.ended:
            self._write(found, who, have, b"", ended=True)
            found.ended.add(who)
        return True

    def read(
        self,
        job: JobId,
        stream: str,
        rank: Rank | None,
        cursor: int,
        max_bytes: int,
        *,
        since: float = 0.0,
    ) -> tuple[list[LogPiece], int]:
        """One page of a stream, in the order in which it arrived.

        Args:
            rank: only of this worker; None: of all.
            cursor: position in the job's file, bytes; 0 is the start.
            max_bytes: of output; one piece may be larger.
            since: only what was stored then or later, seconds since the epoch.

        Returns:
            Pieces from `cursor` on, and the cursor behind them.

        Raises:
            BadFieldError: if no record begins there.
        """
        found = self._open(job, stream)
        if not found.path.exists() or cursor >= found.size:
            return [], max(0, min(cursor, found.size))
        with found.path.open("rb") as file:
            if not _begins(found, file, cursor):
                raise BadFieldError(
                    f"{cursor} is no position of a page",
                    "ask from 0, or where a page ended",
                    "cursor",
                )
            return _page(found, file, cursor, max_bytes, rank=rank, since=since)

    def forget(self, name: str) -> None:
        """Delete a stream of a job that has ended; what comes of it afterwards begins anew.

        Args:
            name: of its file; nothing happens if it is not there.

        Raises:
            OSError: if it cannot be deleted.
        """
        job, _, stream = name.rpartition(".")
        (self.folder / name).unlink(missing_ok=True)
        self._streams.pop((JobId(job), stream), None)

    def _open(self, job: JobId, stream: str) -> _Stream:
        found = self._streams.pop((job, stream), None)
        if found is None:
            found = _Stream(self.folder / f"{job}.{stream}")
            if found.path.exists():
                self._scan(found)
        self._streams[job, stream] = found  # the latest in use are last
        if len(self._streams) > self._known:
            del self._streams[next(iter(self._streams))]
        return found

    def _write(self, found: _Stream, who: Who, offset: int, data: bytes, *, ended: bool) -> None:
        data = record(who, offset, data, ended=ended, now=self._now())
        with found.path.open("ab", buffering=0) as file:
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(found.size)
                raise
        found.grows(found.size + len(data))

    def _scan(self, found: _Stream) -> None:
        size = found.path.stat().st_size
        with found.path.open("r+b") as file:
            while found.size < size:
                for head, end in whole_records(file, found.size, size):
                    who = (head.version, head.rank)
                    found.stored[who] = max(found.stored.get(who, 0), head.offset + head.size)
                    found.bytes_kept += head.size
                    if head.ended:
                        found.ended.add(who)
                    found.grows(end)
                if found.size == size:
                    break
                following = next_record(file, found.size + 1, size)
                if following == size and is_torn(file, found.size, size):
                    file.truncate(found.size)
                    break
                place = {"file": str(found.path), "begins": found.size, "ends": following}
                log.error("stored output is damaged", **place)
                found.passes_over(found.size, following)


def _page(
    found: _Stream,
    file: BinaryIO,
    cursor: int,
    max_bytes: int,
    *,
    rank: Rank | None,
    since: float,
) -> tuple[list[LogPiece], int]:
    """Pieces from a record or damage on, and the position behind them."""
    pieces: list[LogPiece] = []
    taken, position = 0, cursor
    while position < found.size:
        for head, end in whole_records(file, position, found.whole_from(position)):
            wanted = head.size and rank in (None, head.rank) and head.time >= since
            if wanted and taken and taken + head.size > max_bytes:
                return pieces, position
            if wanted:
                pieces.append(_piece(head, file.read(head.size)))
                taken += head.size
            position = end
        if position not in found.damaged:
            break
        end = found.damaged[position]
        note = f"[ones: {end - position} bytes of stored output cannot be read]\n".encode()
        pieces.append(_piece(Header(*NOBODY, position, len(note), ended=False), note))
        taken, position = taken + len(note), end
    return pieces, position


def _begins(found: _Stream, file: BinaryIO, cursor: int) -> bool:
    """Whether a record begins there: jobs write what they like into their data."""
    if cursor < 0:
        return False
    mark = found.marks[bisect_right(found.marks, cursor) - 1]
    if mark == cursor:
        return True
    ends = (end for _, end in whole_records(file, mark, found.whole_from(mark)))
    return next((end for end in ends if end >= cursor), -1) == cursor


def _piece(head: Header, data: bytes) -> LogPiece:
    version, rank = Version(head.version), Rank(head.rank)
    return LogPiece(version=version, rank=rank, offset=head.offset, data=data, time=head.time)
