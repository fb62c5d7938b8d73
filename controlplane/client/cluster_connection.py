"""One cluster's sockets: a request goes out, and its reply comes back or its error is raised."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from controlplane.client.cluster_home import Home, find_home
from controlplane.client.request_channel import RequestChannel
from schemas.codec import LOG_REPLY, REPLY, Codec
from schemas.errors import UnreachableError
from schemas.link import Link, load_keys, load_public
from schemas.messages import Message
from schemas.messages.client import Cluster, GetCluster, PutSnapshot, SnapshotStored
from schemas.messages.logs import LogPage, ReadLog

PIECE: Final = 1 << 20
PATIENCE_S: Final = 60.0  # how long those who wait and follow bear an absent controller
ANSWER_S: Final = 3.0  # beyond a long poll's own wait
TIMEOUT: Final = "ONES_TIMEOUT_S"
R = TypeVar("R", bound=Message)


class ClusterConnection:
    """A connection to one cluster; an async context manager.

    Args:
        home: the cluster's folder; default: $ONES_HOME, else ~/.ones.
        timeout: seconds; default: $ONES_TIMEOUT_S, else 10.

    Raises:
        SettingsError: if there is no cluster in that folder, or its keys cannot be used.
    """

    def __init__(self, home: Home | Path | str | None = None, timeout: float | None = None) -> None:
        self._home = home if isinstance(home, Home) else find_home(home)
        self._timeout = float(os.environ.get(TIMEOUT, "10")) if timeout is None else timeout
        self._link = Link(load_keys(self._home.key))
        self._server_key = load_public(self._home.server_key)
        self._calls: RequestChannel | None = None
        self._logs: RequestChannel | None = None

    async def __aenter__(self) -> Self:
        """Open the socket; the first call finds out whether anybody is there."""
        self._calls = self._open_channel(self._home.endpoint, REPLY)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all sockets."""
        for channel in (self._calls, self._logs):
            if channel is not None:
                channel.close()
        await asyncio.sleep(0)
        self._link.close()

    async def cluster(self) -> Cluster:
        """Who answers, and as whom you are known."""
        return await self._call(GetCluster(), Cluster)

    async def _put(self, digest: str, archive: bytes) -> None:
        offset = 0
        while offset < len(archive) or offset == 0:
            piece = archive[offset : offset + PIECE]
            request = PutSnapshot(digest=digest, offset=offset, data=piece, total=len(archive))
            stored = await self._call(request, SnapshotStored)
            offset = stored.size
            if offset == len(archive):
                return

    async def _call(self, request: Message, kind: type[R], wait_s: float = 0.0) -> R:
        if self._calls is None:
            raise UnreachableError("the client is not open", "use `async with Client() as client`")
        answer_s = wait_s + ANSWER_S
        limit_s = PATIENCE_S if wait_s else self._timeout
        reply = await self._calls.call(request, answer_s, limit_s)
        return _expected(reply, kind)

    async def _page(self, request: ReadLog) -> LogPage:
        if self._logs is None:
            cluster = await self.cluster()
            endpoint = f"tcp://{self._home.host}:{cluster.log_port}"
            self._logs = self._open_channel(endpoint, LOG_REPLY)
        answer_s = request.wait_s + ANSWER_S
        limit_s = PATIENCE_S if request.wait_s else self._timeout
        reply = await self._logs.call(request, answer_s, limit_s)
        return _expected(reply, LogPage)

    def _open_channel(self, endpoint: str, codec: Codec[Any]) -> RequestChannel:
        return RequestChannel(self._link.connect("DEALER", endpoint, self._server_key), codec)


def _expected(reply: Any, kind: type[R]) -> R:
    if not isinstance(reply, kind):
        raise UnreachableError(
            f"the controller answered {type(reply).__name__}", "compare releases"
        )
    return reply
