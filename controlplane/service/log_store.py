"""Output of jobs: one append-only file per stream, with the pieces of all workers by arrival.

A file is a sequence of records: 4 bytes big-endian header length, a MessagePack header `[version,
rank, offset, size, ended, time]`, then `size` bytes; older records have no time.

A torn last record is cut off when the file is opened. Its bytes arrive again, because the agent
keeps them until they are stored. Other damage stays in the file and is skipped: a page contains a
note in its place and continues behind it.
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
MAX_HEADER_BYTES: Final = 64  # six numbers take at most 40 bytes
RECORD_START: Final = re.compile(rb"\0\0\0[\x06-\x40][\x95\x96]")  # of a record
WINDOW_BYTES: Final = 1 << 20  # bytes searched at once
CONSECUTIVE: Final = 3  # consecutive records that are no coincidence
WorkerKey = tuple[int, int]  # (version, rank)


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Header of a record: the worker and its data."""

    version: int
    rank: int
    offset: int  # in the worker's own file, bytes
    size: int  # of the data that follows, bytes
    ended: bool
    time: float = 0.0  # stored at, seconds since the epoch; 0: unknown


_header: Final = msgspec.msgpack.Decoder(Header)


def record(who: WorkerKey, offset: int, data: bytes, *, ended: bool, now: float) -> bytes:
    """Return one encoded record.

    `offset` is the position of `data` in the worker's own file; the record that marks its end has
    no data.
    """
    header = msgspec.msgpack.encode(Header(*who, offset, len(data), ended, now))
    return LENGTH.pack(len(header)) + header + data


def intact_records(file: BinaryIO, position: int, size: int) -> Iterator[tuple[Header, int]]:
    """Yield headers up to the first incomplete record, each with the position after its record.

    The caller may move the file position between two records.
    """
    while (header := _header_at(file, position, size)) is not None:
        end = position + LENGTH.size + _length_at(file, position) + header.size
        if end > size:
            return
        file.seek(end - header.size)
        yield header, end
        position = end


def is_torn(file: BinaryIO, position: int, size: int) -> bool:
    """True if the bytes from `position` to the end of the file are the beginning of a record."""
    if size - position < LENGTH.size:
        return True
    length = _length_at(file, position)
    if not 0 < length <= MAX_HEADER_BYTES:
        return False
    return size - position < LENGTH.size + length or _header_at(file, position, size) is not None


def next_record(file: BinaryIO, after: int, size: int) -> int:
    """Return the position of the first record after damage, or `size` if there is none."""
    position = after
    while position < size:
        file.seek(position)
        window = file.read(min(WINDOW_BYTES, size - position))
        for found in RECORD_START.finditer(window):
            if _records_follow(file, position + found.start(), size):
                return position + found.start()
        position += max(1, len(window) - LENGTH.size)
    return size


def _records_follow(file: BinaryIO, position: int, size: int) -> bool:
    """True if several consecutive records start here, or records up to the end of the file."""
    ends = [end for _, end in islice(intact_records(file, position, size), CONSECUTIVE)]
    if not ends or len(ends) == CONSECUTIVE:
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
    if length > MAX_HEADER_BYTES:
        return None
    try:
        header = _header.decode(file.read(length))
    except msgspec.DecodeError:
        return None
    sane = min(header.version, header.rank, header.offset, header.size) >= 0
    return header if sane and header.size <= MAX_BYTES else None


log = structlog.get_logger("log_store")
MARK_INTERVAL_BYTES: Final = 64 << 10  # between two known record positions
MAX_OPEN: Final = 10_000  # streams kept open
NO_WORKER: Final = (0, 0)  # sender of notes


@dataclass(slots=True)
class _Stream:
    path: Path
    size: int = 0  # of the file
    bytes_kept: int = 0  # of output
    stored: dict[WorkerKey, int] = field(default_factory=dict)  # bytes, by worker
    ended: set[WorkerKey] = field(default_factory=set)
    marks: list[int] = field(default_factory=lambda: [0])  # positions of some records
    damaged: dict[int, int] = field(default_factory=dict)  # start -> end of damage

    def record_added(self, end: int) -> None:
        """Note that a record was added that ends here."""
        self.size = end
        if end - self.marks[-1] >= MARK_INTERVAL_BYTES:
            self.marks.append(end)

    def skip_damage(self, start: int, end: int) -> None:
        """Note that no record can be read here."""
        self.damaged[start] = self.size = end
        self.marks.append(end)

    def intact_until(self, position: int) -> int:
        """Return where the readable records from `position` on end: at damage or at the end."""
        return min((start for start in self.damaged if start >= position), default=self.size)


