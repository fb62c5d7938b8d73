"""Transfer of model states between nodes, with a server thread and a blocking client."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import zmq
from msgspec.structs import replace

from schemas.codec import FROM_STATES, TO_STATES, encode
from schemas.errors import OnesError
from schemas.host.state_files import (
    Buffer,
    DamagedStateError,
    header_size,
    read_frames,
    require_digest,
    split_frames,
)
from schemas.ids import JobId
from schemas.transport.flood_guard import FloodGuard
from schemas.transport.listeners import has_only_ipv6
from schemas.wire.files import AskState, StatePiece, StateRefused

MAX_HEADER: Final = 16 << 20  # bytes
PIECE: Final = 1 << 20  # bytes
WINDOW: Final = 8  # maximum of requested pieces that have not arrived
PIECE_TIMEOUT_S: Final = 10.0  # after this wait for a piece, the source is abandoned
POLL_INTERVAL_S: Final = 0.25
CONNECT_S: Final = 3.0
MAX_STATE: Final = 1 << 40  # bytes
MAX_REQUEST_BYTES: Final = 4096
POLL_INTERVAL_MS: Final = 100  # between checks of the flood guard
MIN_ZERO_COPY_BYTES: Final = 64 * 1024  # smaller parts are copied, which costs less


class Target(Protocol):
    """Destination for the bytes of a file, which arrive in any order."""

    def begin(self, total: int) -> None:
        """Prepare for `total` bytes. This is called once for each source."""

    def write(self, offset: int, data: Buffer) -> None:
        """Store some of the bytes at `offset`."""


class MemoryTarget:
    """Destination in memory, which computes the digest while the bytes arrive.

    Memory grows only as bytes arrive, whatever size a source states. The next state reuses it.
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._total = 0
        self._end = 0  # all bytes before this offset have arrived, and the digest includes them
        self._payload: int | None = None  # offset of the first frame
        self._digest = hashlib.sha256()

    @property
    def content(self) -> memoryview:
        """The received bytes, valid until the next `begin`."""
        return memoryview(self._memory)[: self._total]

    def begin(self, total: int) -> None:
        """Discard the content, and prepare for `total` bytes."""
        if len(self._memory) < total:
            self._memory = bytearray()  # a new object, because views of the old one may exist
        self._total, self._end, self._payload = total, 0, None
        self._digest = hashlib.sha256()

    def write(self, offset: int, data: Buffer) -> None:
        """Copy the bytes to `offset`."""
        if (gap := offset - len(self._memory)) > 0:  # at most the size of the request window
            self._memory.extend(bytes(gap))
        self._memory[offset : offset + len(data)] = data
        if offset == self._end:
            self._follow(data)

    def _follow(self, data: Buffer) -> None:
        """Update the digest with the bytes that follow the header."""
        before, self._end = self._end, self._end + len(data)
        if self._payload is not None:
            self._digest.update(data)
            return
        payload = header_size(self.content[: self._end])
        if payload is not None and payload <= self._end:
            self._payload = payload
            self._digest.update(self.content[max(payload, 0) : self._end])
        elif before > MAX_HEADER:
            raise DamagedStateError("header of the state is too long")

    def frames(self, digest: str) -> list[memoryview]:
        """Return the frames of the received state, valid until the next `begin`.

        Raises:
            DamagedStateError: if the digest differs, or the bytes are not a state.
        """
        if self._end != self._total:  # pieces arrived out of order, so the digest is incomplete
            return read_frames(self.content, digest)
        _, frames = split_frames(self.content)
        require_digest(self._digest.hexdigest(), digest)
        return frames


