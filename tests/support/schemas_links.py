"""Real sockets on loopback, waits that end as soon as they can, and a peer without ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from schemas.transport.keys import KeyPair
from schemas.transport.sockets import Incoming, Link, Socket

T = TypeVar("T")
BOUND_S: Final = 60.0  # of any wait; reached only where something is broken
AGAIN_S: Final = 0.02  # between two attempts to be heard


class HeldLink(Link):
    """A link that holds its sockets until it is closed, as the tasks of a process do."""

    def __init__(self, keys: KeyPair | None = None) -> None:
        super().__init__(keys)
        self._held: list[Socket] = []

    def bind(self, kind: str, address: str) -> Socket:
        self._held.append(super().bind(kind, address))
        return self._held[-1]

    def connect(
        self, kind: str, address: str, server_key: bytes | None = None, *, prompt: bool = False
    ) -> Socket:
        self._held.append(super().connect(kind, address, server_key, prompt=prompt))
        return self._held[-1]


def free_address() -> str:
    """A TCP address on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def soon(awaitable: Awaitable[T]) -> T:
    """What `awaitable` gives, within the bound."""
    return await asyncio.wait_for(awaitable, BOUND_S)


async def connected(wire: Socket) -> Socket:
    """`wire`, once its handshake is done and it can send (a DEALER)."""
    polled = wire._socket.poll(BOUND_S * 1000, zmq.POLLOUT)  # type: ignore[call-arg] # pyzmq's stub
    assert await polled, "nobody answers"
    return wire


async def heard(receiver: Socket, say: Callable[[], object]) -> Incoming:
    """The next message of `receiver`, while `say` is repeated (pub/sub may lose the first ones)."""
    receiving = asyncio.ensure_future(receiver.receive())
    async with asyncio.timeout(BOUND_S):
        while not receiving.done():
            say()
            await asyncio.wait({receiving}, timeout=AGAIN_S)
    return receiving.result()


def events_of(wire: Socket, *wanted: zmq.Event) -> asyncio.Future[zmq.Event]:
    """Return the first of the `wanted` transport events of `wire` from now on."""
    monitor = wire._socket.get_monitor_socket()

    async def first() -> zmq.Event:
        try:
            while (event := (await recv_monitor_message(monitor))["event"]) not in wanted:
                pass
            return zmq.Event(event)
        finally:
            if not wire._socket.closed:
                wire._socket.disable_monitor()  # before its reader is closed: libzmq would wait
            monitor.close()

    return asyncio.ensure_future(first())


def plain_dealer(link: Link, address: str, **options: object) -> zmq.asyncio.Socket:
    """A DEALER as somebody else may write it: it queues what it says until it is connected."""
    dealer = link._context.socket(zmq.DEALER)
    dealer.linger = 0
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(address)
    return dealer


MORE: Final = 1
AT_ONCE: Final = 1 << 17  # bytes
LONG: Final = 2  # its length has eight bytes
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY: Final = b"\x04" + bytes([len(_READY)]) + _READY


def framed(flags: int, body: bytes) -> bytes:
    """One frame, with a long header."""
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def shake_hands(wire: socket.socket) -> None:
    """Greet, and wait for the answer: frames that come before it end the connection."""
    wire.sendall(GREETING + READY)
    _read(wire, len(GREETING))
    _, size = _read(wire, 2)
    _read(wire, size)


def send_endless_message(wire: socket.socket, frame: int) -> int:
    """One message of frames without end, until its connection is cut.

    Returns:
        How many bytes were sent.
    """
    sent, some = 0, framed(MORE, bytes(frame)) * (AT_ONCE // frame + 1)
    with contextlib.suppress(ConnectionError):
        shake_hands(wire)
        while True:
            wire.sendall(some)
            sent += len(some)
    return sent


def _read(wire: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = wire.recv(size - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data
