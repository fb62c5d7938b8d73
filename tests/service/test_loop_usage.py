"""What holds the loop is counted, what waits is not, and nothing else changes."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from controlplane.service.api.server import LoopUsage
from schemas.wire.client import CheckJob, ListJobs
from tests.support.builders import job_spec
from tests.support.service import ANN, LiveService


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_only_the_time_of_the_coroutine_itself_is_counted() -> None:
    clock, waits = Clock(), asyncio.Event()
    usage = LoopUsage(clock)

    async def work() -> str:
        clock.now += 1.0
        await waits.wait()
        clock.now += 2.0
        return "done"

    async def others() -> None:
        clock.now += 100.0
        waits.set()

    done, _ = await asyncio.gather(usage.measure(work()), others())

    assert (done, usage.busy_s) == ("done", 3.0)


async def test_an_error_is_raised_and_its_time_is_counted() -> None:
    clock = Clock()
    usage = LoopUsage(clock)

    async def work() -> None:
        await asyncio.sleep(0)
        clock.now += 1.0
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await usage.measure(work())

    assert usage.busy_s == 1.0


async def test_a_cancelled_coroutine_may_still_return() -> None:
    begun = asyncio.Event()

    async def work() -> str:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "cancelled"
        return ""

    async def asks() -> str:
        return await LoopUsage().measure(work())

    asking = asyncio.create_task(asks())
    await begun.wait()
    asking.cancel()

    assert await asking == "cancelled"


async def test_reads_are_measured_and_checks_are_not(tmp_path: Path) -> None:
    service, ticks = LiveService(tmp_path), count()
    reads, checks = LoopUsage(lambda: next(ticks)), LoopUsage(lambda: next(ticks))

    await service.server._dispatch(ListJobs(), ANN, reads)
    await service.server._dispatch(CheckJob(spec=job_spec("a")), ANN, checks)

    assert (reads.busy_s, checks.busy_s) == (1.0, 0.0)
    service.loop.close()
