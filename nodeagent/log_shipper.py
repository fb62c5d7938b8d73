"""Ships worker output to the log relay.

The files are the buffer: nothing is read before the relay gave credit for it, and nothing is
deleted before the relay has it. So a dead agent, relay or link costs time and no byte, and what
somebody else deletes is a marked gap.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from nodeagent.output_files import UNBOUNDED, OutputFile
from nodeagent.worker_folders import WorkerFolder
from schemas.codec import encode
from schemas.ids import NodeId, WorkerId, worker_id
from schemas.link import Socket
from schemas.messages.logs import (
    LOG,
    SAMPLES,
    LogChunk,
    LogEnded,
    LogHello,
    LogStored,
)
from schemas.messages.worker import Assignment

log = structlog.get_logger("output")
CHUNK: Final = 256 * 1024
LOOK_S: Final = 0.05  # how often files are looked at
GROWING_LOOK_S: Final = 0.02  # while some grow
GROWING_S: Final = 1.0  # as long after the last chunk
RETRY_S: Final = 2.0  # without an answer, ask again
FULL_S: Final = 30.0  # while no more of it is kept: whether that is still so
HOLD_S: Final = 0.5  # an incomplete line is sent after this time, even while it grows
STREAMS: Final = (LOG, SAMPLES)


@dataclass(slots=True)
class _Stream:
    assignment: Assignment
    name: str
    file: OutputFile
    sent: int = -1  # -1: the relay has not said yet what it has
    stored: int = 0
    credit: int = 0
    full: bool = False  # the relay keeps no more of it
    asked_at: float = -1e9
    held_at: float = math.inf  # since when half a line waits for its other half
    ended: bool = False  # the process has exited, the file is final
    done: bool = False  # the relay has it all
    fault: str = ""  # why it cannot be read now

    @property
    def key(self) -> dict[str, object]:
        a = self.assignment
        return {"job": a.job, "version": a.version, "rank": a.rank, "stream": self.name}


class LogShipper:
    """All output streams of a node.

    Args:
        on_stored: called when all output of an ended worker is safe.
        max_bytes: of a stream of one worker, on this node's disk.
    """

    def __init__(
        self, node: NodeId, on_stored: Callable[[WorkerId], None], max_bytes: int = UNBOUNDED
    ) -> None:
        self._node = node
        self._on_stored = on_stored
        self.max_bytes = max_bytes
        self._socket: Socket | None = None
        self._streams: dict[WorkerId, list[_Stream]] = {}
        self._by_key: dict[tuple[str, int, int, str], _Stream] = {}

    def use(self, socket: Socket) -> None:
        """Send over `socket` from now on; what was under way on another is asked for again.

        Args:
            socket: connected to the log relay; the caller closes it.
        """
        self._socket = socket
        for stream in self._by_key.values():
            stream.sent, stream.asked_at = -1, -1e9

    def watch(self, worker: WorkerId, assignment: Assignment, folder: WorkerFolder) -> None:
        """Ship this worker's streams, from where the relay is.

        Args:
            worker: its name; one that is watched already is left as it is.
        """
        if worker in self._streams:
            return
        streams = [_Stream(assignment, name, OutputFile(folder, name)) for name in STREAMS]
        self._streams[worker] = streams
        for stream in streams:
            key = (assignment.job, assignment.version, assignment.rank, stream.name)
            self._by_key[key] = stream

    def worker_ended(self, worker: WorkerId) -> None:
        """The files of this worker will not grow any more.

        Args:
            worker: its name; one that is not watched is passed over.
        """
        for stream in self._streams.get(worker, []):
            stream.ended = True

    def forget(self, worker: WorkerId) -> None:
        """Stop looking at this worker's files.

        Args:
            worker: its name; one that is not watched is passed over.
        """
        for stream in self._streams.pop(worker, []):
            a = stream.assignment
            self._by_key.pop((a.job, a.version, a.rank, stream.name), None)
            stream.file.close()

    def close(self) -> None:
        """Let go of all files."""
        for stream in self._by_key.values():
            stream.file.close()

    async def ship(self) -> None:
        """Look at the files and send what there is credit for, for ever."""
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
            await asyncio.sleep(0 if busy else GROWING_LOOK_S if grows else LOOK_S)

    def receive(self, message: LogStored) -> None:
        """Take the relay's answer: how far a stream is stored there.

        Args:
            message: `size` is what is stored, bytes from the stream's start; `credit` is how many
                bytes may be sent beyond that, none while it is `full`. One about an unknown stream
                is passed over.
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
        """One stream that cannot be read holds up no other."""
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
        """Send the next chunk of a stream if there is one; True when more may follow at once."""
        socket = self._socket
        if socket is None or stream.sent < 0:
            stream.file.bound(stream.stored, self.max_bytes)
        if socket is None:
            return False
        unanswered = stream.sent < 0 or stream.sent > stream.stored
        again_s = FULL_S if stream.full and not unanswered else RETRY_S
        if now - stream.asked_at > again_s and (unanswered or (stream.full and not stream.ended)):
            stream.sent, stream.asked_at = -1, now
            socket.send(encode(LogHello(node=self._node, **stream.key)))  # type: ignore[arg-type]
            return False
        if stream.sent < 0:
            return False
        size = stream.file.size(stream.sent, self.max_bytes)
        if stream.ended and (stream.full or stream.sent >= size):
            if (stream.full or stream.stored >= size) and now - stream.asked_at > LOOK_S:
                stream.asked_at = now
                socket.send(encode(LogEnded(size=size, **stream.key)))  # type: ignore[arg-type]
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
        chunk = LogChunk(offset=stream.sent, data=data, **stream.key)  # type: ignore[arg-type]
        if not socket.send(encode(chunk)):
            return False
        if stream.sent == stream.stored:
            stream.asked_at = now
        stream.sent += len(data)
        stream.held_at = math.inf
        return True
