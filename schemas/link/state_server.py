"""Hands out states of models to other nodes, from a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zmq

from schemas.codec import TO_STATES, encode
from schemas.errors import OnesError
from schemas.link.connection_watch import ConnectionWatch
from schemas.link.state_client import PIECE, WINDOW
from schemas.messages.states import AskState, StatePiece, StateRefused
from schemas.state_files import Buffer

LONGEST_REQUEST: Final = 4096  # bytes
LOOK_MS: Final = 100  # between two looks at what peers send
ZERO_COPY: Final = 64 * 1024  # bytes; a smaller part is copied, which costs less
Parts = Sequence[Buffer]  # of a state's file, header first


class Stored(NamedTuple):
    """What lies in a file that somebody else may change: only the piece that is asked for."""

    total: int  # bytes of the file
    piece: bytes


Find = Callable[[AskState], Parts | Stored | None]


class StateServer:
    """Answers each request with one piece, or says that the state is not here.

    A peer that asks for more than it takes loses answers, not ours: it asks again.
    """

    def __init__(self, address: str, find: Find, port: int = 0) -> None:
        """Begin to serve.

        Args:
            address: of this host, where other nodes reach it: a name, IPv4 or IPv6.
            find: gives the bytes of a state that was asked for, in the server's thread; None: it is
                not here. It looks at the digest.
            port: to listen on; 0: any.

        Raises:
            OSError: if this host has no such address, or the port is taken.
        """
        self._find = find
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = LONGEST_REQUEST
        self._socket.sndhwm = self._socket.rcvhwm = 2 * WINDOW
        self._socket.router_mandatory = True
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        try:
            self.address = self._bind(address, port)
        except OSError:  # a name that is none; zmq's error is one, too
            self._socket.close()
            self._context.term()
            raise
        self._watch = ConnectionWatch()
        self._watch.add(self._socket, self._context)
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
        """Stop serving; what is on its way is cut."""
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5.0)
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while self._wake not in dict(poller.poll(LOOK_MS)):
            with contextlib.suppress(zmq.Again):
                while True:
                    self._answer(self._received())
            self._watch.look()
        self._watch.close()
        self._socket.close()
        self._context.term()

    def _received(self) -> list[bytes]:
        """The next request.

        Raises:
            zmq.Again: if there is none.
        """
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        source, sizes = int(frames[-1].get(zmq.SRCFD)), [len(frame) for frame in frames[1:]]
        self._watch.took(source, sizes, secured=False)
        return [frame.bytes for frame in frames]

    def _answer(self, frames: list[bytes]) -> None:
        route, body = frames[0], frames[-1]
        try:
            asked = TO_STATES.decode(body)
        except OnesError:
            return
        try:
            found = self._find(asked)
        except (OSError, ValueError, OverflowError):
            found = None
        total, parts = 0, list[Buffer]()
        if isinstance(found, Stored):
            total, parts = found.total, [found.piece]
        elif found is not None:
            total, parts = sum(map(len, found)), _slices(found, asked.offset)
        if found is None or asked.offset > total:
            self._send([route, encode(StateRefused(digest=asked.digest, why="it is not here"))])
            return
        piece = StatePiece(digest=asked.digest, offset=asked.offset, total=total)
        self._send([route, encode(piece), *parts])

    def _send(self, frames: list[Buffer]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # its peer is gone, or takes nothing
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, copy_threshold=ZERO_COPY)


def _slices(parts: Parts, offset: int) -> list[Buffer]:
    """The next `PIECE` bytes from `offset` on, where they lie."""
    found: list[Buffer] = []
    start, end = offset, offset + PIECE
    for part in parts:
        if start < len(part) and end > 0:
            found.append(memoryview(part)[max(start, 0) : end])
        start, end = start - len(part), end - len(part)
    return found
