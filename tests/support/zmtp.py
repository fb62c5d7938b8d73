"""ZMTP without a library: a handshake, and frames of any kind."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

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

    Args:
        wire: connected.
        frame: bytes of each.

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
