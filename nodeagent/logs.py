"""Transfer of worker output to the log relay.

The files are the buffer. Nothing is read before the relay has granted credit, and nothing is
deleted before the relay has stored it. So an outage of agent, relay or network delays output but
loses nothing. Output that others delete is marked as a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from nodeagent.folders import WorkerFolder
from nodeagent.owned_files import acting_as
from schemas.codec import encode
from schemas.host.files import open_regular, require_regular
from schemas.ids import NodeId, WorkerId, worker_id
from schemas.transport.sockets import Socket
from schemas.wire.feed import LOG, SAMPLES, LogChunk, LogEnded, LogHello, LogStored
from schemas.wire.worker import Assignment

log = structlog.get_logger("output")
WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_RESTARTED_BYTES: Final = 1 << 20  # bytes that are kept of a log that was restarted
NUL: Final = b"\0"
HOLE: Final = bytes(4096)
SLACK: Final = 16 << 20  # bytes beyond the limit at which a file is truncated
UNBOUNDED: Final = 1 << 62
CHUNK: Final = 256 * 1024
LOOK_S: Final = 0.05  # between checks of the files
GROWING_POLL_S: Final = 0.02  # between checks while some files grow
GROWING_S: Final = 1.0  # files are considered growing for this long after the last chunk
RETRY_S: Final = 2.0  # a request without a reply is repeated after this time
FULL_S: Final = 30.0  # between requests to a full store
GAP_S: Final = 1.0  # between gaps in a worker's log, each of which costs some milliseconds
HOLD_S: Final = 0.5  # an incomplete line is sent after this time, even while it grows
STREAMS: Final = (LOG, SAMPLES)
OUTPUTS: Final = (1, 2)  # descriptors of a worker's log in the worker


class OutputFile:
    """Output stream of a worker. If its file was deleted, the stream is read through a handle.

    The handle is this agent's own or, for a log, the worker's stdout or stderr. Output that neither
    has is a gap. A line in the worker's log reports the gap, and the stream continues after this
    line. So followers see what is missing, and a position never means two different bytes.
    """

    def __init__(self, folder: WorkerFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = None
        self._lost = False  # no more output will come
        self._end: int | None = None  # end of the kept part of a file beyond its limit
        self._next_gap_at = -math.inf

    def size(self, sent: int, most: int = UNBOUNDED, now: float = 0.0) -> int:
        """Mark a gap, truncate the file to its limit, and return its length, at least `sent`.

        `sent` bytes were sent to the controller. At most `most` bytes are kept. A call marks at
        most one gap, and none within `GAP_S` of the last one, however often the file is cut.

        Raises:
            OSError: if the file cannot be read, or a gap cannot be marked now.
        """
        if self._lost:
            return sent
        # Check before opening the file: a worker has its log when it writes its mark.
        begun = self._file is None and self._name == LOG and self._folder.mark() is not None
        file = self._file = self._file or self._open()
        if file is None and not sent and not begun:
            return 0  # no output yet
        size = -1 if file is None else os.fstat(file.fileno()).st_size
        if size >= sent:
            return self.bound(sent, most)
        if now < self._next_gap_at:
            raise BlockingIOError(errno.EAGAIN, "the file is cut or deleted too often")
        self._next_gap_at = now + GAP_S
        self._mark_gap(sent, "deleted" if file is None else "cut")
        if self._name == LOG:
            return max(sent, self.bound(sent, most))  # less if the file is cut again at this moment
        self._lost = True
        return sent

    def bound(self, sent: int, most: int) -> int:
        """Truncate the file if it exceeds its limit, and return the length of the kept part.

        At least `sent` bytes stay, because the controller has them. The worker then continues at
        the new end.
        """
        file = self._file = self._file or self._open()
        size = 0 if file is None else os.fstat(file.fileno()).st_size
        if file is None or size <= most:
            self._end = None
            return size
        if self._end is None:
            self._end = self._mark_end(file.fileno(), max(most, sent), most)
        if size > self._end + SLACK:
            with self._writable(file.fileno()) as descriptor:
                os.ftruncate(descriptor, self._end)
        return min(size, self._end)

    def _mark_end(self, file: int, at: int, most: int) -> int:
        """Return the position at which the kept part of the file ends.

        If the file is a log, write a line at `at` that reports the truncation. The kept part then
        ends after this line.
        """
        if self._name != LOG:
            log.warning("output exceeds its limit", worker=self._folder.worker, stream=self._name)
            return at
        note = f"\n[ones: output beyond {most} bytes of a worker is not kept]\n".encode()
        if os.pread(file, len(note), max(0, at - len(note))) == note:  # written by an earlier agent
            return at
        if os.pread(file, len(note), at) != note:
            log.warning("output exceeds its limit", worker=self._folder.worker, stream=self._name)
            with self._writable(file) as descriptor:
                os.pwrite(descriptor, note, at)
        return at + len(note)

    @contextlib.contextmanager
    def _writable(self, file: int) -> Iterator[int]:
        """Open the same file for writing, even if it was deleted."""
        with acting_as(self._folder.owner):
            descriptor = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes from `offset`."""
        return b"" if self._file is None else os.pread(self._file.fileno(), count, offset)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        path = self._folder.own.resolve() / self._folder.stream(self._name).name
        with contextlib.suppress(FileNotFoundError), acting_as(self._folder.owner):
            return os.fdopen(open_regular(path), "rb")
        return self._open_deleted(path) if self._name == LOG else None

    def _open_deleted(self, path: Path) -> BinaryIO | None:
        mark = self._folder.mark()
        if mark is None:
            return None
        with acting_as(self._folder.owner):
            for number in OUTPUTS:  # not all descriptors, because a script may have any number
                handle = Path(f"/proc/{mark.pid}/fd/{number}")
                with contextlib.suppress(OSError):
                    if str(handle.readlink()) == f"{path} (deleted)":
                        return _reopen(handle)
        return None

    def _mark_gap(self, sent: int, what: str) -> None:
        """Write a line about lost output to the log at `sent`. New output follows the line."""
        path, flags = self._folder.stream(LOG), WRITE
        if self._name == LOG and self._file is not None:  # even if it was deleted, too
            path, flags = Path(f"/proc/self/fd/{self._file.fileno()}"), os.O_RDWR | os.O_CLOEXEC
        kind = "output" if self._name == LOG else "sample records"
        log.warning("output lost", worker=self._folder.worker, stream=self._name, offset=sent)
        note = f"[ones: {kind} after byte {sent} may be lost: the file was {what}]\n".encode()
        self._folder.path.mkdir(mode=0o700, exist_ok=True)
        with acting_as(self._folder.owner):
            descriptor = require_regular(os.open(path, flags, 0o600), path)
            try:
                if self._name == LOG:
                    os.pwrite(descriptor, note, sent)  # the worker continues after it
                    restarted = os.pread(descriptor, min(sent, MAX_RESTARTED_BYTES), 0)
                    note = _without_hole(restarted)
                os.lseek(descriptor, 0, os.SEEK_END)
                os.write(descriptor, note)
            finally:
                os.close(descriptor)


