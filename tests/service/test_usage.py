"""Slot time by job: the sum of what was recorded, clipped to a window, and what jobs hold now."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.history import JobLeft, Record, SlotsUsed
from controlplane.journal.database import input_from, open_for_reading
from controlplane.journal.ended import forget_usage, usage_between
from controlplane.journal.replay import replay
from controlplane.service.api import reads
from schemas.ids import JobId, Seconds
from schemas.transport.keys import Identity
from schemas.wire.client import GetUsage, JobUsage
from tests.support.builders import A
from tests.support.recorded_history import of_jobs, write
from tests.support.service import LiveService

SEED = 3
ALL = (Seconds(0.0), Seconds(1e12))
EVERY: Any = {"held": {}, "after": 0, "most": 1000}  # job


def test_the_records_of_a_job_add_up_to_its_account() -> None:
    sums, accounts = Counter[JobId](), dict[JobId, float]()

    def collect(records: Sequence[Record]) -> None:
        for one in records:
            if isinstance(one, SlotsUsed):
                sums[one.job] += one.slots * (one.end - one.begin)  # type: ignore[assignment]
            elif isinstance(one, JobLeft):
                accounts[one.job] = one.last.accounting.slot_s

    history = of_jobs(SEED, 150).history
    replay(((at, input_from(body)) for at, body in history), collect)

    assert any(accounts.values())
    assert {job: sums[job] for job in accounts} == pytest.approx(accounts)


def test_usage_is_clipped_to_the_window(tmp_path: Path) -> None:
    path, (early, late) = tmp_path / "journal.sqlite", ALL
    write(path, of_jobs(SEED, 150).history)
    with contextlib.closing(open_for_reading(path)) as database:
        rows = database.execute("SELECT number, slots, begin, end FROM usage").fetchall()
        middle = sorted(end for *_, end in rows)[len(rows) // 2] - 0.25
        first = usage_between(database, early, Seconds(middle), **EVERY)
        second = usage_between(database, Seconds(middle), late, **EVERY)
        whole = usage_between(database, early, late, **EVERY)

        assert sum(one.slot_s for one in whole.values()) == pytest.approx(
            sum(slots * (end - begin) for _, slots, begin, end in rows)
        )
        for number, one in whole.items():
            parts = [each[number].slot_s for each in (first, second) if number in each]
            assert sum(parts) == pytest.approx(one.slot_s)
        assert forget_usage(database, middle, 10_000) > 0
        assert usage_between(database, Seconds(middle), late, **EVERY) == second


async def test_the_slots_that_a_job_holds_now_count(service: LiveService) -> None:
    job = service.loop.committed.state.jobs[A]
    begin = job.accounting.since

    reply = await service.ask(GetUsage(until=Seconds(service.loop.now())))

    (used,) = reply.jobs
    before = job.accounting.slot_s
    assert (used.job, used.user, used.project) == (A, "ann", "ann")
    assert used.slot_s == pytest.approx(before + reply.until - begin)
    service.finish()
    await service.loop.caught_up()
    (after,) = (await service.ask(GetUsage())).jobs
    assert after.slot_s == pytest.approx(
        service.loop.committed.state.jobs[A].accounting.slot_s, abs=1e-5
    )
    (half,) = (await service.ask(GetUsage(since=Seconds(begin)))).jobs
    assert half.slot_s == pytest.approx(after.slot_s - before)


async def test_usage_shows_only_jobs_that_the_reader_may_know_of(service: LiveService) -> None:

    seen = {
        who: [used.job for used in (await service.ask(GetUsage(), Identity(role, who))).jobs]
        for role, who in (("user", "ann"), ("user", "bob"), ("operator", "olga"))
    }

    assert seen == {"ann": [A], "bob": [], "olga": [A]}


async def test_pages_have_every_job_once(
    service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "MAX_USAGE_JOBS", 2)
    with contextlib.closing(open_for_reading(service.loop.reader.path)) as database:
        database.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, 'p', 1, 10.0, 12.0)",
            ((-at, f"old-{at}", "ann" if at % 2 else "bob") for at in range(5)),
        )
        database.execute("UPDATE usage SET number = number + 6 WHERE number < 1")
    service.loop.committed.state.jobs_accepted = 9
    found, cursor = list[JobUsage](), "jobs.0"
    while cursor:
        page = await service.ask(GetUsage(cursor=cursor), Identity("user", "bob"))
        found, cursor = [*found, *page.jobs], page.next

    assert [(used.job, used.slot_s) for used in found] == [("old-4", 2), ("old-2", 2), ("old-0", 2)]


async def test_a_job_that_ends_during_the_reply_counts_once(
    service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = asyncio.to_thread

    async def late(work: Any, *values: Any) -> Any:
        service.finish()
        await service.loop.caught_up()
        return await thread(work, *values)

    monkeypatch.setattr(reads.asyncio, "to_thread", late)
    reply = await service.ask(GetUsage())
    monkeypatch.undo()
    (after,) = (await service.ask(GetUsage(until=reply.until))).jobs

    (during,) = reply.jobs
    assert during.slot_s == pytest.approx(after.slot_s, rel=1e-3)
