"""A follower hears of the output that it asked for, and of no other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from controlplane.service.api.fair_queue import POLLS, UNDER_WAY
from controlplane.service.log_relay import LogRelay
from controlplane.service.log_store import LogStore
from schemas.codec import encode
from schemas.errors import MalformedMessageError
from schemas.ids import Rank, Seconds
from schemas.transport import Identity, Incoming
from schemas.wire.client import Failed
from schemas.wire.feed import LOG, LogPage, ReadLog
from tests.support import builders
from tests.support.builders import N1, N2, S0, T0, A
from tests.support.controller import Controller, cluster_of

NONE = cast("Any", None)


def ended_on_two_nodes() -> Controller:
    """Job a, whose workers of ranks 0 and 1 ran on a node each, until it was cancelled."""
    controller = cluster_of(n1=1, n2=1)
    controller.submit("a", slots=(1, 2))
    controller.place({A: {S0: 32, T0: 32}})
    for rank, node in enumerate((N1, N2)):
        controller.tell(node, builders.started(A, rank=rank))
    controller.take(builders.cancelled(A))
    for rank, node in enumerate((N1, N2)):
        controller.tell(node, builders.exited(A, rank=rank))
    assert controller.job(A).ended
    return controller


def relay(controller: Controller, store: LogStore, bytes_per_s: float = float(1 << 30)) -> LogRelay:
    return LogRelay(
        shippers=NONE, followers=NONE, store=store, snapshots=NONE, files=NONE,
        state=lambda: controller.state, job=controller.job,
        records=cast(
            "Any", SimpleNamespace(processes=lambda job: controller.history_of(job).processes),
        ),
        now=lambda: Seconds(controller.now), audit=NONE, bytes_per_s=bytes_per_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "missing"),
    [
        (None, ("a-1.v1.r0 on n1", "a-1.v1.r1 on n2, which is lost")),
        (0, ("a-1.v1.r0 on n1",)),
        (1, ("a-1.v1.r1 on n2, which is lost",)),
        (2, ()),
    ],
)
def test_a_page_of_a_rank_names_only_missing_output_of_that_rank(
    rank: int | None, missing: tuple[str, ...], tmp_path: Path
) -> None:
    controller = ended_on_two_nodes()
    controller.lose(N2)
    asked = ReadLog(job=A, stream=LOG, rank=None if rank is None else Rank(rank))

    page = relay(controller, LogStore(tmp_path, 1 << 30))._page(asked)

    assert page == LogPage(job=A, pieces=(), cursor=0, ended=False, missing=missing)


def ended_unheard() -> Controller:
    """Job a, whose workers were ordered on a node each; one node says what it has, the other not."""
    controller = cluster_of()
    for node in (N1, N2):
        controller.take(builders.greeting(node, run_id=f"{node}-run-1"))
    controller.submit("a", slots=(1, 2))
    controller.place({A: {S0: 32, T0: 32}})
    controller.take(builders.cancelled(A))
    return controller


def nothing_stored() -> Any:
    return SimpleNamespace(stored=lambda *_: (0, False), read=lambda *_, **__: ([], 0))


def test_workers_without_reports_are_waited_for() -> None:
    made = relay(ended_unheard(), NONE)
    made.store = nothing_stored()

    assert made._page(ReadLog(job=A)) == LogPage(job=A, pieces=(), cursor=0, ended=False)


def test_a_worker_whose_node_lost_its_folders_is_named_as_missing() -> None:
    controller = ended_unheard()
    controller.lose(N2)
    controller.take(builders.greeting(N1, boot="boot-2", run_id="n1-run-2"))
    made = relay(controller, NONE)
    made.store = nothing_stored()

    named = ("a-1.v1.r0 on n1, if it ran there", "a-1.v1.r1 on n2, which is lost")
    assert made._page(ReadLog(job=A)) == LogPage(
        job=A, pieces=(), cursor=0, ended=True, missing=named
    )


def test_a_piece_contains_its_time_and_node(tmp_path: Path) -> None:
    controller, store = ended_on_two_nodes(), LogStore(tmp_path, 1 << 30, lambda: 7.5)
    store.append(A, LOG, (1, 1), 0, b"said\n")
    store.append(A, LOG, (9, 0), 0, b"said by nobody who is known\n")

    page = relay(controller, store)._page(ReadLog(job=A))

    assert [(piece.rank, piece.time, piece.node) for piece in page.pieces] == [
        (1, 7.5, N2), (0, 7.5, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wait_s", "refusal"),
    [
        (0.01, Failed(
            code="denied", message="this key is no longer authorised",
            hint="ask an admin for a new key",
        )),
        (math.nan, Failed(
            code="bad_field", message="wait_s: nan is not a duration",
            hint="give seconds, 0 or more", field="wait_s",
        )),
    ],
    ids=["its key is revoked", "not a number"],
)  # fmt: skip
async def test_a_waiting_follower_is_refused_with_the_reason(
    wait_s: float, refusal: Failed, tmp_path: Path
) -> None:
    sent: list[bytes] = []
    made = relay(ended_on_two_nodes(), LogStore(tmp_path, 1 << 30))
    made.followers = SimpleNamespace(send=lambda *frames: sent.append(frames[-1]))  # type: ignore[assignment]
    made.audit = SimpleNamespace(refused=lambda *_, **__: None)  # type: ignore[assignment]
    keys = {b"k": Identity("user", "ann")}
    asked = Incoming((b"f", b""), keys[b"k"], b"k", keys)
    waiting = asyncio.create_task(made._answer(asked, ReadLog(job=A, wait_s=wait_s)))
    await asyncio.sleep(0)

    keys.clear()
    await waiting

    assert sent == [encode(refusal)]


@pytest.mark.parametrize(
    "wrong",
    [{"version": -1}, {"rank": -1}, {"offset": -1}, {"offset": 2**60}, {"version": 2**60}],
    ids=repr,
)
async def test_implausible_output_is_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    controller, store = ended_on_two_nodes(), LogStore(tmp_path, 1 << 30)
    made = relay(controller, store)
    made.shippers = SimpleNamespace(send=lambda *_: True)  # type: ignore[assignment]
    right = {"version": 1, "rank": 0, "offset": 0}

    def shipped(**fields: int) -> Incoming:
        chunk = {"type": "logs.chunk.1", "job": A, "stream": LOG, "data": b"said\n", **fields}
        return Incoming((b"n", msgspec.msgpack.encode(chunk)), Identity("node", N1))

    with pytest.raises(MalformedMessageError):
        made._shipped(shipped(**{**right, **wrong}))
    made._shipped(shipped(**right))

    (piece,), _ = LogStore(tmp_path, 1 << 30).read(A, LOG, None, 0, 1 << 20)
    assert piece.data == b"said\n"


class Followers:
    """A socket over which these requests come; it notes whom an answer was sent to."""

    def __init__(self, asked: list[tuple[str, float]]) -> None:
        self._asked = asked
        self.answered: list[str] = []

    async def __aiter__(self) -> AsyncIterator[Incoming]:
        for name, wait_s in self._asked:
            request = encode(ReadLog(job=A, wait_s=wait_s))
            yield Incoming((name.encode(), request), Identity("user", name))

    def send(self, *frames: bytes) -> None:
        self.answered.append(frames[0].decode())

    def cut(self, _: Incoming) -> bool:
        return False


async def test_followers_of_a_user_do_not_block_another_user(tmp_path: Path) -> None:
    controller = cluster_of(n1=1)
    controller.submit("a")
    made = relay(controller, LogStore(tmp_path, 1 << 30))
    followers = Followers([("bob", 60.0)] * 1500 + [("ann", 0.0)])
    made.followers = cast("Any", followers)
    made.audit = SimpleNamespace(refused=lambda *_, **__: None)  # type: ignore[assignment]

    await made.serve_followers()
    async with asyncio.timeout(60.0):
        while "ann" not in followers.answered:
            await asyncio.sleep(0)

    assert len(made._tasks) <= POLLS + UNDER_WAY
    for task in made._tasks:
        task.cancel()
    await asyncio.gather(*made._tasks, return_exceptions=True)
