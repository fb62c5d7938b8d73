"""From a worker's file to the controller's: within bounds, and without loss."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.service.relay import log_relay
from controlplane.service.relay.log_relay import MAX_CREDIT_BYTES, LogRelay
from controlplane.service.relay.log_store import LogStore
from nodeagent import logs
from nodeagent.folders import WorkerFolder
from nodeagent.logs import CHUNK, HOLD_S, LogShipper, OutputFile
from schemas.codec import FROM_SHIPPER, TO_SHIPPER
from schemas.ids import JobId, Rank, Version, WorkerId
from schemas.jobs import JobSpec
from schemas.nodes import Group
from schemas.transport.keys import Identity
from schemas.transport.sockets import Incoming
from schemas.wire.feed import LOG, LogChunk, LogStored
from schemas.wire.worker import Assignment
from tests.support.builders import N1, S0, A, B
from tests.support.service import until

MUCH = 1 << 30
SPEC = JobSpec(name="a", script="train.py", batch_size=1)


class Wire:
    """Both ends of a road without a network; what is said arrives in the next turn of the loop."""

    def __init__(self) -> None:
        self.relay: Any = None
        self.shipper: Any = None
        self.shipped: list[LogChunk] = []
        self.drop: Callable[[LogChunk], bool] = lambda _: False

    def send(self, *frames: bytes) -> bool:
        loop = asyncio.get_running_loop()
        if len(frames) == 2:
            message = cast("LogStored", TO_SHIPPER.decode(frames[1]))
            loop.call_soon(self.shipper.receive, message)
            return True
        said = FROM_SHIPPER.decode(frames[0])
        if isinstance(said, LogChunk):
            self.shipped.append(said)
            if self.drop(said):
                return True
        loop.call_soon(self.relay._shipped, Incoming((b"n", frames[0]), Identity("node", N1)))
        return True

    def bytes_of(self, job: JobId) -> int:
        return sum(len(chunk.data) for chunk in self.shipped if chunk.job == job)


def printing(job: JobId) -> SimpleNamespace:
    """A job with one worker, on the shipper's node."""
    workers = {WorkerId(f"{job}.v1.r0"): SimpleNamespace(slot=S0)}
    return SimpleNamespace(job=job, journal="", workers=workers, nodes={})


class Site:
    """A shipper and a relay, and workers that print."""

    def __init__(self, folder: Path, store: LogStore, bytes_per_s: float) -> None:
        self.wire, self.store, self._folder = Wire(), store, folder
        self.done: list[WorkerId] = []
        none = cast("Any", None)
        self.relay = self.wire.relay = LogRelay(
            shippers=cast("Any", self.wire), followers=none, store=store, snapshots=none,
            files=none, streams=none, state=cast("Any", lambda: None), job=none, records=none, catch_up=lambda: None, now=none, audit=none,
            bytes_per_s=bytes_per_s,
        )  # fmt: skip
        self.relay.job = cast("Any", printing)
        self.shipper = self.wire.shipper = LogShipper(N1, self.done.append)
        self.shipper.use(cast("Any", self.wire))

    def worker(self, job: JobId, text: bytes) -> WorkerFolder:
        """One that printed this."""
        worker = WorkerId(f"{job}.v1.r0")
        folder = WorkerFolder(self._folder / worker)
        group = Group(version=Version(1), members=(), lr=None)
        assignment = Assignment(
            job=job, version=Version(1), rank=Rank(0), slot=0, group=group,
            spec=SPEC, workdir="/", checkpoints="/", socket="", env={},
        )  # fmt: skip
        folder.write_assignment(assignment)
        folder.stream(LOG).write_bytes(text)
        self.shipper.watch(worker, assignment, folder)
        return folder

    def stored(self, job: JobId) -> bytes:
        return b"".join(piece.data for piece in self.store.read(job, LOG, None, 0, MUCH)[0])


@asynccontextmanager
async def shipping(
    folder: Path, *, most: int = MUCH, bytes_per_s: float = float(MUCH)
) -> AsyncIterator[Site]:
    site = Site(folder, LogStore(folder / "logs", most), bytes_per_s)
    task = asyncio.create_task(site.shipper.ship())
    yield site
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    site.shipper.close()