def _reopen(handle: Path) -> BinaryIO:
    """Open a file through its link in /proc. Unlike other links, this link has to be followed."""
    descriptor = os.open(handle, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(require_regular(descriptor, handle), "rb")


def _without_hole(data: bytes) -> bytes:
    """Return the data without the zero bytes at their end. `rstrip` alone takes 8 ns per byte."""
    end = len(data)
    while data.endswith(HOLE, 0, end):
        end -= len(HOLE)
    return data[:end].rstrip(NUL)


@dataclass(slots=True)
class _Stream:
    assignment: Assignment
    name: str
    file: OutputFile
    sent: int = -1  # -1: the relay's position is not known yet
    stored: int = 0
    credit: int = 0
    full: bool = False  # the relay's store is full
    asked_at: float = -1e9
    held_at: float = math.inf  # time from which an incomplete line is held back
    ended: bool = False  # the process has exited, so the file is final
    done: bool = False  # the relay has the whole stream
    fault: str = ""  # error of the last read

    @property
    def key(self) -> dict[str, object]:
        a = self.assignment
        return {"job": a.job, "version": a.version, "rank": a.rank, "stream": self.name}

    @property
    def identity(self) -> dict[str, object]:
        """Fields that all messages about this stream have."""
        return {**self.key, "journal": self.assignment.journal}


class LogShipper:
    """Output streams of all workers of a node.

    `on_stored` is called when all output of an exited worker is stored. A stream uses at most
    `max_bytes` of this node's disk.
    """

    def __init__(
        self, node: NodeId, on_stored: Callable[[WorkerId], None], max_bytes: int = UNBOUNDED
    ) -> None:
        self._node = node
        self._on_stored = on_stored
        self.max_bytes = max_bytes
        self._socket: Socket | None = None
        self._streams: dict[WorkerId, list[_Stream]] = {}
        self._by_key: dict[tuple[object, ...], _Stream] = {}

    def use(self, socket: Socket) -> None:
        """Send to the log relay over this socket from now on; ask the relay for its positions."""
        self._socket = socket
        for stream in self._by_key.values():
            stream.sent, stream.asked_at = -1, -1e9

    def watch(self, worker: WorkerId, assignment: Assignment, folder: WorkerFolder) -> None:
        """Ship the streams of a worker from the relay's position on. The call is idempotent."""
        if worker in self._streams:
            return
        streams = [_Stream(assignment, name, OutputFile(folder, name)) for name in STREAMS]
        self._streams[worker] = streams
        self._by_key |= {tuple(stream.key.values()): stream for stream in streams}

    def worker_ended(self, worker: WorkerId) -> None:
        """Record that a worker has exited, so that its files no longer change."""
        for stream in self._streams.get(worker, []):
            stream.ended = True

    def forget(self, worker: WorkerId) -> None:
        """Stop shipping a worker's files."""
        for stream in self._streams.pop(worker, []):
            self._by_key.pop(tuple(stream.key.values()), None)
            stream.file.close()

    def close(self) -> None:
        """Close all files."""
        for stream in self._by_key.values():
            stream.file.close()

    async def ship(self) -> None:
        """Send output as far as the relay's credit allows, until cancelled."""
        loop = asyncio.get_running_loop()
        grew_at = -GROWING_S
        while True:
            busy = False
            for stream in list(self._by_key.values()):
                if not stream.done:
                    busy = self._try_to_push(stream, loop.time()) or busy
            if busy:
                grew_at = loop.time()
            grows = loop.time() - grew_at < GROWING_S
            await asyncio.sleep(0 if busy else GROWING_POLL_S if grows else LOOK_S)

    def receive(self, message: LogStored) -> None:
        """Process the relay's position in a stream.

        `size` is the number of stored bytes from the stream's start. `credit` is how many more
        bytes may be sent. While the store is `full`, no bytes may be sent. An unknown stream is
        ignored.
        """
        stream = self._by_key.get((message.job, message.version, message.rank, message.stream))
        if stream is None:
            return
        if stream.sent < 0 or message.size > stream.sent:
            stream.sent = message.size
        stream.stored, stream.credit = message.size, message.credit
        stream.full = message.full
        stream.asked_at = asyncio.get_running_loop().time()
        if message.ended and stream.ended and not stream.done:
            stream.done = True
            stream.file.close()
            a = stream.assignment
            worker = worker_id(a.job, a.version, a.rank)
            if all(other.done for other in self._streams.get(worker, [])):
                self._on_stored(worker)

    def _try_to_push(self, stream: _Stream, now: float) -> bool:
        """Push a stream, and log errors so that other streams are not affected."""
        try:
            pushed = self._push(stream, now)
        except OSError as error:
            if stream.fault != str(error):
                log.warning("output cannot be read", error=str(error), **stream.key)
            stream.fault = str(error)
            return False
        stream.fault = ""
        return pushed

    def _push(self, stream: _Stream, now: float) -> bool:
        """Send a stream's next chunk, if any. Return True if another chunk may follow at once."""
        socket = self._socket
        if socket is None or stream.sent < 0:
            stream.file.bound(stream.stored, self.max_bytes)
        if socket is None:
            return False
        unanswered = stream.sent < 0 or stream.sent > stream.stored
        again_s = FULL_S if stream.full and not unanswered else RETRY_S
        if now - stream.asked_at > again_s and (unanswered or (stream.full and not stream.ended)):
            stream.sent, stream.asked_at = -1, now
            socket.send(encode(LogHello(node=self._node, **stream.identity)))  # type: ignore[arg-type]
            return False
        if stream.sent < 0:
            return False
        size = stream.file.size(stream.sent, self.max_bytes, now)
        if stream.ended and (stream.full or stream.sent >= size):
            if (stream.full or stream.stored >= size) and now - stream.asked_at > LOOK_S:
                stream.asked_at = now
                socket.send(encode(LogEnded(size=size, **stream.identity)))  # type: ignore[arg-type]
            return False
        ahead = stream.sent - stream.stored
        if stream.full or size <= stream.sent or ahead >= stream.credit:
            return False
        data = stream.file.read(stream.sent, min(CHUNK, size - stream.sent))
        whole = data.rfind(b"\n") + 1
        held = not whole and len(data) < CHUNK and not stream.ended
        if held:
            stream.held_at = min(stream.held_at, now)
        if not data or (held and now - stream.held_at < HOLD_S):
            return False
        data = data[: whole or len(data)]
        chunk = LogChunk(offset=stream.sent, data=data, **stream.identity)  # type: ignore[arg-type]
        if not socket.send(encode(chunk)):
            return False
        if stream.sent == stream.stored:
            stream.asked_at = now
        stream.sent += len(data)
        stream.held_at = math.inf
        return True
