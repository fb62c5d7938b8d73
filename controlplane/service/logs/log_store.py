"""A job's output as one file: pieces of its workers in the order in which they arrived.

A file is a row of records: 4 bytes big-endian header length, a MessagePack header
`[version, rank, offset, size, ended, time]`, then `size` bytes; older records have no time. A torn
last record is cut off when the file is opened; its bytes come again, because the agent keeps them
until they are stored.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from schemas.ids import JobId, Rank, Version
from schemas.messages.logs import LogPiece

LENGTH: Final = struct.Struct(">I")
Who = tuple[int, int]  # (version, rank)


class _Header(msgspec.Struct, array_like=True, frozen=True):
    version: int
    rank: int
    offset: int  # in the worker's own file, bytes
    size: int  # of the data that follow, bytes
    ended: bool
    time: float = 0.0  # when it was stored, seconds since the epoch; 0: not known


_header: Final = msgspec.msgpack.Decoder(_Header)


@dataclass(slots=True)
class _Stream:
    path: Path
    size: int = 0  # of the file
    bytes_kept: int = 0  # of output
    stored: dict[Who, int] = field(default_factory=dict)  # end of each worker's output
    ended: set[Who] = field(default_factory=set)


class LogStore:
    """All streams of all jobs, each opened when it is first used.

    Args:
        folder: where their files are; it is made if there is none.
        max_bytes: output kept of one stream of one job; what is beyond is taken and dropped.
        now: seconds since the epoch, kept with what is stored.
    """

    def __init__(self, folder: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._now = now
        self._streams: dict[tuple[JobId, str], _Stream] = {}

    def stored(self, job: JobId, stream: str, who: Who) -> tuple[int, bool]:
        """How far a worker's output is here, in bytes, and whether that is its end.

        Args:
            job: whose output it is.
            stream: log or samples.
            who: version and rank of the worker; one that sent nothing has 0 bytes here.
        """
        found = self._open(job, stream)
        return found.stored.get(who, 0), who in found.ended

    def append(self, job: JobId, stream: str, who: Who, offset: int, data: bytes) -> int:
        """Store what is new in `data`; a chunk that leaves a gap, or is old, changes nothing.

        Args:
            job: whose output it is.
            stream: log or samples.
            who: version and rank of the worker.
            offset: of `data` in the worker's own file, bytes.
            data: any number of bytes.

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
        if found.bytes_kept >= self._max_bytes:
            found.stored[who] = have + len(fresh)  # beyond the bound: taken, and not kept
            return found.stored[who]
        self._write(found, who, have, fresh, ended=False)
        found.bytes_kept += len(fresh)
        if found.bytes_kept >= self._max_bytes:
            note = f"\n[ones: output beyond {self._max_bytes} bytes of a job is not kept]\n"
            self._write(found, who, have + len(fresh), note.encode(), ended=False)
        found.stored[who] = have + len(fresh)
        return found.stored[who]

    def end(self, job: JobId, stream: str, who: Who, size: int) -> bool:
        """Note that a worker's output ends at `size` bytes; False while some of it is missing.

        Args:
            job: whose output it is.
            stream: log or samples.
            who: version and rank of the worker.
            size: of the worker's own file, bytes.

        Raises:
            OSError: if the disk does not take it.
        """
        found = self._open(job, stream)
        have = found.stored.setdefault(who, 0)
        if have < size:
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
            job: whose output it is.
            stream: log or samples.
            rank: only of this worker; None: of all.
            cursor: position in the job's file, bytes; 0 is the start.
            max_bytes: of output; one piece may be larger.
            since: only what was stored then or later, seconds since the epoch.

        Returns:
            Pieces from `cursor` on, and the cursor behind them.
        """
        found = self._open(job, stream)
        pieces: list[LogPiece] = []
        taken = 0
        if not found.path.exists() or cursor >= found.size:
            return pieces, max(0, min(cursor, found.size))
        with found.path.open("rb") as file:
            file.seek(max(cursor, 0))
            position = max(cursor, 0)
            for head, end in _records(file, found.size):
                wanted = head.size and rank in (None, head.rank) and head.time >= since
                if wanted and taken and taken + head.size > max_bytes:
                    break
                if wanted:
                    pieces.append(_piece(head, file.read(head.size)))
                    taken += head.size
                position = end
        return pieces, position

    def _open(self, job: JobId, stream: str) -> _Stream:
        found = self._streams.get((job, stream))
        if found is None:
            found = _Stream(self._folder / f"{job}.{stream}")
            if found.path.exists():
                _scan(found)
            self._streams[job, stream] = found
        return found

    def _write(self, found: _Stream, who: Who, offset: int, data: bytes, *, ended: bool) -> None:
        header = msgspec.msgpack.encode(_Header(*who, offset, len(data), ended, self._now()))
        record = LENGTH.pack(len(header)) + header + data
        with found.path.open("ab", buffering=0) as file:
            try:
                left = memoryview(record)
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(found.size)
                raise
        found.size += len(record)


def _piece(head: _Header, data: bytes) -> LogPiece:
    version, rank = Version(head.version), Rank(head.rank)
    return LogPiece(version=version, rank=rank, offset=head.offset, data=data)


def _scan(found: _Stream) -> None:
    size = found.path.stat().st_size
    with found.path.open("r+b") as file:
        for head, end in _records(file, size):
            who = (head.version, head.rank)
            found.stored[who] = max(found.stored.get(who, 0), head.offset + head.size)
            found.bytes_kept += head.size
            if head.ended:
                found.ended.add(who)
            found.size = end
        file.truncate(found.size)


def _records(file: BinaryIO, size: int) -> Iterator[tuple[_Header, int]]:
    """The headers of all whole records, each with the position behind its data."""
    position = file.tell()
    while position + LENGTH.size <= size:
        file.seek(position)
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        try:
            header = _header.decode(file.read(length))
        except msgspec.DecodeError:
            return
        end = position + LENGTH.size + length + header.size
        if end > size or min(header.version, header.rank, header.offset, header.size) < 0:
            return
        yield header, end
        position = end
