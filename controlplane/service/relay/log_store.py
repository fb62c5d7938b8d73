"""Store of jobs' output. Each stream has a folder, with a raw file and an index for each worker.

The size of a worker's file says how much is stored, so a restart does not read the output.
The index has times and the order of output among workers. An entry covers the bytes since the
previous one. Entries are written after `INDEX_BYTES` or `INDEX_S`, before a page is read, and when
the output ends. Bytes that a crash left without an entry get an entry with the file's time.

A damaged entry is skipped. Its bytes then belong to the next entry, so only their time is lost.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import shutil
import struct
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from schemas.host.files import AgedFile
from schemas.ids import JobId, Rank, Version
from schemas.wire.feed import LogPiece

INDEX_BYTES: Final = 64 << 10  # a worker's output without an entry can exceed this by one chunk
INDEX_S: Final = 0.5  # longest time for which a stream's output has no entry
MAX_PIECE_BYTES: Final = 1 << 20  # read per entry; an entry covers more only after damage
MAX_OPEN: Final = 50_000  # streams kept in memory, about 1 KB each
INDEX_SUFFIX: Final = ".index"
NAME: Final = re.compile(r"\d+\.\d+")  # name of a worker's file: version and rank
NUMBERS: Final = struct.Struct(">QQ")  # `order` and `end` of an entry
ENTRY_BYTES: Final = NUMBERS.size + 4  # includes a CRC-32
BLOCK_BYTES: Final = 64 << 10  # read at a time for one page, less if many workers share it
MAX_PIECES: Final = 2000  # on one page; each takes some microseconds of the event loop
BLOCK_ENTRIES: Final = 256  # entries to read at once
ENDED: Final = 1 << 63  # flag of `end`: the output is complete
MICROSECONDS: Final = 1_000_000  # per second
NO_WORKER: Final = (0, 0)  # key of the notes, which no worker wrote
WorkerKey = tuple[int, int]  # (version, rank)

log = structlog.get_logger("log_store")


class Entry(NamedTuple):
    """Entry of an index, which says when the worker's bytes up to `end` were stored."""

    order: int  # microseconds since the epoch, unique and increasing in a stream
    end: int  # bytes
    ended: bool = False

    def encode(self) -> bytes:
        """Return the entry with its checksum."""
        data = NUMBERS.pack(self.order, self.end | (ENDED if self.ended else 0))
        return data + zlib.crc32(data).to_bytes(4, "big")

    @classmethod
    def decode(cls, data: bytes) -> Entry | None:
        """Return the entry, or None if it is damaged."""
        if zlib.crc32(data[:-4]).to_bytes(4, "big") != data[-4:]:
            return None
        order, end = NUMBERS.unpack_from(data)
        return cls(order, end & ~ENDED, ended=bool(end & ENDED))


