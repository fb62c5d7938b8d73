"""Brings a state of a model here, from whoever has it; blocks, so it is for a thread."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import zmq

from schemas.codec import FROM_STATES, encode
from schemas.errors import OnesError
from schemas.messages.states import AskState, StatePiece
from schemas.state_files import (
    Buffer,
    header_size,
    read_frames,
    require_digest,
    split_frames,
)

PIECE: Final = 1 << 20  # bytes
WINDOW: Final = 8  # pieces that are asked for and have not come
PIECE_S: Final = 10.0  # without a piece, the source is given up
LOOK_S: Final = 0.25
MAX_STATE: Final = 1 << 40  # bytes
MAX_HEADER: Final = 16 << 20  # bytes


class StateUnavailableError(OnesError):
    """Nobody gave the state; says why for each that was asked."""

    code = "state_unavailable"


class Target(Protocol):
    """Takes the bytes of a file, in any order."""

    def begin(self, total: int) -> None:
        """So many bytes will come; once for each source."""

    def write(self, offset: int, data: Buffer) -> None:
        """Some of them."""


class MemoryTarget:
    """Keeps the bytes in memory, and works out their digest as they come."""

    def __init__(self) -> None:
        """Begin without memory; what was taken once is used again, as far as it reaches."""
        self._memory = bytearray()
        self._total = 0
        self._end = 0  # of what came without a gap, and is in the digest
        self._payload: int | None = None  # where frames begin
        self._digest = hashlib.sha256()

    @property
    def content(self) -> memoryview:
        """What came, until the next `begin`."""
        return memoryview(self._memory)[: self._total]

    def begin(self, total: int) -> None:
        """Take the memory."""
        if len(self._memory) < total:
            self._memory = bytearray(total)
        self._total, self._end, self._payload = total, 0, None
        self._digest = hashlib.sha256()

    def write(self, offset: int, data: Buffer) -> None:
        """Copy into it."""
        self._memory[offset : offset + len(data)] = data
        if offset == self._end:
            self._follow(data)

    def _follow(self, data: Buffer) -> None:
        """Have the digest take in what lies behind the header."""
        before, self._end = self._end, self._end + len(data)
        if self._payload is not None:
            self._digest.update(data)
            return
        payload = header_size(self.content[: self._end])
        if payload is not None and payload <= self._end:
            self._payload = payload
            self._digest.update(self.content[max(payload, 0) : self._end])
        elif before > MAX_HEADER:
            raise StateUnavailableError("a state whose header does not end")

    def frames(self, digest: str) -> list[memoryview]:
        """The frames of the state that came, until the next `begin`.

        Args:
            digest: that they should have, hexadecimal.

        Raises:
            DamagedStateError: if they have another, or it is no state.
        """
        if self._end != self._total:  # it came in another order
            return read_frames(self.content, digest)
        _, frames = split_frames(self.content)
        require_digest(self._digest.hexdigest(), digest)
        return frames


class FileTarget:
    """Writes them into a file, which is not durable yet."""

    def __init__(self, path: Path) -> None:
        """Make the file.

        Args:
            path: one that is there is emptied.

        Raises:
            OSError: if the disk does not take it.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def begin(self, total: int) -> None:
        """Make it as long."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, total)

    def write(self, offset: int, data: Buffer) -> None:
        """Write there."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def close(self) -> None:
        """Make durable what there is.

        Raises:
            OSError: if the disk does not take it.
        """
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def fetch_state(
    sources: Sequence[str],
    asked: AskState,
    target: Target,
    check: Callable[[], None],
    *,
    piece_s: float = PIECE_S,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Bring a state's file here from the first source that gives it whole.

    Args:
        sources: HOST:PORT of each, the best first.
        asked: the state; its offset counts for nothing.
        target: takes the bytes.
        check: looks at what came; raises `OnesError` if it is not the state.
        piece_s: how long a piece may take, seconds.
        stopped: whether nobody wants it any more; looked at every quarter of a second.

    Returns:
        Who gave it.

    Raises:
        StateUnavailableError: if nobody gave it.
        OSError: if `target` does not take it.
    """
    why = []
    for source in sources:
        try:
            _fetch_from(source, asked, target, piece_s, stopped)
            check()
        except OnesError as error:
            why.append(f"{source}: {error.message}")
        else:
            return source
        if stopped():
            break
    shown = "; ".join(why) or "no node is known to have it"
    what = f"state {asked.version} of trial {asked.trial} cannot be had: {shown}"
    raise StateUnavailableError(what, "it is trained again")


def _fetch_from(
    source: str, asked: AskState, target: Target, piece_s: float, stopped: Callable[[], bool]
) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.maxmsgsize = PIECE + 64 * 1024
    dealer.ipv6 = "[" in source
    try:
        dealer.connect(f"tcp://{source}")
        _receive(dealer, _Request(asked), target, piece_s, stopped)
    except zmq.ZMQError as error:
        raise StateUnavailableError(f"cannot connect: {error.strerror}") from None
    finally:
        dealer.close()
        context.term()


class _Request:
    """Which pieces are missing."""

    def __init__(self, asked: AskState) -> None:
        self._asked = asked
        self.digest = asked.digest
        self.total: int | None = None
        self._next = 0
        self.awaited: set[int] = set()

    def more(self) -> list[bytes]:
        """Requests that may be sent now: the first alone, because it says how many follow."""
        found = []
        while len(self.awaited) < WINDOW and self._next < (1 if self.total is None else self.total):
            self.awaited.add(self._next)
            found.append(encode(self._of(self._next)))
            self._next += PIECE
        return found

    def _of(self, offset: int) -> AskState:
        a = self._asked
        return AskState(job=a.job, trial=a.trial, version=a.version, digest=a.digest, offset=offset)

    @property
    def over(self) -> bool:
        """Whether everything came."""
        return self.total is not None and not self.awaited and self._next >= self.total


def _receive(
    dealer: zmq.Socket[bytes],
    request: _Request,
    target: Target,
    piece_s: float,
    stopped: Callable[[], bool],
) -> None:
    deadline = time.monotonic() + piece_s
    while not request.over:
        for message in request.more():
            dealer.send(message)
        if not dealer.poll(int(1000 * min(LOOK_S, piece_s))):
            if stopped():
                raise StateUnavailableError("nobody wants it any more")
            if time.monotonic() > deadline:
                raise StateUnavailableError(f"no answer within {piece_s:g} s")
            continue
        with contextlib.suppress(zmq.Again):
            while True:
                if _take(dealer.recv_multipart(zmq.NOBLOCK, copy=False), request, target):
                    deadline = time.monotonic() + piece_s


def _take(frames: list[zmq.Frame], request: _Request, target: Target) -> bool:
    """Whether it is a piece that was waited for."""
    answer = FROM_STATES.decode(frames[0].buffer)
    if answer.digest != request.digest:
        return False
    if not isinstance(answer, StatePiece):
        raise StateUnavailableError(answer.why[:200])
    if answer.offset not in request.awaited:
        return False
    if request.total is None:
        if not 0 < answer.total <= MAX_STATE:
            raise StateUnavailableError(f"a state of {answer.total} bytes")
        request.total = answer.total
        target.begin(answer.total)
    parts = [frame.buffer for frame in frames[1:]]
    if sum(map(len, parts)) != min(PIECE, request.total - answer.offset):
        raise StateUnavailableError("a piece that is cut")
    offset = answer.offset
    for part in parts:
        target.write(offset, part)
        offset += len(part)
    request.awaited.discard(answer.offset)
    return True
