"""Socket of this node's workers: hints and telemetry in, orders out."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nodeagent.errors import log_errors
from schemas.codec import FROM_WORKER, encode
from schemas.errors import OnesError
from schemas.host.logging import Audit
from schemas.ids import WorkerId, worker_id
from schemas.transport import Incoming, Link
from schemas.wire import Message
from schemas.wire.agent import GroupDelta
from schemas.wire.worker import FromWorker, GroupOrder, WorkerHello

MAX_LOGGED_NAME: Final = 200  # characters, in a log line
MAX_QUEUED: Final = 1000  # messages queued for a worker that does not read
MAX_WORKER_MESSAGE_BYTES: Final = 16 << 10  # bytes of a message from a worker: hints and telemetry


class WorkerChannel:
    """Connections of the workers, each identified by its worker's token.

    A connection belongs to a worker once it has sent that worker's token. All further messages are
    attributed to that worker, whatever they state about job, version and rank. `token_of` returns
    an empty token for an older library, which sends none, and None for an unknown worker.
    """

    def __init__(
        self,
        address: str,
        heard: Callable[[WorkerId, FromWorker], None],
        token_of: Callable[[WorkerId], str | None],
        *,
        open_to_all: bool = False,
    ) -> None:
        self._address = address
        self._open_to_all = open_to_all
        self._heard = heard
        self._token_of = token_of
        self._audit = Audit()
        self._link = Link()
        self.socket = self._link.bind(
            "ROUTER", address, queued=MAX_QUEUED, largest=MAX_WORKER_MESSAGE_BYTES
        )
        self._routes: dict[WorkerId, bytes] = {}
        self._speakers: dict[bytes, tuple[WorkerId, WorkerHello]] = {}
        self._open_to_workers()

    def _open_to_workers(self) -> None:
        if self._open_to_all:
            Path(self._address.removeprefix("ipc://")).chmod(0o666)

    def listen(self) -> None:
        """Bind again, for example after the socket was deleted; connections stay.

        Raises:
            SettingsError: if the address cannot be bound.
        """
        self.socket.listen(self._address)
        self._open_to_workers()

    async def receive(self) -> None:
        """Process messages of workers until cancelled."""
        async for incoming in self.socket:
            try:
                message = FROM_WORKER.decode(incoming.frames[-1])
            except OnesError as error:
                self._audit.refused("message of a worker", str(error))
                continue
            with log_errors("message of a worker"):
                self._handle(incoming, message)

    async def watch(self) -> None:
        """Disconnect workers that send more than is read, until cancelled."""
        await self._link.guard_connections(partial(self._audit.refused, "connection of a worker"))

    def _handle(self, incoming: Incoming, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self._accept_greeting(incoming.route, message)
        if (speaker := self._speakers.get(incoming.route)) is None:
            if not isinstance(message, WorkerHello):
                self._audit.refused("message of a worker", "no greeting before")
            return
        worker, hello = speaker
        who = {"job": hello.job, "version": hello.version, "rank": hello.rank}
        self._heard(worker, replace(message, **who))

    def _accept_greeting(self, route: bytes, hello: WorkerHello) -> None:
        """Accept a greeting with the worker's token; otherwise the connection has no worker."""
        self._disconnect(self._speakers.get(route, ("", None))[0])
        worker = worker_id(hello.job, hello.version, hello.rank)
        token = self._token_of(worker)
        if token is None or not hmac.compare_digest(token.encode(), hello.token.encode()):
            why = "unknown worker" if token is None else "wrong token"
            self._audit.refused("greeting of a worker", why, worker=worker[:MAX_LOGGED_NAME])
            return
        self._disconnect(worker)
        self._routes[worker] = route
        self._speakers[route] = worker, hello

    def _disconnect(self, worker: str) -> None:
        if (route := self._routes.pop(WorkerId(worker), None)) is not None:
            self._speakers.pop(route, None)

    def order(self, worker: WorkerId, delta: GroupDelta) -> None:
        """Send a worker the desired group; a delta without a group is ignored."""
        if delta.group is not None:
            order = GroupOrder(
                version=delta.version,
                stage=delta.stage,
                kind=delta.kind,
                group=delta.group,
                former=delta.former,
                store=delta.store,
                source=delta.source,
            )
            self.send(worker, order)

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send to a connected worker; others receive everything when they connect."""
        if (route := self._routes.get(worker)) is not None:
            self.socket.send(route, encode(message))

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has exited."""
        self._disconnect(worker)

    def close(self) -> None:
        """Close the socket; workers continue without it."""
        self._link.close()
