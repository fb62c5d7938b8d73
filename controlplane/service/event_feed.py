"""Feed of state changes (port 7703). New events also wake long polls of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from msgspec.structs import replace

from controlplane.core.model.job import JobOwner
from controlplane.service.api.views import hide_names, hide_users
from controlplane.service.rights import granted_topics
from schemas.codec import encode
from schemas.host.logging import Audit
from schemas.ids import JobId
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming, Socket
from schemas.wire.feed import FeedEvent

MAX_TOPIC: Final = 256  # bytes of a subscription
MAX_SUBSCRIPTION_BYTES: Final = (
    128 << 10
)  # bytes of one key's subscriptions; libzmq uses 50 times as much memory


class EventFeed:
    """XPUB socket of the feed. Long polls wait for the next event.

    `bind` opens the socket again, retrying until it succeeds.
    """

    def __init__(
        self,
        socket: Socket,
        audit: Audit,
        last_seq: int,
        bind: Callable[[], Awaitable[Socket]],
        owner_of: Callable[[JobId], JobOwner | None],
    ) -> None:
        self._socket: Socket | None = socket
        self._audit = audit
        self._bind = bind
        self._owner_of = owner_of
        self._cut_off = asyncio.Event()
        self._waiter: asyncio.Future[None] | None = None  # all long polls await this future
        self.last_seq = last_seq

    async def admit_subscribers(self) -> None:
        """Grant subscriptions to keys that may read, until cancelled."""
        while True:
            socket = self._socket = self._socket or await self._bind()
            self._cut_off.clear()
            admitting = asyncio.create_task(self._admit(socket))
            cut = asyncio.create_task(self._cut_off.wait())
            try:
                await asyncio.wait({admitting, cut}, return_when=asyncio.FIRST_COMPLETED)
                if not cut.done():
                    await admitting  # raises the error of the admitting task
            finally:
                admitting.cancel()
                cut.cancel()
            await asyncio.wait({admitting})
            socket.close()

    async def _admit(self, socket: Socket) -> None:
        async for incoming in socket:
            kind, topic = incoming.frames[0][:1], incoming.frames[0][1:]
            if incoming.key and not self._is_within_bound(socket, incoming):
                continue
            who = incoming.identity or Identity("", "")
            granted = granted_topics(who, topic) if len(topic) <= MAX_TOPIC else ()
            if kind == b"\x00":
                for one in granted or (topic,):
                    socket.revoke_topic(one)
            elif kind == b"\x01" and granted:
                for one in granted:
                    socket.grant_topic(one)
            else:
                what = f"{incoming.identity} may not subscribe to {topic[:80]!r}"
                self._audit.refused("subscription", what, peer=str(incoming.identity))

    def _is_within_bound(self, socket: Socket, incoming: Incoming) -> bool:
        """True if a key's subscriptions are within their bound. If not, cut the connection."""
        kept_bytes = socket.count_kept_bytes(incoming)
        if kept_bytes is None:  # the key's connection was just cut
            return False
        if kept_bytes <= MAX_SUBSCRIPTION_BYTES:
            return True
        what = f"{kept_bytes} bytes of subscriptions of one key exceed {MAX_SUBSCRIPTION_BYTES}"
        self._audit.refused("flood", what, peer=str(incoming.identity))
        socket.cut(incoming)
        return False

    def cut_off(self) -> None:
        """Close all connections, because ZeroMQ cannot close a single one.

        Clients that may still read reconnect and subscribe again. They miss the events published
        meanwhile, and notice the gap in the event numbers.
        """
        self._socket = None
        self._cut_off.set()

    def publish(self, event: FeedEvent) -> None:
        """Send `event` once for each audience, and wake the long polls.

        `event.seq` must be higher than the number of the last event.
        """
        self.last_seq = event.seq
        if self._socket is not None:
            data = encode(event)
            for topic, redacted in self._topics(event):
                self._socket.send(topic.encode(), data if redacted is event else encode(redacted))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _topics(self, event: FeedEvent) -> Iterator[tuple[str, FeedEvent]]:
        """Yield each topic and the event, without the job names that its readers must not see."""
        if event.job is None:
            topic = f"node/{event.node}" if event.node is not None else "cluster"
            yield topic, self._redact(event, "")
            return
        yield f"job/{event.job}", event
        owner = self._owner_of(event.job)
        if owner is not None:
            yield f"project/{owner.project}/job/{event.job}", self._redact(event, owner.project)

    def _redact(self, event: FeedEvent, project: str) -> FeedEvent:
        def hides(job: JobId) -> bool:
            owner = self._owner_of(job)
            return owner is not None and owner.project != project

        def text(value: str) -> str:
            return hide_users(hide_names(value, hides), {project})

        detail = {
            name: text(value) if isinstance(value, str) else value
            for name, value in event.detail.items()
        }
        return event if detail == event.detail else replace(event, detail=detail)

    async def wait(self, wait_s: float) -> None:
        """Return at the next event, or after `wait_s` seconds."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._waiter], timeout=wait_s)
