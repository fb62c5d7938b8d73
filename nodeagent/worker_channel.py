"""The socket that this node's workers connect to: hints and telemetry in, orders out."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from nodeagent.settings import passed_over
from schemas.codec import FROM_WORKER, encode
from schemas.errors import OnesError
from schemas.host.logging import Audit
from schemas.ids import WorkerId, worker_id
from schemas.transport import Incoming, Link
from schemas.wire import Message
from schemas.wire.agent import GroupDelta
from schemas.wire.worker import FromWorker, GroupOrder, WorkerHello

LONGEST_NAME: Final = 200  # characters, in a log line
QUEUED: Final = 1000  # messages that wait for a worker that does not read
MAX_SAID: Final = 16 << 10  # bytes of a message of a worker: hints and telemetry


class WorkerChannel:
    """Knows the way to each worker that greeted, and which worker speaks over a connection.

    A connection is a worker's once it has shown that worker's token. What it says from then on is
    said of that worker, whatever the messages say of job, version and rank.

    Args:
        address: ipc://PATH; its folder is there.
        token_of: what a worker has to show; empty: an older library shows nothing; None: no such
            worker is here.
        open_to_all: whether workers run as other users than the agent.
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
        self.socket = self._link.bind("ROUTER", address, queued=QUEUED, largest=MAX_SAID)
        self._routes: dict[WorkerId, bytes] = {}
        self._speakers: dict[bytes, tuple[WorkerId, WorkerHello]] = {}
        self._admit()

    def _admit(self) -> None:
        if self._open_to_all:
            Path(self._address.removeprefix("ipc://")).chmod(0o666)

    def listen(self) -> None:
        """Bind once more, as when somebody deleted the socket; those who are connected stay.

        Raises:
            SettingsError: if it cannot be had.
        """
        self.socket.listen(self._address)
        self._admit()

    async def receive(self) -> None:
        """Take what workers say, for ever."""
        async for incoming in self.socket:
            try:
                message = FROM_WORKER.decode(incoming.frames[-1])
            except OnesError as error:
                self._audit.refused("message of a worker", str(error))
                continue
            with passed_over("message of a worker"):
                self._take(incoming, message)

    async def watch(self) -> None:
        """Cut off who sends more than is taken of it, for ever."""
        await self._link.watch_connections(partial(self._audit.refused, "connection of a worker"))

    def _take(self, incoming: Incoming, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self._greeted(incoming.route, message)
        if (speaker := self._speakers.get(incoming.route)) is None:
            if not isinstance(message, WorkerHello):
                self._audit.refused("message of a worker", "it did not greet")
            return
        worker, hello = speaker
        who = {"job": hello.job, "version": hello.version, "rank": hello.rank}
        self._heard(worker, replace(message, **who))

    def _greeted(self, route: bytes, hello: WorkerHello) -> None:
        """Believe a greeting that shows the worker's token; else its connection is nobody's."""
        self._hang_up(self._speakers.get(route, ("", None))[0])
        worker = worker_id(hello.job, hello.version, hello.rank)
        token = self._token_of(worker)
        if token is None or not hmac.compare_digest(token.encode(), hello.token.encode()):
            why = "no such worker is here" if token is None else "it does not show its token"
            self._audit.refused("greeting of a worker", why, worker=worker[:LONGEST_NAME])
            return
        self._hang_up(worker)
        self._routes[worker] = route
        self._speakers[route] = worker, hello

    def _hang_up(self, worker: str) -> None:
        if (route := self._routes.pop(WorkerId(worker), None)) is not None:
            self._speakers.pop(route, None)

    def order(self, worker: WorkerId, delta: GroupDelta) -> None:
        """Tell a worker what is wanted of its group.

        Args:
            delta: without a group it is nothing that a worker could follow.
        """
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
        """To a worker that greeted; the others hear of everything when they do."""
        if (route := self._routes.get(worker)) is not None:
            self.socket.send(route, encode(message))

    def forget(self, worker: WorkerId) -> None:
        """It has ended."""
        self._hang_up(worker)

    def close(self) -> None:
        """Give up the socket; workers go on without."""
        self._link.close()