class LogStore:
    """Output streams of all jobs, each opened on first use.

    Output of a stream beyond `max_bytes` is accepted and dropped. Streams beyond `known` are
    scanned again on their next use.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        now: Callable[[], float] = time.time,
        known: int = MAX_OPEN,
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self.max_bytes = max_bytes
        self._now = now
        self._known = known
        self._streams: dict[tuple[JobId, str], _Stream] = {}

    def stored(self, job: JobId, stream: str, who: WorkerKey) -> tuple[int, bool]:
        """Return how many bytes of a worker's output are stored, and whether that is all."""
        found = self._open(job, stream)
        return found.stored.get(who, 0), who in found.ended

    def full(self, job: JobId, stream: str) -> bool:
        """True if the stream has reached its bound."""
        return self._open(job, stream).bytes_kept >= self.max_bytes

    def append(self, job: JobId, stream: str, who: WorkerKey, offset: int, data: bytes) -> int:
        """Store the new part of `data`; return how many bytes of the worker's output are stored.

        A chunk that leaves a gap or is entirely old changes nothing. `offset` is the position of
        `data` in the worker's own file.

        Raises:
            OSError: if the file cannot be written; nothing was stored.
        """
        found = self._open(job, stream)
        have = found.stored.get(who, 0)
        if offset > have or offset + len(data) <= have:
            return have
        fresh = data[have - offset :]
        if found.bytes_kept >= self.max_bytes:
            found.stored[who] = have + len(fresh)  # beyond the bound: accepted and dropped
            return found.stored[who]
        self._write(found, who, have, fresh, ended=False)
        found.bytes_kept += len(fresh)
        if found.bytes_kept >= self.max_bytes:
            note = f"\n[ones: output beyond {self.max_bytes} bytes of a job is not kept]\n"
            self._write(found, who, have + len(fresh), note.encode(), ended=False)
        found.stored[who] = have + len(fresh)
        return found.stored[who]

    def end(self, job: JobId, stream: str, who: WorkerKey, size: int) -> bool:
        """Record that a worker's output ends at `size` bytes; return False while some is missing.

        A full stream accepts every end.

        Raises:
            OSError: if the file cannot be written.
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
        """Return one page of a stream in order of arrival, and the cursor of the next page.

        Args:
            rank: only output of this rank; None: all ranks.
            cursor: position in the stream's file, bytes; 0 is the start.
            max_bytes: of output; a single piece may be larger.
            since: only output stored at or after this time, seconds since the epoch.

        Raises:
            BadFieldError: if no record starts at the cursor.
        """
        found = self._open(job, stream)
        if not found.path.exists() or cursor >= found.size:
            return [], max(0, min(cursor, found.size))
        with found.path.open("rb") as file:
            if not _is_record_start(found, file, cursor):
                raise BadFieldError(
                    f"{cursor} is not the position of a page",
                    "start at 0 or where a page ended",
                    "cursor",
                )
            return _read_page(found, file, cursor, max_bytes, rank=rank, since=since)

    def forget(self, name: str) -> None:
        """Delete the file of an ended job, if it exists; later output starts a new file.

        Raises:
            OSError: if the file cannot be deleted.
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
        self._streams[job, stream] = found  # in order of last use
        if len(self._streams) > self._known:
            del self._streams[next(iter(self._streams))]
        return found

    def _write(
        self, found: _Stream, who: WorkerKey, offset: int, data: bytes, *, ended: bool
    ) -> None:
        data = record(who, offset, data, ended=ended, now=self._now())
        with found.path.open("ab", buffering=0) as file:
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(found.size)
                raise
        found.record_added(found.size + len(data))

    def _scan(self, found: _Stream) -> None:
        size = found.path.stat().st_size
        with found.path.open("r+b") as file:
            while found.size < size:
                for header, end in intact_records(file, found.size, size):
                    who = (header.version, header.rank)
                    found.stored[who] = max(found.stored.get(who, 0), header.offset + header.size)
                    found.bytes_kept += header.size
                    if header.ended:
                        found.ended.add(who)
                    found.record_added(end)
                if found.size == size:
                    break
                following = next_record(file, found.size + 1, size)
                if following == size and is_torn(file, found.size, size):
                    file.truncate(found.size)
                    break
                place = {"file": str(found.path), "begins": found.size, "ends": following}
                log.error("stored output is damaged", **place)
                found.skip_damage(found.size, following)


def _read_page(
    found: _Stream, file: BinaryIO, cursor: int, max_bytes: int, *, rank: Rank | None, since: float
) -> tuple[list[LogPiece], int]:
    """Return the pieces from a record or damage on, and the position after them."""
    pieces: list[LogPiece] = []
    taken, position = 0, cursor
    while position < found.size:
        for header, end in intact_records(file, position, found.intact_until(position)):
            wanted = header.size and rank in (None, header.rank) and header.time >= since
            if wanted and taken and taken + header.size > max_bytes:
                return pieces, position
            if wanted:
                pieces.append(_piece(header, file.read(header.size)))
                taken += header.size
            position = end
        if position not in found.damaged:
            break
        end = found.damaged[position]
        note = f"[ones: {end - position} bytes of stored output cannot be read]\n".encode()
        pieces.append(_piece(Header(*NO_WORKER, position, len(note), ended=False), note))
        taken, position = taken + len(note), end
    return pieces, position


def _is_record_start(found: _Stream, file: BinaryIO, cursor: int) -> bool:
    """True if a record starts at the cursor; data of jobs may look like a record."""
    if cursor < 0:
        return False
    mark = found.marks[bisect_right(found.marks, cursor) - 1]
    if mark == cursor:
        return True
    ends = (end for _, end in intact_records(file, mark, found.intact_until(mark)))
    return next((end for end in ends if end >= cursor), -1) == cursor


def _piece(header: Header, data: bytes) -> LogPiece:
    version, rank = Version(header.version), Rank(header.rank)
    return LogPiece(version=version, rank=rank, offset=header.offset, data=data, time=header.time)
