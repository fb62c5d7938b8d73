"""Messages between the controller and its child processes, over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

HEADER: Final = struct.Struct("!I")
MAX_FRAME_BYTES: Final = 1 << 30
READ_BYTES: Final = 1 << 18
M = TypeVar("M")


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return a message as MessagePack, preceded by its length in bytes (4 bytes, big-endian)."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Decoder that splits a stream of bytes into message bodies."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each body that is complete once `data` is appended to the stream.

        Raises:
            ValueError: if a length exceeds `MAX_FRAME_BYTES`.
        """
        self._rest += data
        while len(self._rest) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._rest)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes exceeds {MAX_FRAME_BYTES} bytes")
            if len(self._rest) < HEADER.size + size:
                return
            body = bytes(self._rest[HEADER.size : HEADER.size + size])
            del self._rest[: HEADER.size + size]
            yield body


class MessagePipe(Generic[M]):
    """Two pipes to another process of this host, with `receive` called for each message.

    A message is written at once, unless the pipe is full. A receiver that calls `read` before it
    handles a message of somebody else has all messages that were sent before that one.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        decoder: msgspec.msgpack.Decoder[M],
        receive: Callable[[M], None],
    ) -> None:
        self._source, self._sink = source, sink
        self._decoder, self._receive = decoder, receive
        self._frames = FrameDecoder()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # by the other process
        for end in (source, sink):
            os.set_blocking(end, False)
        self._loop.add_reader(source, self.read)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the pipe did not take yet."""
        return len(self._unsent)

    def read(self) -> None:
        """Receive all messages that have arrived.

        Raises:
            ValueError: if a message cannot be decoded. The pipe is ended.
        """
        while not self.ended.done():
            try:
                data = os.read(self._source, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._end()
                return
            try:
                for body in self._frames.feed(data):
                    self._receive(self._decoder.decode(body))
            except ValueError:  # msgspec's errors are ValueErrors
                self._end()
                raise

    def read_on_demand(self) -> None:
        """Receive messages only in calls of `read` from now on, which must be frequent."""
        self._loop.remove_reader(self._source)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or nothing after the end of the pipe."""
        if self.ended.done():
            return
        was_empty = not self._unsent
        self._unsent += encode_frame(message)
        if was_empty:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._sink, self._write)

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    del self._unsent[: os.write(self._sink, self._unsent)]
            except BrokenPipeError:
                self._end()
        if not self._unsent:
            self._loop.remove_writer(self._sink)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self._unsent.clear()
            self._loop.remove_reader(self._source)
            self._loop.remove_writer(self._sink)

    def close(self) -> None:
        """Close both pipes."""
        self._end()
        os.close(self._source)
        os.close(self._sink)