class FileTarget:
    """Destination in a file, which is durable after `close`. An existing file is emptied."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def begin(self, total: int) -> None:
        """Set the size of the file to `total` bytes."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, total)

    def write(self, offset: int, data: Buffer) -> None:
        """Write the bytes at `offset`."""
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def close(self) -> None:
        """Make the content durable."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class StateUnavailableError(OnesError):
    """Raised if no source can provide the state. The message has one reason per source."""

    code = "state_unavailable"


def mac_of(asked: AskState, key: str, address: str) -> str:
    """Return the HMAC-SHA256 of a request to the server at `address`, in hexadecimal.

    The address is included so that a false server cannot forward the request to another one.
    """
    fields = (address, asked.job, asked.trial, asked.version, asked.digest, asked.offset)
    return hmac.digest(key.encode(), repr(fields).encode(), "sha256").hex()


def fetch_state(
    sources: Sequence[str],
    asked: AskState,
    key: str,
    target: Target,
    check: Callable[[], None],
    *,
    piece_s: float = PIECE_TIMEOUT_S,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Fetch a state's file from the first source that provides all of it, and return this source.

    The sources are HOST:PORT, best first. The offset and `mac` of `asked` are ignored. `key` is the
    sweep's. `check` raises an `OnesError` if the bytes are not the state. A source is abandoned if
    a piece takes more than `piece_s` seconds. `stopped` is called every quarter of a second. True
    ends the transfer.

    Raises:
        StateUnavailableError: if no source provided the state.
        OSError: if `target` cannot store the bytes.
    """
    why = []
    for source in sources:
        try:
            _fetch_from(source, _Request(asked, key, source), target, piece_s, stopped)
            check()
        except OnesError as error:
            why.append(f"{source}: {error.message}")
        else:
            return source
        if stopped():
            break
    shown = "; ".join(why) or "no node is known to have it"
    what = f"state {asked.version} of trial {asked.trial} is not available: {shown}"
    raise StateUnavailableError(what, "it will be trained again")


def _fetch_from(
    source: str, request: _Request, target: Target, piece_s: float, stopped: Callable[[], bool]
) -> None:
    _require_listener(source)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.maxmsgsize = PIECE + 64 * 1024
    host, _, port = source.rpartition(":")
    host = host.strip("[]")
    dealer.ipv6 = has_only_ipv6(host)
    deadline = time.monotonic() + piece_s
    try:
        dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{source}")
        while not request.over:
            if _receive(dealer, request, target, min(POLL_INTERVAL_S, piece_s)):
                deadline = time.monotonic() + piece_s
            elif stopped():
                raise StateUnavailableError("not needed any more")
            elif time.monotonic() > deadline:
                raise StateUnavailableError(f"no reply within {piece_s:g} s")
            else:
                _require_listener(source)
    except zmq.ZMQError as error:
        raise StateUnavailableError(f"cannot connect: {error.strerror}") from None
    finally:
        dealer.close()
        context.term()


def _receive(
    dealer: zmq.Socket[bytes], request: _Request, target: Target, timeout_s: float
) -> bool:
    """Send requests and store the pieces that arrive. Return whether one arrived in time."""
    for message in request.more():
        dealer.send(message)
    stored = False
    if dealer.poll(int(1000 * timeout_s)):
        with contextlib.suppress(zmq.Again):
            while True:
                frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
                stored = _store_piece(frames, request, target) or stored
    return stored


def _require_listener(source: str) -> None:
    """Fail fast if the source's process is dead, because ZeroMQ would retry forever."""
    host, _, port = source.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StateUnavailableError(f"no process listens there: {why}") from None


class _Request:
    def __init__(self, asked: AskState, key: str, source: str) -> None:
        self._asked = asked
        self._key, self._source = key, source
        self.digest = asked.digest
        self.total: int | None = None
        self._next = 0
        self.awaited: set[int] = set()

    def more(self) -> list[bytes]:
        """Return requests to send now. The first goes alone, because its reply has the total."""
        found = []
        while len(self.awaited) < WINDOW and self._next < (1 if self.total is None else self.total):
            self.awaited.add(self._next)
            asked = replace(self._asked, offset=self._next)
            found.append(encode(replace(asked, mac=mac_of(asked, self._key, self._source))))
            self._next += PIECE
        return found

    @property
    def over(self) -> bool:
        """True if all pieces have arrived."""
        return self.total is not None and not self.awaited and self._next >= self.total


def _store_piece(frames: list[zmq.Frame], request: _Request, target: Target) -> bool:
    """Store a piece. Return False if the piece was not expected."""
    answer = FROM_STATES.decode(frames[0].buffer)
    if answer.digest != request.digest:
        return False
    if not isinstance(answer, StatePiece):
        raise StateUnavailableError(answer.reason[:200])
    if answer.offset not in request.awaited:
        return False
    if request.total is None:
        if not 0 < answer.total <= MAX_STATE:
            raise StateUnavailableError(f"invalid size of {answer.total} bytes")
        request.total = answer.total
        target.begin(answer.total)
    parts = [frame.buffer for frame in frames[1:]]
    if sum(map(len, parts)) != min(PIECE, request.total - answer.offset):
        raise StateUnavailableError("truncated piece")
    offset = answer.offset
    for part in parts:
        target.write(offset, part)
        offset += len(part)
    request.awaited.discard(answer.offset)
    return True


