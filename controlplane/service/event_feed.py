"""Publishes state changes, and wakes those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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
        bind: opens such a socket anew, however long that takes.
    """

    def __init__(
        self, socket: Socket, audit: Audit, last_seq: int, bind: Callable[[], Awaitable[Socket]]
    ) -> None:
        self._socket: Socket | None = socket
        self._audit = audit
        self._bind = bind
        self._cut = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None  # of all who wait for the next event
        self.last_seq = last_seq

    async def admit_subscribers(self) -> None:
        """Grant subscriptions to keys that may read, for ever."""
        while True:
            socket = self._socket = self._socket or await self._bind()
            self._cut.clear()
            admitting = asyncio.create_task(self._admit(socket))
            cut = asyncio.create_task(self._cut.wait())
            try:
                await asyncio.wait({admitting, cut}, return_when=asyncio.FIRST_COMPLETED)
                if not cut.done():
                    await admitting  # it has failed
            finally:
                admitting.cancel()
                cut.cancel()
            await asyncio.wait({admitting})
            socket.close()

    async def _admit(self, socket: Socket) -> None:
        async for incoming in socket:
            frame = incoming.frames[0]
            role = incoming.identity.role if incoming.identity else ""
            if frame[:1] == b"\x00":
                socket.revoke(frame[1:])
            elif frame[:1] == b"\x01" and role in READERS:
                socket.admit(frame[1:])
            else:
                self._audit.refused("subscription", f"{incoming.identity} may not read")

    def cut_off(self) -> None:
        """End all connections at once: ZeroMQ cannot end one of them.

        Whoever may still read connects and subscribes again by itself, and misses what is published
        meanwhile, as its number tells.
        """
        self._socket = None
        self._cut.set()

    def publish(self, event: FeedEvent) -> None:
        """Send `event` under its job's or node's topic and wake who waits.

        Args:
            event: with a number above that of the one before.
        """
        self.last_seq = event.seq
        if self._socket is not None:
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
