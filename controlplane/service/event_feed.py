"""Publishes state changes, and wakes those who wait for them."""

from __future__ import annotations

import asyncio

from controlplane.service.role_permissions import READERS
from schemas.codec import encode
from schemas.link import Socket
from schemas.logging_and_watchdog import Audit
from schemas.messages.feed import FeedEvent


class EventFeed:
    """The XPUB side, and what long polls inside this process wait for.

    Args:
        socket: XPUB of the feed's port; subscriptions are granted one by one.
        audit: refused subscriptions.
        last_seq: number of the last event that was published before, 0 if none was.
    """

    def __init__(self, socket: Socket, audit: Audit, last_seq: int) -> None:
        self._socket = socket
        self._audit = audit
        self._waiter: asyncio.Future[None] | None = None  # of all who wait for the next event
        self.last_seq = last_seq

    async def admit_subscribers(self) -> None:
        """Grant subscriptions to keys that may read, for ever."""
        async for incoming in self._socket:
            frame = incoming.frames[0]
            role = incoming.identity.role if incoming.identity else ""
            if frame[:1] == b"\x00":
                self._socket.revoke(frame[1:])
            elif frame[:1] == b"\x01" and role in READERS:
                self._socket.admit(frame[1:])
            else:
                self._audit.refused("subscription", f"{incoming.identity} may not read")

    def publish(self, event: FeedEvent) -> None:
        """Send `event` under its job's or node's topic and wake who waits.

        Args:
            event: with a number above that of the one before.
        """
        self.last_seq = event.seq
        self._socket.send(_topic(event).encode(), encode(event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, wait_s: float) -> None:
        """Return at the next event, or after `wait_s` seconds.

        Args:
            wait_s: seconds, at most.
        """
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._waiter], timeout=wait_s)


def _topic(event: FeedEvent) -> str:
    if event.job is not None:
        return f"job/{event.job}"
    return f"node/{event.node}" if event.node is not None else "cluster"
