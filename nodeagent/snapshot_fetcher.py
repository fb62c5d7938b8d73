"""Fetches archives of working directories from the log relay, piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nodeagent.agent_errors import NodeWorkspaceError, WorkspaceError
from schemas.codec import encode
from schemas.link import Socket
from schemas.messages.logs import GetSnapshot, SnapshotPiece

RETRY_S: Final = 2.0  # without an answer, ask again


@dataclass(slots=True)
class _Fetch:
    digest: str
    offset: int = 0
    pieces: asyncio.Queue[SnapshotPiece] = field(default_factory=asyncio.Queue)


class SnapshotFetcher:
    """Every archive that is on its way to this node."""

    def __init__(self) -> None:
        self._socket: Socket | None = None
        self._fetches: list[_Fetch] = []  # several jobs may want one archive at once
        self._connected = asyncio.Event()

    def use(self, socket: Socket) -> None:
        """Ask over `socket` from now on.

        Args:
            socket: connected to the log relay; the caller closes it.
        """
        self._socket = socket
        self._connected.set()

    def receive(self, message: SnapshotPiece) -> None:
        """Take the relay's answer: the next piece for whoever waits for it.

        Args:
            message: goes to every fetch of this archive that waits at this offset; it is dropped if
                none does.
        """
        for fetch in self._fetches:
            if fetch.digest == message.digest and fetch.offset == message.offset:
                fetch.pieces.put_nowait(message)

    async def fetch(self, digest: str, target: Path) -> None:
        """Bring an archive here.

        Args:
            digest: its sha256, which is its name.

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
            raise NodeWorkspaceError(f"cannot store a snapshot: {error.strerror}") from None
        finally:
            self._fetches.remove(fetch)

    async def _piece(self, fetch: _Fetch, offset: int) -> SnapshotPiece:
        fetch.offset = offset
        while True:
            await self._connected.wait()
            if self._socket is not None:
                self._socket.send(encode(GetSnapshot(digest=fetch.digest, offset=offset)))
            with contextlib.suppress(TimeoutError):
                while True:
                    piece = await asyncio.wait_for(fetch.pieces.get(), RETRY_S)
                    if piece.offset == offset:
                        return piece
