"""Publishes state changes, and wakes those who wait for them."""

from __future__ import annotations

import asyncio

from schemas.codec import encode
from schemas.daemon import Audit
from schemas.link import Socket
from schemas.messages.feed import FeedEvent

READERS = frozenset({"admin", "user", "viewer"})


class EventFeed:
    """The XPUB side, and a bell for long polls inside this process."""

    def __init__(self, wire: Socket, audit: Audit, last_seq: int) -> None:
        self._wire = wire
        self._audit = audit
        self._bell: asyncio.Future[None] | None = None
        self.last_seq = last_seq

    async def admit(self) -> None:
        """Grant subscriptions to keys that may read, for ever."""
        async for incoming in self._wire:
            frame = incoming.frames[0]
            role = incoming.identity.role if incoming.identity else ""
            if frame[:1] == b"\x00":
                self._wire.revoke(frame[1:])
            elif frame[:1] == b"\x01" and role in READERS:
                self._wire.admit(frame[1:])
            else:
                now = asyncio.get_running_loop().time()
                self._audit.refused("subscription", f"{incoming.identity} may not read", now)

    def publish(self, event: FeedEvent) -> None:
        """Send `event` under its job's or node's topic and ring the bell."""
        self.last_seq = event.seq
        self._wire.send(_topic(event).encode(), encode(event))
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    async def news(self, wait_s: float) -> None:
        """Return at the next event, or after `wait_s`."""
        if self._bell is None or self._bell.done():
            self._bell = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._bell], timeout=wait_s)


def _topic(event: FeedEvent) -> str:
    if event.job is not None:
        return f"job/{event.job}"
    return f"node/{event.node}" if event.node is not None else "cluster"
