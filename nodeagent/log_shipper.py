"""Ships worker output to the log relay, and fetches snapshots from it, over one bulk socket.

The files are the buffer: nothing is read before the relay gave credit for it, and nothing is
deleted before the relay has it. So a dead agent, relay or link costs time and no byte.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nodeagent.agent_errors import WorkspaceError
from nodeagent.worker_folders import WorkerFolder
from schemas.codec import TO_SHIPPER, encode
from schemas.errors import OnesError
from schemas.ids import NodeId, WorkerId
from schemas.link import Socket
from schemas.messages.logs import (
    LOG,
    SAMPLES,
    GetSnapshot,
    LogChunk,
    LogEnded,
    LogHello,
    LogStored,
    SnapshotPiece,
)
from schemas.messages.worker import Assignment

CHUNK: Final = 256 * 1024
LOOK_S: Final = 0.05  # how often files are looked at
RETRY_S: Final = 2.0  # without an answer, ask again
HOLD_S: Final = 0.5  # how long half a line waits for its other half
PIECE_LIMIT_S: Final = 10.0
STREAMS: Final = (LOG, SAMPLES)


@dataclass(slots=True)
class _Stream:
    assignment: Assignment
    name: str
    path: Path
    sent: int = -1  # -1: the relay has not said yet what it has
    stored: int = 0
    credit: int = 0
    asked_at: float = -1e9
    grown_at: float = 0.0
    size: int = 0
    ended: bool = False  # the process is gone, the file is final
    done: bool = False  # the relay has it all

    @property
    def key(self) -> dict[str, object]:
        a = self.assignment
        return {"job": a.job, "version": a.version, "rank": a.rank, "stream": self.name}


@dataclass(slots=True)
class _Fetch:
    digest: str
    offset: int = 0
    pieces: asyncio.Queue[SnapshotPiece] = field(default_factory=asyncio.Queue)


class LogShipper:
    """All output streams of a node."""

    def __init__(self, node: NodeId, stored: Callable[[WorkerId], None]) -> None:
        """Ship for `node`; `stored` is called when all output of an ended worker is safe."""
        self._node = node
        self._stored = stored
        self._wire: Socket | None = None
        self._streams: dict[WorkerId, list[_Stream]] = {}
        self._index: dict[tuple[str, int, int, str], _Stream] = {}
        self._fetches: list[_Fetch] = []  # several jobs may want one archive at once
        self._connected = asyncio.Event()

    def use(self, wire: Socket) -> None:
        """Send over `wire` from now on; what was under way on another is asked for again."""
        self._wire = wire
        for stream in self._index.values():
            stream.sent, stream.asked_at = -1, -1e9
        self._connected.set()

    def watch(self, worker: WorkerId, assignment: Assignment, folder: WorkerFolder) -> None:
        """Ship this worker's streams from where the relay is."""
        if worker in self._streams:
            return
        streams = [_Stream(assignment, name, folder.stream(name)) for name in STREAMS]
        self._streams[worker] = streams
        for stream in streams:
            key = (assignment.job, assignment.version, assignment.rank, stream.name)
            self._index[key] = stream

    def worker_ended(self, worker: WorkerId) -> None:
        """The files of this worker will not grow any more."""
        for stream in self._streams.get(worker, []):
            stream.ended = True

    def forget(self, worker: WorkerId) -> None:
        """Stop looking at this worker's files."""
        for stream in self._streams.pop(worker, []):
            a = stream.assignment
            self._index.pop((a.job, a.version, a.rank, stream.name), None)

    async def hear(self, wire: Socket) -> None:
        """Take the relay's answers, for ever."""
        async for incoming in wire:
            with contextlib.suppress(OnesError):
                self._heard(TO_SHIPPER.decode(incoming.frames[-1]))

    async def ship(self) -> None:
        """Look at the files and send what there is credit for, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._connected.wait()
            busy = False
            for stream in list(self._index.values()):
                if not stream.done:
                    busy = self._push(stream, loop.time()) or busy
            await asyncio.sleep(0 if busy else LOOK_S)

    async def fetch(self, digest: str, target: Path) -> None:
        """Bring an archive here.

        Raises:
            WorkspaceError: if the controller does not have it or the disk does not take it.
        """
        fetch = _Fetch(digest)
        self._fetches.append(fetch)
        try:
            with target.open("wb") as file:
                total = 1
                while file.tell() < total:
                    piece = await self._piece(fetch, file.tell())
                    total = piece.total
                    if total < 0:
                        raise WorkspaceError(f"the controller has no snapshot {digest[:12]}")
                    file.write(piece.data)
        except OSError as error:
            raise WorkspaceError(f"cannot store a snapshot: {error.strerror}") from None
        finally:
            self._fetches.remove(fetch)

    async def _piece(self, fetch: _Fetch, offset: int) -> SnapshotPiece:
        fetch.offset = offset
        while True:
            await self._connected.wait()
            if self._wire is not None:
                self._wire.send(encode(GetSnapshot(digest=fetch.digest, offset=offset)))
            with contextlib.suppress(TimeoutError):
                while True:
                    piece = await asyncio.wait_for(fetch.pieces.get(), RETRY_S)
                    if piece.offset == offset:
                        return piece

    def _heard(self, message: LogStored | SnapshotPiece) -> None:
        if isinstance(message, SnapshotPiece):
            for fetch in self._fetches:
                if fetch.digest == message.digest and fetch.offset == message.offset:
                    fetch.pieces.put_nowait(message)
            return
        stream = self._index.get((message.job, message.version, message.rank, message.stream))
        if stream is None:
            return
        if stream.sent < 0 or message.size > stream.sent:
            stream.sent = message.size
        stream.stored, stream.credit = message.size, message.credit
        stream.asked_at = asyncio.get_running_loop().time()
        if message.ended and stream.ended and not stream.done:
            stream.done = True
            a = stream.assignment
            worker = WorkerId(f"{a.job}.v{a.version}.r{a.rank}")
            if all(other.done for other in self._streams.get(worker, [])):
                self._stored(worker)

    def _push(self, stream: _Stream, now: float) -> bool:
        """Send the next chunk of a stream if there is one; True when more may follow at once."""
        wire = self._wire
        if wire is None:
            return False
        if now - stream.asked_at > RETRY_S and (stream.sent < 0 or stream.sent > stream.stored):
            stream.sent, stream.asked_at = -1, now
            wire.send(encode(LogHello(node=self._node, **stream.key)))  # type: ignore[arg-type]
            return False
        if stream.sent < 0:
            return False
        size = stream.path.stat().st_size if stream.path.exists() else 0
        if size != stream.size:
            stream.size, stream.grown_at = size, now
        if stream.ended and stream.sent >= size:
            if stream.stored >= size and now - stream.asked_at > LOOK_S:
                stream.asked_at = now
                wire.send(encode(LogEnded(size=size, **stream.key)))  # type: ignore[arg-type]
            return False
        if size <= stream.sent or stream.sent - stream.stored >= stream.credit:
            return False
        data = _read(stream, patient=now - stream.grown_at < HOLD_S and not stream.ended)
        if not data:
            return False
        chunk = LogChunk(offset=stream.sent, data=data, **stream.key)  # type: ignore[arg-type]
        if not wire.send(encode(chunk)):
            return False
        if stream.sent == stream.stored:
            stream.asked_at = now
        stream.sent += len(data)
        return True


def _read(stream: _Stream, *, patient: bool) -> bytes:
    with stream.path.open("rb") as file:
        file.seek(stream.sent)
        data = file.read(CHUNK)
    newline = data.rfind(b"\n") + 1
    if newline:
        return data[:newline]
    return b"" if patient and len(data) < CHUNK else data