def lines(size: int) -> bytes:
    return b"".join(b"%015d\n" % number for number in range(size // 16))


async def test_a_job_beyond_its_rate_loses_nothing_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_relay, "BURST_S", 0.1)
    text = lines(4 << 20)
    async with shipping(tmp_path, bytes_per_s=float(4 << 20)) as site:
        site.worker(A, text)
        await until(lambda: site.wire.bytes_of(A) > MAX_CREDIT_BYTES // 2)
        at = site.wire.bytes_of(A)
        site.worker(B, b"said\n")
        await until(lambda: site.stored(B) == b"said\n")
        assert site.wire.bytes_of(A) <= at + MAX_CREDIT_BYTES
        await until(lambda: len(site.stored(A)) == len(text))

    assert site.stored(A) == text


async def test_a_chunk_that_is_lost_while_its_job_waits_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_relay, "BURST_S", 0.1)
    monkeypatch.setattr(logs, "RETRY_S", 0.05)
    lost: list[int] = []

    def drop(chunk: LogChunk) -> bool:
        if len(site.wire.shipped) % 5 or chunk.offset in lost:
            return False
        lost.append(chunk.offset)
        return True

    text = lines(3 << 20)
    async with shipping(tmp_path, bytes_per_s=float(8 << 20)) as site:
        site.wire.drop = drop
        site.worker(A, text)
        await until(lambda: len(site.stored(A)) == len(text))

    assert lost
    assert site.stored(A) == text


async def test_only_the_end_of_output_beyond_its_bound_is_shipped(tmp_path: Path) -> None:
    async with shipping(tmp_path, most=100_000) as site:
        site.worker(A, lines(16 << 20))
        await until(lambda: site.store.full(A, LOG))
        site.shipper.worker_ended(WorkerId(f"{A}.v1.r0"))
        await until(lambda: bool(site.done))

    assert site.wire.bytes_of(A) <= MAX_CREDIT_BYTES + CHUNK
    assert site.store.stored(A, LOG, (1, 0))[1]
    assert site.stored(A).endswith(b"[ones: output beyond 100000 bytes of a job is not kept]\n")


async def test_output_goes_on_when_the_bound_of_a_job_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "FULL_S", 0.05)
    text = lines(4 << 20)
    async with shipping(tmp_path, most=100_000) as site:
        site.worker(A, text)
        await until(lambda: site.store.full(A, LOG) and site.shipper._by_key[A, 1, 0, LOG].full)
        site.store.max_bytes = MUCH
        await until(lambda: site.store.stored(A, LOG, (1, 0))[0] == len(text))

    assert site.stored(A).endswith(text[-1000:])


async def test_a_file_without_end_is_bounded_before_any_controller_answers(tmp_path: Path) -> None:
    async with shipping(tmp_path) as site:
        site.shipper._socket = None
        site.shipper.max_bytes = 1000
        folder = site.worker(A, lines(32 << 20))
        await until(lambda: folder.stream(LOG).stat().st_size < 2000)
        site.shipper.use(cast("Any", site.wire))
        site.shipper.worker_ended(WorkerId(f"{A}.v1.r0"))
        await until(lambda: bool(site.done))

    note = b"\n[ones: output beyond 1000 bytes of a worker is not kept]\n"
    assert site.stored(A) == lines(1008)[:1000] + note


async def test_a_log_that_is_truncated_all_the_time_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "GAP_S", 1e9)
    mark, marks = OutputFile._mark_gap, list[int]()

    def mark_and_cut(self: OutputFile, sent: int, what: str) -> None:
        mark(self, sent, what)
        marks.append(sent)
        os.truncate(hostile, 0)

    monkeypatch.setattr(OutputFile, "_mark_gap", mark_and_cut)
    async with shipping(tmp_path) as site:
        hostile = site.worker(A, b"one\n").stream(LOG)
        await until(lambda: site.stored(A) == b"one\n")
        os.truncate(hostile, 0)
        await until(lambda: marks)
        site.worker(B, b"said\n")
        await until(lambda: site.stored(B) == b"said\n")

    assert marks == [4]


async def test_a_growing_half_line_is_shipped_after_a_while(tmp_path: Path) -> None:
    site = Site(tmp_path, LogStore(tmp_path / "logs", MUCH), float(MUCH))
    log_file = site.worker(A, b"begin\n").stream(LOG)
    stream = site.shipper._by_key[A, 1, 0, LOG]
    stream.sent, stream.credit = 0, MUCH
    shipped = []
    for number in range(8):
        before = len(site.wire.shipped)
        site.shipper._push(stream, 100.0 + number * HOLD_S / 4)
        shipped += [(number, chunk.data) for chunk in site.wire.shipped[before:]]
        with log_file.open("ab") as file:
            file.write(b"\r%d%%" % number)
    site.shipper.close()

    assert shipped == [(0, b"begin\n"), (5, b"\r0%\r1%\r2%\r3%\r4%")]