Parts = Sequence[Buffer]  # parts of a state's file, header first


class Stored(NamedTuple):
    """The requested piece of a file. The file's owner might change it at any time."""

    total: int  # bytes of the file
    piece: bytes


Find = Callable[[AskState], Parts | Stored | None]


class StateServer:
    """Server that answers each request with a piece or a refusal. It runs in a thread of its own.

    A peer that requests more than it reads loses replies and must repeat these requests.
    `address` is a name, IPv4 or IPv6 address by which other nodes reach this host; port 0 means any
    port. `key` and `find` are called in the server's thread. `key` returns the key of a job; an
    empty one means that all requests are refused. `find` checks the digest and returns the bytes.

    Raises:
        OSError: if this host has no such address, or the port is in use.
    """

    def __init__(
        self, address: str, key: Callable[[JobId], str], find: Find, port: int = 0
    ) -> None:
        self._key, self._find = key, find
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = 2 * WINDOW
        self._socket.router_mandatory = True
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        try:
            self.address = self._bind(address, port)
        except OSError:  # the name is invalid, or zmq failed
            self._socket.close()
            self._context.term()
            raise
        self._names = (self.address, f"{address}:{self.port}")  # as others may call this server
        self._flood_guard = FloodGuard()
        self._flood_guard.add(self._socket, self._context)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="states", daemon=True)
        self._thread.start()

    def _bind(self, address: str, port: int) -> str:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._socket.ipv6 = family == socket.AF_INET6
        host = f"[{place[0]}]" if self._socket.ipv6 else str(place[0])
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rpartition(":")[2])
        return f"{host}:{self.port}"

    def close(self) -> None:
        """Stop serving. Transfers in progress are cut."""
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5.0)
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while self._wake not in dict(poller.poll(POLL_INTERVAL_MS)):
            with contextlib.suppress(zmq.Again):
                while True:
                    self._answer(self._received())
            self._flood_guard.check_if_grown()
        self._flood_guard.close()
        self._socket.close()
        self._context.term()

    def _received(self) -> list[bytes]:
        """Return the next request.

        Raises:
            zmq.Again: if no request is waiting.
        """
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        sizes = [len(frame) for frame in frames[1:]]
        with contextlib.suppress(zmq.ZMQError):  # a peer with ZMTP 1.0 has no metadata
            self._flood_guard.count_read(int(frames[-1].get(zmq.SRCFD)), sizes, secured=False)
        return [frame.bytes for frame in frames]

    def _answer(self, frames: list[bytes]) -> None:
        route, body = frames[0], frames[-1]
        try:
            asked = TO_STATES.decode(body)
        except OnesError:
            return
        try:
            found = self._find(asked) if self._is_authentic(asked) else None
        except (OSError, ValueError, OverflowError):
            found = None
        total, parts = 0, list[Buffer]()
        if isinstance(found, Stored):
            total, parts = found.total, [found.piece]
        elif found is not None:
            total, parts = sum(map(len, found)), _piece_views(found, asked.offset)
        if found is None or asked.offset > total:
            self._send(
                [route, encode(StateRefused(digest=asked.digest, reason="not available here"))]
            )
            return
        piece = StatePiece(digest=asked.digest, offset=asked.offset, total=total)
        self._send([route, encode(piece), *parts])

    def _is_authentic(self, asked: AskState) -> bool:
        key, mac = self._key(asked.job), asked.mac.encode()
        known = (mac_of(asked, key, name).encode() for name in self._names if key)
        return any(hmac.compare_digest(mac, own) for own in known)

    def _send(self, frames: list[Buffer]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is lost, or does not read
            self._socket.send_multipart(
                frames, zmq.NOBLOCK, copy=False, copy_threshold=MIN_ZERO_COPY_BYTES
            )


def _piece_views(parts: Parts, offset: int) -> list[Buffer]:
    """Return views of the next `PIECE` bytes from `offset` on."""
    found: list[Buffer] = []
    start, end = offset, offset + PIECE
    for part in parts:
        if start < len(part) and end > 0:
            found.append(memoryview(part)[max(start, 0) : end])
        start, end = start - len(part), end - len(part)
    return found
