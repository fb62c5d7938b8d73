"""Relay of streams between clients and the agents of their jobs.

It knows the route of both ends of each stream and checks every message against them: the sender,
the credit, the number of streams. Messages that a client's queue cannot take at once wait here.
They are within the client's credit, so that a stream holds at most `WINDOW` bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from controlplane.core.model.job import Job
from controlplane.service.api.fair_queue import failure_reply
from controlplane.service.rights import refuse_revoked
from schemas.codec import encode
from schemas.errors import DeniedError, OnesError, UnavailableError
from schemas.host.logging import Audit
from schemas.ids import JobId, NodeId, WorkerId, node_of
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming, Socket
from schemas.transport.stream_ends import LOST_S
from schemas.wire import Message
from schemas.wire.streams import (
    MAX_REASON,
    PORT,
    WINDOW,
    FromClient,
    FromNode,
    OpenStream,
    StreamClosed,
    StreamData,
    StreamOpened,
)

MAX_STREAMS: Final = 1000
MAX_OF_USER: Final = 32
MAX_WAITING: Final = 256  # messages of one stream that wait for its client
RETRY_S: Final = 0.002  # between attempts to send what waits
TICK_S: Final = 1.0


@dataclass(eq=False, slots=True)
class _Stream:
    asked: OpenStream
    user: str
    client: Incoming  # latest opening
    node: NodeId
    heard_at: float
    route: bytes = b""  # of the agent; empty: it has not replied
    to_node: int = 0  # its client may send up to this byte
    to_client: int = 0  # its node may send up to this byte
    sent: int = 0  # bytes that passed from its client, repeated ones included
    received: int = 0
    waiting: deque[bytes] = field(default_factory=deque)
    end: str | None = None  # reason of its end, while last messages wait for the client

    @property
    def detail(self) -> dict[str, str]:
        """Fields of the audit lines."""
        asked = self.asked
        what = f"port {asked.port}" if asked.what == PORT else asked.what
        return {"job": asked.job, "worker": asked.worker, "kind": what, "stream": asked.stream}


@dataclass(kw_only=True, eq=False)
class StreamRelay:
    """Streams of all clients.

    `ask` sends a request to a node. If the node is not connected, `node_away` is called later.
    """

    shippers: Socket
    followers: Socket
    job: Callable[[JobId], Job]
    ask: Callable[[NodeId, OpenStream], None]
    audit: Audit
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        """Set up the state that no caller passes."""
        self._streams: dict[str, _Stream] = {}
        self._retrying = False

    # --- from clients

    def from_client(self, incoming: Incoming, who: Identity, message: FromClient) -> None:
        """Process a message of a client. Its right to open a stream was checked before.

        A message of a stream that has no route to its node is lost: its client opens it again.
        """
        stream = self._streams.get(message.stream)
        if stream is not None and stream.user != str(who):
            raise DeniedError("the stream belongs to another user", "open one of your own")
        if isinstance(message, OpenStream):
            self._open(incoming, str(who), message, stream)
            return
        if stream is None:
            return
        stream.heard_at = self.clock()
        if stream.route:
            if isinstance(message, StreamData):
                self._check_client(stream, message)
            self.shippers.send(stream.route, encode(message))
        if isinstance(message, StreamClosed):
            self._forget(stream, "its client closed it")
            self._to_client(stream, StreamClosed(stream=message.stream, reason="closed"))

    def _check_client(self, stream: _Stream, message: StreamData) -> None:
        if message.offset + len(message.data) > stream.to_node:
            self._end(stream, "its client sent beyond its credit")
            raise DeniedError("data beyond the credit of the stream", "compare releases")
        stream.sent += len(message.data)
        stream.to_client = max(stream.to_client, message.limit)
        if message.lost:
            stream.waiting.clear()  # it is sent again

    def _open(
        self, incoming: Incoming, user: str, asked: OpenStream, known: _Stream | None
    ) -> None:
        worker, node = self._worker_of(asked)
        asked = replace(asked, worker=worker, user=user, journal=self.job(asked.job).journal)
        if known is None:
            mine = sum(one.user == user for one in self._streams.values())
            if mine >= MAX_OF_USER or len(self._streams) >= MAX_STREAMS:
                what = f"{mine} of your streams are open" if mine >= MAX_OF_USER else "too many"
                raise UnavailableError(f"{what}, the limit", "close some")
            known = _Stream(asked, user, incoming, node, self.clock())
        elif (known.asked.job, known.asked.what) != (asked.job, asked.what):
            raise DeniedError("the stream is open for something else", "choose another id")
        self.ask(node, asked)
        if asked.stream not in self._streams:
            self._streams[asked.stream] = known
            self.audit.done("stream opened", by=user, **known.detail)
        known.asked, known.client, known.node, known.heard_at = asked, incoming, node, self.clock()
        self._to_client(known, StreamOpened(stream=asked.stream, worker=worker))

    def _worker_of(self, asked: OpenStream) -> tuple[WorkerId, NodeId]:
        job = self.job(asked.job)
        known = job.workers.get(asked.worker)
        if known is None:
            members = job.group.members if job.group is not None else ()
            names = [one.worker for one in members if one.rank == asked.rank]
            known = job.workers.get(names[0]) if names else None
        if known is None:
            ranks = f"of rank {asked.rank} " if asked.rank else ""
            what = f"no process {ranks}of {job.job} runs: it is {job.phase.value}"
            raise UnavailableError(what, "see `ones show`")
        return known.worker, node_of(known.slot)

    def node_away(self, asked: OpenStream) -> None:
        """Refuse an opening whose node is not connected. The client of an open stream tries again.

        Nothing happens if the stream has ended, or was opened to another worker since.
        """
        stream = self._streams.get(asked.stream)
        if stream is None or stream.asked.worker != asked.worker:
            return
        error = UnavailableError(f"node {stream.node} is not connected", "try again later")
        self.followers.send(*stream.client.frames[:-1], encode(failure_reply(error)))
        if not stream.route:
            self._forget(stream, error.message)

    # --- from nodes

    def from_node(self, incoming: Incoming, message: FromNode) -> None:
        """Process a message of an agent. Drop it if its stream has ended.

        Raises:
            DeniedError: if the stream is one of another node, or its data exceed the credit.
        """
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        name = incoming.identity.name if incoming.identity is not None else ""
        if name != stream.node:
            raise DeniedError(f"the stream is not one of node {name}")
        stream.route = incoming.route
        if isinstance(message, StreamData):
            stream.to_client = stream.to_client or message.kept_from + WINDOW
            if message.offset + len(message.data) > stream.to_client:
                self._end(stream, "its node sent beyond its credit")
                raise DeniedError("data beyond the credit of the stream")
            stream.received += len(message.data)
            stream.to_node = max(stream.to_node, message.limit)
        self._to_client(stream, message)
        if isinstance(message, StreamClosed):
            stream.end = message.reason
            if not stream.waiting:
                self._forget(stream, message.reason)

    def _to_client(self, stream: _Stream, message: Message) -> None:
        data = encode(message)
        if stream.waiting or not self.followers.send(*stream.client.frames[:-1], data):
            if len(stream.waiting) >= MAX_WAITING:
                stream.waiting.clear()  # the client notices the loss
            stream.waiting.append(data)
            if not self._retrying:
                self._retry_soon()

    def _retry_soon(self) -> None:
        self._retrying = True
        asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        """Send what waits, as far as the clients' queues take it."""
        self._retrying = False
        for stream in list(self._streams.values()):
            while stream.waiting and self.followers.send(
                *stream.client.frames[:-1], stream.waiting[0]
            ):
                stream.waiting.popleft()
            if stream.end is not None and not stream.waiting:
                self._forget(stream, stream.end)
        if any(stream.waiting for stream in self._streams.values()):
            self._retry_soon()

    # --- ends

    async def watch(self) -> None:
        """Forget streams of silent clients until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.end_silent()

    def end_silent(self) -> None:
        """End the streams whose clients were silent for `LOST_S`."""
        for stream in list(self._streams.values()):
            if self.clock() - stream.heard_at > LOST_S:
                self._end(stream, "its client is silent")

    def end_revoked(self) -> None:
        """End the streams of clients whose keys were revoked."""
        for stream in list(self._streams.values()):
            try:
                refuse_revoked(stream.client)
            except OnesError as error:
                self._end(stream, error.message)

    def _end(self, stream: _Stream, reason: str) -> None:
        """Close a stream at both ends."""
        closed = StreamClosed(stream=stream.asked.stream, reason=reason[:MAX_REASON])
        self.followers.send(*stream.client.frames[:-1], encode(closed))
        if stream.route:
            self.shippers.send(stream.route, encode(closed))
        self._forget(stream, reason)

    def _forget(self, stream: _Stream, reason: str) -> None:
        if self._streams.pop(stream.asked.stream, None) is None:
            return
        sizes = {"sent": str(stream.sent), "received": str(stream.received)}
        self.audit.done("stream closed", by=stream.user, why=reason, **stream.detail, **sizes)
