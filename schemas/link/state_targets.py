"""What takes the bytes of a state that comes from another node."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, Protocol

from schemas.state_files import (
    Buffer,
    DamagedStateError,
    header_size,
    read_frames,
    require_digest,
    split_frames,
)

MAX_HEADER: Final = 16 << 20  # bytes


class Target(Protocol):
    """Takes the bytes of a file, in any order."""

    def begin(self, total: int) -> None:
        """So many bytes will come; once for each source."""

    def write(self, offset: int, data: Buffer) -> None:
        """Some of them."""


class MemoryTarget:
    """Keeps the bytes in memory, and works out their digest as they come."""

    def __init__(self) -> None:
        """Begin without memory; what was taken once is used again, as far as it reaches.

        It is taken as bytes come, not for as many as somebody says will come.
        """
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
        """Begin anew."""
        if len(self._memory) < total:
            self._memory = bytearray()  # there may be views of the former one
        self._total, self._end, self._payload = total, 0, None
        self._digest = hashlib.sha256()

    def write(self, offset: int, data: Buffer) -> None:
        """Copy into it."""
        if (gap := offset - len(self._memory)) > 0:  # no wider than what is asked for at once
            self._memory.extend(bytes(gap))
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
            raise DamagedStateError("a state whose header does not end")

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
