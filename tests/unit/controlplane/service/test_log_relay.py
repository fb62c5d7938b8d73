"""Pages of output for followers, and the rate at which output of a job is accepted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from controlplane.service.api.fair_queue import POLLS, UNDER_WAY
from controlplane.service.relay import log_relay
from controlplane.service.relay.log_relay import (
    BURST_S,
    MAX_CREDIT_BYTES,
    MIN_CREDIT_BYTES,
    LogRates,
    LogRelay,
    StreamKey,
)
from controlplane.service.relay.log_store import LogStore
from schemas.codec import encode
from schemas.errors import MalformedMessageError
from schemas.ids import Rank, Seconds
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire.client import Failed
from schemas.wire.feed import LOG, LogPage, ReadLog
from tests.support import builders
from tests.support.builders import N1, N2, S0, T0, A
from tests.support.controller import Controller, cluster_of
from tests.support.loop_clock import Clock

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
        shippers=NONE, followers=NONE, store=store, snapshots=NONE, files=NONE, streams=NONE,
        state=lambda: controller.state, job=controller.job,
        records=cast(
            "Any", SimpleNamespace(processes=lambda job: controller.history_of(job).processes),
        ),
        catch_up=lambda: None, now=lambda: Seconds(controller.now), audit=NONE, bytes_per_s=bytes_per_s,
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
        (1, 7.5, N2), (0, 7.500001, ""),
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


async def test_a_request_that_meets_an_unexpected_error_is_answered(tmp_path: Path) -> None:
    sent: list[bytes] = []
    made = relay(ended_on_two_nodes(), LogStore(tmp_path, 1 << 30))
    made.followers = SimpleNamespace(send=lambda *frames: sent.append(frames[-1]))  # type: ignore[assignment]
    made.audit = SimpleNamespace(refused=lambda *_, **__: None)  # type: ignore[assignment]
    keys = {b"k": Identity("user", "ann")}

    await made._answer(
        Incoming((b"f", b""), keys[b"k"], b"k", keys), ReadLog(job=A, since=math.inf)
    )

    assert sent == [encode(Failed(
        code="unavailable", message="the request failed because of an error in the controller",
        hint="see the controller's log",
    ))]  # fmt: skip


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


PER_S = float(4 << 20)
BURST = PER_S * BURST_S
NOISY, QUIET = ("a-1", "log"), ("b-2", "log")


class Shippers(LogRates[str]):
    """Workers who send all that they have credit for as soon as they have it, for ever."""

    def __init__(self) -> None:
        self.clock, self.sent, self.answered = Clock(), Counter[str](), list[str]()
        self._of: dict[str, StreamKey] = {}
        super().__init__(
            self._answered, lambda: PER_S, clock=lambda: self.clock.now, later=self.clock.later
        )

    def begin(self, of: StreamKey, *workers: str) -> None:
        for worker in workers:
            self._of[worker] = of
            self.answer(of, worker)

    def _answered(self, worker: str, credit: int) -> None:
        assert MIN_CREDIT_BYTES <= credit <= MAX_CREDIT_BYTES
        self.answered.append(worker)
        self.clock.later(0.0, lambda: self._send(worker, credit))

    def _send(self, worker: str, credit: int) -> None:
        self.sent[worker] += credit
        assert self.sent.total() < BURST + 200.0 * PER_S
        self.count_output(self._of[worker], credit)
        self.answer(self._of[worker], worker)


@pytest.mark.parametrize("workers", [1, 64])
def test_a_noisy_job_is_limited_to_its_burst_and_rate(workers: int) -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(workers)))

    shippers.clock.run(100.0)

    most = BURST + 100.0 * PER_S
    assert most - MAX_CREDIT_BYTES < shippers.sent.total() <= most + workers * MAX_CREDIT_BYTES


def test_workers_of_a_noisy_job_take_turns() -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(8)))
    shippers.clock.run(2 * BURST_S)
    shippers.answered.clear()

    shippers.clock.run(10.0)

    assert all(one != next_one for one, next_one in pairwise(shippers.answered))
    counts = Counter(shippers.answered).values()
    assert max(counts) - min(counts) <= 1


def test_a_quiet_job_gets_full_credit_at_once() -> None:
    shippers = Shippers()
    shippers.begin(NOISY, *(f"r{rank}" for rank in range(64)))
    shippers.clock.run(2 * BURST_S)
    before = len(shippers.answered)

    shippers.answer(QUIET, "quiet")

    assert shippers.answered[before:] == ["quiet"]
    assert shippers._credit(shippers._streams[QUIET]) == MAX_CREDIT_BYTES


def test_a_repeated_request_keeps_its_place_and_gets_a_single_reply() -> None:
    shippers = Shippers()
    shippers.count_output(NOISY, int(BURST) + 1)
    for worker in ("r0", "r1", "r0"):
        shippers._of[worker] = NOISY
        shippers.answer(NOISY, worker)
    assert shippers.answered == []

    while len(shippers.answered) < 2:
        shippers.clock.run(0.01)

    assert shippers.answered == ["r0", "r1"]


def test_a_silent_job_regains_its_burst() -> None:
    shippers = Shippers()
    shippers.count_output(NOISY, int(BURST) + 1)
    shippers.clock.run(2 * BURST_S)

    shippers.begin(NOISY, "r0")

    assert shippers.answered == ["r0"]


def test_only_jobs_beyond_their_rate_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_relay, "MAX_STREAMS", 10)
    shippers = Shippers()
    shippers.count_output(NOISY, 2 * int(BURST))
    for number in range(1000):
        shippers.count_output((f"c-{number}", "log"), 1)
        shippers.clock.run(0.001)

    assert len(shippers._streams) <= 11
    assert NOISY in shippers._streams
