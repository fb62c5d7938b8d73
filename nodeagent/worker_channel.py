"""The socket that this node's workers connect to: hints and telemetry in, orders out."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from nodeagent.agent_errors import passed_over
from schemas.codec import FROM_WORKER, encode
from schemas.errors import OnesError
from schemas.ids import WorkerId, worker_id
from schemas.link import Link
from schemas.messages import Message
from schemas.messages.agent import GroupDelta
from schemas.messages.worker import FromWorker, GroupOrder, WorkerHello

log = structlog.get_logger("worker_channel")


class WorkerChannel:
    """Knows the way to each worker that greeted.

    Args:
        address: ipc://PATH; its folder is there.
        heard: takes what a worker says.
    """

    def __init__(self, address: str, heard: Callable[[WorkerId, FromWorker], None]) -> None:
        self._address = address
        self._heard = heard
        self.socket = Link().bind("ROUTER", address)
        self._routes: dict[WorkerId, bytes] = {}

    def listen(self) -> None:
        """Bind once more, as when somebody deleted the socket; those who are connected stay.

        Raises:
            SettingsError: if it cannot be had.
        """
        self.socket.listen(self._address)

    async def receive(self) -> None:
        """Take what workers say, for ever."""
        async for incoming in self.socket:
            try:
                message = FROM_WORKER.decode(incoming.frames[-1])
            except OnesError as error:
                log.warning("dropped", error=str(error))
                continue
            worker = worker_id(message.job, message.version, message.rank)
            with passed_over("message of a worker", worker=worker):
                if isinstance(message, WorkerHello):
                    self._routes[worker] = incoming.route
                self._heard(worker, message)

    def order(self, worker: WorkerId, delta: GroupDelta) -> None:
        """Tell a worker what is wanted of its group.

        Args:
            worker: as in `send`.
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
        """To a worker that greeted; the others hear of everything when they do.

        Args:
            worker: its name.
            message: for it.
        """
        if (route := self._routes.get(worker)) is not None:
            self.socket.send(route, encode(message))

    def forget(self, worker: WorkerId) -> None:
        """It has ended.

        Args:
            worker: its name.
        """
        self._routes.pop(worker, None)
