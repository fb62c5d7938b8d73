"""Files of a job go to its owner and to admins, from the node that was asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.service.relay import job_files
from controlplane.service.relay.job_files import JobFiles
from schemas.errors import BadFieldError, UnavailableError, UnknownNodeError
from schemas.ids import NodeId
from schemas.transport.keys import Identity
from schemas.wire.files import (
    AskFiles,
    AskPiece,
    FileInfo,
    FileList,
    FilePiece,
    FilesRefused,
    ListFiles,
    ReadFile,
    ToNode,
)
from tests.support.builders import N1, N2, A
from tests.support.controller import cluster_of

OWNER = Identity("user", "ann")
FILE = FileInfo(area="work", path="x", size=1, stamp="s")


class Desk:
    """The relay's part, with a cluster of two nodes on which ann has a job, and what was asked."""

    def __init__(self) -> None:
        controller = cluster_of(n1=1, n2=1)
        controller.submit("a")
        assert controller.job(A).user == "ann"
        self.asked: list[tuple[NodeId, ToNode]] = []
        self.files = JobFiles(state=lambda: controller.state, ask=self._ask)

    def _ask(self, node: NodeId, message: ToNode) -> None:
        self.asked.append((node, message))

    async def begin(self, request: Any, who: Identity = OWNER) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.files.reply(request, who))
        await asyncio.sleep(0)
        return task

    @property
    def name(self) -> str:
        return self.asked[-1][1].request


async def test_a_list_is_requested_from_the_named_node() -> None:
    desk = Desk()
    reply = await desk.begin(ListFiles(job=A, node=N1))
    answer = FileList(request=desk.name, files=(FILE,))

    desk.files.receive(N2, FileList(request=desk.name, files=()))  # says so, and was not asked
    desk.files.receive(N1, answer)

    assert await reply == answer
    assert desk.asked == [(N1, AskFiles(request=desk.name, job=A))]


async def test_a_piece_is_requested_as_the_client_asked() -> None:
    desk = Desk()
    reply = await desk.begin(ReadFile(job=A, node=N2, area="checkpoints", path="e.pt", offset=7))
    answer = FilePiece(request=desk.name, offset=7, data=b"x", size=8, stamp="s", digest="d")

    desk.files.receive(N2, answer)
    desk.files.receive(N2, answer)  # a second time: nobody waits

    assert await reply == answer
    assert desk.asked == [
        (N2, AskPiece(request=desk.name, job=A, area="checkpoints", path="e.pt", offset=7))
    ]


async def test_an_unknown_node_is_named() -> None:
    desk = Desk()

    with pytest.raises(UnknownNodeError, match="n9"):
        await desk.files.reply(ListFiles(job=A, node=NodeId("n9")), OWNER)


async def test_the_refusal_of_a_node_is_raised_to_the_client() -> None:
    desk = Desk()
    reply = await desk.begin(ReadFile(job=A, node=N1, area="work", path="..", offset=0))

    desk.files.receive(
        N1, FilesRefused(request=desk.name, code="bad_field", message="leads out", hint="no")
    )

    with pytest.raises(BadFieldError, match="leads out; no"):
        await reply


async def test_a_disconnected_or_silent_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    reply = await desk.begin(ListFiles(job=A, node=N1))
    desk.files.node_away(desk.name)
    with pytest.raises(UnavailableError, match="node n1 is not connected"):
        await reply

    monkeypatch.setattr(job_files, "REPLY_TIMEOUT_S", 0.0)
    with pytest.raises(UnavailableError, match="node n1 does not reply"):
        await Desk().files.reply(ListFiles(job=A, node=N1), OWNER)


async def test_file_requests_of_a_user_are_bounded() -> None:
    desk = Desk()
    replies = [await desk.begin(ListFiles(job=A, node=N1)) for _ in range(job_files.MAX_UNDER_WAY)]

    with pytest.raises(UnavailableError, match="too many files are being fetched"):
        await desk.files.reply(ListFiles(job=A, node=N1), OWNER)

    for _, asked in desk.asked:
        desk.files.receive(N1, FileList(request=asked.request, files=()))
    assert len(await asyncio.gather(*replies)) == job_files.MAX_UNDER_WAY