@dataclass(slots=True, eq=False)
class _Output:
    """Output of one worker, in a file of bytes with an index."""

    path: Path
    size: int = 0  # bytes stored
    dropped: int = 0  # bytes accepted but not stored, beyond the stream's bound
    index_size: int = 0  # bytes
    last: Entry = Entry(0, 0)

    @property
    def accepted(self) -> int:
        return self.size + self.dropped

    @property
    def pending(self) -> int:
        """Number of stored bytes without an index entry."""
        return self.size - self.last.end

    @property
    def index(self) -> Path:
        return self.path.with_name(self.path.name + INDEX_SUFFIX)

    def load(self, index_size: int) -> None:
        """Read the last entry. Remove the entries of bytes that no longer exist."""
        self.index_size = index_size - index_size % ENTRY_BYTES
        count = self._count_until(self.size, lambda entry: entry.end)
        self.last = self._entry_until(count - 1)
        if index_size != count * ENTRY_BYTES:
            log.warning("stored output ends before its index", file=str(self.index))
            os.truncate(self.index, count * ENTRY_BYTES)
            self.index_size = count * ENTRY_BYTES

    def entries(self, order: int) -> Iterator[tuple[Entry, _Output, int]]:
        """Yield each entry above `order`, together with this output and the start of its bytes."""
        first = self._count_until(order, lambda entry: entry.order)
        start = self._entry_until(first - 1).end
        for at in range(first, self.index_size // ENTRY_BYTES, BLOCK_ENTRIES):
            for entry in self._entries(at, BLOCK_ENTRIES):
                if entry is not None:
                    yield entry, self, start
                    start = entry.end

    def read(
        self, start: int, end: int, ahead: dict[_Output, tuple[int, bytes]], block_bytes: int
    ) -> bytes:
        """Return stored bytes. If some are lost, begin with a note that says how many.

        `ahead` caches the last block that was read from each output, with the offset of the block,
        so that few reads from the disk are needed for a page of output.
        """
        begin = max(start, end - MAX_PIECE_BYTES)
        at, block = ahead.get(self, (0, b""))
        if not at <= begin <= end <= at + len(block):
            at, block = begin, _read(self.path, begin, max(end - begin, block_bytes))
            ahead[self] = at, block
        data = block[begin - at : end - at]
        lost = end - start - len(data)
        note = f"[ones: {lost} bytes of stored output cannot be read]\n" if lost else ""
        return note.encode() + data

    def _count_until(self, most: int, key: Callable[[Entry], int]) -> int:
        """Return how many of the first entries have a key of at most `most`."""
        numbers = range(self.index_size // ENTRY_BYTES)
        return bisect_right(numbers, most, key=lambda number: key(self._entry_until(number)))

    def _entry_until(self, number: int) -> Entry:
        """Return the last undamaged entry among the first `number` entries."""
        while number >= 0:
            (entry,) = self._entries(number, 1)
            if entry is not None:
                return entry
            number -= 1
        return Entry(0, 0)

    def _entries(self, first: int, count: int) -> list[Entry | None]:
        data = _read(self.index, first * ENTRY_BYTES, count * ENTRY_BYTES)
        places = range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES)
        return [Entry.decode(data[at : at + ENTRY_BYTES]) for at in places]


@dataclass(slots=True)
class _Stream:
    outputs: dict[WorkerKey, _Output] = field(default_factory=dict)
    bytes_kept: int = 0  # output and indexes
    order: int = 0  # `order` of the last entry
    pending: dict[WorkerKey, float] = field(default_factory=dict)  # time of the first byte


class LogStore:
    """Output streams of all jobs. Each is opened on first use.

    Output of a stream beyond `max_bytes` is accepted but dropped. At most `known` streams stay
    open; others are opened again on their next use.
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
        self._streams: dict[str, _Stream] = {}

    def stored(self, job: JobId, stream: str, who: WorkerKey) -> tuple[int, bool]:
        """Return how many bytes of a worker's output are stored, and whether they are all of it."""
        output = self._open(job, stream).outputs.get(who)
        return (output.accepted, output.last.ended) if output else (0, False)

    def full(self, job: JobId, stream: str) -> bool:
        """True if the stream has reached its bound."""
        return self._open(job, stream).bytes_kept >= self.max_bytes

    def append(self, job: JobId, stream: str, who: WorkerKey, offset: int, data: bytes) -> int:
        """Store the new part of `data`. Return how many bytes of the worker's output are stored.

        A chunk that would leave a gap, or is already stored, changes nothing. `offset` is the
        position of `data` in the worker's own file.

        Raises:
            OSError: if the file cannot be written; nothing was stored.
        """
        found, output = self._output(job, stream, who)
        have = output.accepted
        if offset > have or offset + len(data) <= have:
            return have
        fresh = data[have - offset :]
        if found.bytes_kept >= self.max_bytes:
            output.dropped += len(fresh)
            return output.accepted
        self._store(found, who, fresh)
        if found.bytes_kept >= self.max_bytes:
            note = f"\n[ones: output beyond {self.max_bytes} bytes of a job is not kept]\n"
            self._output(job, stream, NO_WORKER)
            self._store(found, NO_WORKER, note.encode())
        return output.accepted

    def end(self, job: JobId, stream: str, who: WorkerKey, size: int) -> bool:
        """Record that a worker's output ends at `size` bytes. Return False while output is missing.

        A full stream accepts any end.
        """
        found, output = self._output(job, stream, who)
        if output.accepted < size and found.bytes_kept < self.max_bytes:
            return False
        if not output.last.ended:
            self._index(found, who, found.pending.get(who, self._now()), ended=True)
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
            rank: return the output of this rank only; None: of all ranks.
            cursor: order of the last entry of the previous page, or 0 for the start.
            max_bytes: maximum bytes of output, except that a single piece may be larger.
            since: return output that was stored at this time or later, seconds since the epoch.
        """
        found = self._open(job, stream)
        self._index_pending(found)
        cursor = max(0, cursor, int(since * MICROSECONDS) - 1)
        pieces: list[LogPiece] = []
        left, ahead = max_bytes, dict[_Output, tuple[int, bytes]]()
        chosen = {
            output: who
            for who, output in found.outputs.items()
            if rank in (None, who[1]) or who == NO_WORKER
        }
        block_bytes = min(BLOCK_BYTES, max_bytes // max(1, len(chosen)))
        for entry, output, start in heapq.merge(*(one.entries(cursor) for one in chosen)):
            if pieces and (entry.end - start > left or len(pieces) >= MAX_PIECES):
                return pieces, cursor
            if entry.end > start:
                data = output.read(start, entry.end, ahead, block_bytes)
                left -= len(data)
                version, of_rank = chosen[output]
                pieces.append(
                    LogPiece(
                        version=Version(version),
                        rank=Rank(of_rank),
                        offset=start,
                        data=data,
                        time=entry.order / MICROSECONDS,
                    )
                )
            cursor = entry.order
        return pieces, min(cursor, found.order)

    def usage(self) -> list[AgedFile]:
        """Return the folder of each stream with its size and last change. Safe in a thread."""
        found = []
        for folder in _files(self.folder):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                files = [file.stat() for file in _files(Path(folder))]
                at = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
                size = sum(file.st_size for file in files)
                found.append(AgedFile(folder.name, size, at))
        return found

    def forget(self, name: str) -> None:
        """Delete the folder of an ended job's stream, if any. Later output starts a new folder."""
        self._streams.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / name)

    def _open(self, job: JobId, stream: str) -> _Stream:
        name = f"{job}.{stream}"
        found = self._streams.pop(name, None)
        if found is None:
            found = self._load(self.folder / name)
        self._streams[name] = found  # in order of last use
        if len(self._streams) > self._known:
            self._index_pending(self._streams.pop(next(iter(self._streams))))
        return found

    def _load(self, folder: Path) -> _Stream:
        found = _Stream()
        files = {file.name: file.stat() for file in _files(folder)}
        for name in {name.removesuffix(INDEX_SUFFIX) for name in files}:
            if not NAME.fullmatch(name):
                continue
            version, _, rank = name.partition(".")
            who, data, index = (int(version), int(rank)), files.get(name), name + INDEX_SUFFIX
            output = found.outputs[who] = _Output(folder / name, data.st_size if data else 0)
            output.load(files[index].st_size if index in files else 0)
            found.bytes_kept += output.size + output.index_size
            found.order = max(found.order, output.last.order)
            if data and output.pending:
                found.pending[who] = data.st_mtime
        return found

    def _output(self, job: JobId, stream: str, who: WorkerKey) -> tuple[_Stream, _Output]:
        found = self._open(job, stream)
        output = found.outputs.get(who)
        if output is None:
            folder = self.folder / f"{job}.{stream}"
            folder.mkdir(mode=0o700, exist_ok=True)
            output = found.outputs[who] = _Output(folder / f"{who[0]}.{who[1]}")
        return found, output

    def _store(self, found: _Stream, who: WorkerKey, data: bytes) -> None:
        output, now = found.outputs[who], self._now()
        _append(output.path, data, output.size)
        output.size += len(data)
        found.bytes_kept += len(data)
        oldest = next(iter(found.pending.values()), now)
        found.pending.setdefault(who, now)
        if output.pending >= INDEX_BYTES or now - oldest >= INDEX_S:
            self._index_pending(found)

    def _index_pending(self, found: _Stream) -> None:
        """Write the missing entries. If the disk is full, the next call tries again."""
        with contextlib.suppress(OSError):
            for who, at in list(found.pending.items()):
                self._index(found, who, at)

    def _index(self, found: _Stream, who: WorkerKey, at: float, *, ended: bool = False) -> None:
        output = found.outputs[who]
        order = max(found.order + 1, int(at * MICROSECONDS))
        ends = [*range(output.last.end + INDEX_BYTES, output.size, INDEX_BYTES), output.size]
        entries = [Entry(order + n, end) for n, end in enumerate(ends)]
        entries[-1] = entries[-1]._replace(ended=ended)
        data = b"".join(entry.encode() for entry in entries)
        _append(output.index, data, output.index_size)
        output.index_size += len(data)
        found.bytes_kept += len(data)
        output.last = entries[-1]
        found.order = output.last.order
        found.pending.pop(who, None)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as files:
            return list(files)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, start)


def _append(path: Path, data: bytes, size: int) -> None:
    """Append to a file of `size` bytes. After an error, truncate the file to `size` again."""
    with path.open("ab", buffering=0) as file:
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)
            raise
