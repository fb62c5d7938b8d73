"""Files of jobs. Requests of clients are forwarded to the agents that have the files."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from controlplane.core.state import State
from schemas.errors import UnavailableError, UnknownNodeError, error_from_code, suggestion
from schemas.ids import NodeId
from schemas.transport.keys import Identity
from schemas.wire.files import (
    AskFiles,
    AskPiece,
    FileList,
    FilePiece,
    FilesRefused,
    FromFollower,
    FromNode,
    ReadFile,
    ToNode,
)

REPLY_TIMEOUT_S: Final = 10.0  # includes the time for which the agent reads from disk
MAX_UNDER_WAY: Final = 64  # requests of one user; a client sends one request at a time


@dataclass(kw_only=True, eq=False)
class JobFiles:
    """Requests that wait for the reply of an agent.

    `ask` sends a request to a node. If the node is not connected, `node_away` is called later.
    """

    state: Callable[[], State]
    ask: Callable[[NodeId, ToNode], None]
    _waiting: dict[str, tuple[NodeId, str, asyncio.Future[FromNode]]] = field(
        init=False, default_factory=dict
    )

    async def reply(self, request: FromFollower, who: Identity) -> FileList | FilePiece:
        """Return the file list or file piece that the node sends for a permitted request.

        Raises:
            UnknownNodeError: if no such node ever joined.
            UnavailableError: if the node does not reply, or too many of the user's requests are
                waiting.
            OnesError: if the node reports this error.
        """
        if request.node not in self.state().nodes:
            what = f"no node {request.node!r}"
            hint = suggestion(request.node, self.state().nodes, "`ones node list` lists all nodes")
            raise UnknownNodeError(what, hint, "node")
        mine = sum(user == who.name for _, user, _ in self._waiting.values())
        if mine >= MAX_UNDER_WAY:
            raise UnavailableError("too many files are being fetched", "fetch fewer at a time")
        answer = await self._request_from_node(request, who)
        if isinstance(answer, FilesRefused):
            raise error_from_code(answer.code, answer.message, answer.hint, "")
        return answer

    async def _request_from_node(self, request: FromFollower, who: Identity) -> FromNode:
        name = uuid.uuid4().hex
        answer: asyncio.Future[FromNode] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (request.node, who.name, answer)
        try:
            asked: ToNode = AskFiles(request=name, job=request.job)
            if isinstance(request, ReadFile):
                asked = AskPiece(
                    request=name, job=request.job, area=request.area, path=request.path,
                    offset=request.offset,
                )  # fmt: skip
            self.ask(request.node, asked)
            return await asyncio.wait_for(answer, REPLY_TIMEOUT_S)
        except TimeoutError:
            hint = "check its agent's version and its disk"
            raise UnavailableError(f"node {request.node} does not reply", hint) from None
        finally:
            del self._waiting[name]

    def node_away(self, request: str) -> None:
        """Fail a request whose node is not connected."""
        node, _, answer = self._waiting.get(request, (NodeId(""), "", None))
        if answer is not None and not answer.done():
            hint = "try again when it is connected"
            answer.set_exception(UnavailableError(f"node {node} is not connected", hint))

    def receive(self, node: NodeId, message: FromNode) -> None:
        """Deliver an agent's reply. Drop the reply if no request to this node waits for it."""
        asked, _, answer = self._waiting.get(message.request, (NodeId(""), "", None))
        if answer is not None and asked == node and not answer.done():
            answer.set_result(message)
