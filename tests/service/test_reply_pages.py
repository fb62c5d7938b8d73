"""Lists of any length reach their readers whole, in pages that a message has room for."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

import msgspec
import pytest

from controlplane.client.client import Client
from controlplane.service.api import views
from controlplane.service.api.server import _encode_reply
from controlplane.service.api.views import page_of
from schemas.codec import encode
from schemas.errors import BadFieldError, TooLargeError
from schemas.ids import NodeId
from schemas.wire import Message
from schemas.wire.client import ExplainJob, GetJob, ListJobs, ListNodes, ReadEvents, WaitJob
from tests.support import builders
from tests.support.builders import A
from tests.support.service import LiveService

ROOM: Final = 4000  # bytes of a page, in these tests


class Connected(Client):
    """A client whose requests go to a service in this process."""

    def __init__(self, service: LiveService) -> None:
        self._service = service
        self.replies: list[Any] = []

    async def _call(self, request: Message, kind: type[Any], wait_s: float = 0.0) -> Any:
        reply = await self._service.ask(request)
        assert isinstance(reply, kind)
        self.replies.append(reply)
        return reply


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "PAGE_BYTES", ROOM)


@pytest.fixture
def client(service: LiveService) -> Connected:
    return Connected(service)


async def test_all_jobs_are_listed_in_order_over_several_pages(
    service: LiveService, client: Connected
) -> None:
    for number in range(30):
        service.take(builders.submission(f"b{number}"))
    await service.loop.caught_up()

    jobs = await client.jobs(ended=True)

    assert [job.job for job in jobs] == [A, *(f"b{at}-{at + 2}" for at in range(30))]
    assert len(client.replies) > 2
    assert [reply.left_out for reply in client.replies][-2:] == [1, 0]
    assert all(len(encode(reply)) < ROOM + 200 for reply in client.replies)


async def test_pages_of_jobs_continue_although_jobs_end_meanwhile(service: LiveService) -> None:
    for number in range(30):
        service.take(builders.submission(f"b{number}"))
    await service.loop.caught_up()
    first = await service.ask(ListJobs())
    service.take(builders.cancelled(first.jobs[1].job))
    await service.loop.caught_up()
    second = await service.ask(ListJobs(cursor=first.next))

    seen = [job.job for page in (first, second) for job in page.jobs]
    assert seen == [A, *(f"b{at}-{at + 2}" for at in range(len(seen) - 1))]


async def test_all_epochs_and_decisions_of_a_job_are_shown(
    service: LiveService, client: Connected
) -> None:
    for epoch in range(1, 81):
        service.tell(builders.epoch_end(A, epoch))
    await service.loop.caught_up()

    detail = await client.job(A)

    assert [info.epoch for info in detail.epochs] == list(range(1, 81))
    history = service.loop.records.of(A)
    assert detail.history == tuple(history.changes)
    assert detail.versions == tuple(history.versions)
    assert len(detail.workers) == 1
    assert (detail.next, len(client.replies) > 2) == ("", True)
    explained = await client.explain(A)
    assert explained.decisions == tuple(history.decisions)


async def test_all_nodes_are_listed_with_their_jobs(
    service: LiveService, client: Connected
) -> None:
    names = [f"m{number}" for number in range(40)]
    for name in names:
        service.take(builders.greeting(NodeId(name), slots=2))
    await service.loop.caught_up()

    nodes = await client.nodes()

    assert [(node.node, node.free, node.jobs) for node in nodes] == [
        ("n1", 0, (A,)), *((name, 2, ()) for name in names)
    ]  # fmt: skip
    assert len(client.replies) > 1


async def test_pages_of_events_are_bounded_and_continue(
    service: LiveService, client: Connected
) -> None:
    for number in range(60):
        service.take(builders.submission(f"b{number}"))
    await service.loop.caught_up()

    seen = [event.seq async for event in client.events()]

    assert seen == list(range(1, service.feed.last_seq + 1))
    assert all(len(encode(reply)) < ROOM + 200 for reply in client.replies)
    assert len(client.replies) > 2


async def test_replies_to_a_wait_contain_no_history(
    service: LiveService, client: Connected
) -> None:
    waits = asyncio.create_task(client.wait_state(A))
    await asyncio.sleep(0)
    service.tell(builders.epoch_end(A, 1))
    service.finish()
    ended = await waits

    assert (ended.state, ended.exit_code) == ("succeeded", 0)
    assert all(len(encode(reply)) < 300 for reply in client.replies)


async def test_a_wait_without_duration_is_answered_at_once(service: LiveService) -> None:
    assert (await service.ask(WaitJob(job=A, wait_s=-1.0))).state == "running"
    page = await service.ask(ReadEvents(from_seq=10_000, wait_s=-1.0))
    assert (page.events, page.next_seq) == ((), 10_000)


@pytest.mark.parametrize("kind", [WaitJob, GetJob, ReadEvents])
async def test_a_wait_of_nan_is_refused_with_its_field(service: LiveService, kind: type) -> None:
    what = {"from_seq": 10_000} if kind is ReadEvents else {"job": A}

    with pytest.raises(BadFieldError, match=r"wait_s: nan is not a duration") as refused:
        await service.ask(kind(wait_s=math.nan, **what))
    assert (refused.value.field, refused.value.hint) == ("wait_s", "give seconds, 0 or more")


@pytest.mark.parametrize("request_", [
    ListJobs(cursor="nodes.1"),
    ListJobs(cursor="jobs.2"),
    ListJobs(cursor="jobs.-1"),
    ListJobs(cursor="jobs.99999999999999999"),
    ListNodes(cursor="nodes.2"),
    ListNodes(cursor="x" * 1_000_000),
    GetJob(job=A, cursor="epochs.1"),
    GetJob(job=A, cursor="epochs.1.1"),
    GetJob(job=A, cursor="epochs.\uff11"),
    ExplainJob(job=A, cursor="decisions.99999999999999"),
], ids=lambda request: f"{type(request).__name__}-{request.cursor[:20]}")  # fmt: skip
async def test_a_cursor_of_another_list_is_refused(service: LiveService, request_: Message) -> None:
    with pytest.raises(BadFieldError, match=r"^cursor: '.{0,40}' (is|does)") as refused:
        await service.ask(request_)
    assert (refused.value.field, refused.value.hint[:11]) == ("cursor", "restart wit")


def test_an_oversized_row_has_a_page_of_its_own() -> None:
    rows = views.numbered(["a", "b" * (ROOM + 1), "c"])

    first, cursor = page_of({"some": rows}, "")
    second, cursor_2 = page_of({"some": rows}, cursor)
    third, end = page_of({"some": rows}, cursor_2)

    assert [*first["some"], *second["some"], *third["some"]] == ["a", "b" * (ROOM + 1), "c"]
    assert (cursor, cursor_2, end) == ("some.1", "some.2", "")


async def test_an_oversized_reply_is_refused_before_it_is_sent(service: LiveService) -> None:
    detail = await service.ask(GetJob(job=A))
    large = msgspec.structs.replace(detail, notes=("x" * (5 << 20),))
    with pytest.raises(TooLargeError, match=r"JobDetail of .* bytes exceeds"):
        _encode_reply(large)
