"""Sweeps that left the state are shown, exported and refused as those that have ended in it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from controlplane.core.reactor import Reactor
from controlplane.journal import ended
from controlplane.journal.backup import problems
from controlplane.journal.database import JournalError, input_from, open_for_reading
from controlplane.journal.ended import forget_ended
from controlplane.journal.reader import Reader
from schemas.errors import BadFieldError
from schemas.ids import JobId
from schemas.wire.client import ChangeSweep, GetLedger, GetSweep, ListJobs
from tests.support import builders
from tests.support.recorded_history import write
from tests.support.service import LiveService
from tests.support.sweep_world import SweepCluster, sweep_job

A: Final = JobId("a-1")
UNITS: Final = 12


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "UNITS_PER_ROW", 5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal in which a sweep has ended and is still in the state."""
    cluster = SweepCluster(n1=2)
    assert cluster.submit("a", **sweep_job((1, 2))) == A
    cluster.place({A: cluster.slots()})
    cluster.settle(training=True)
    assert len(cluster.controller.sweep_history(A).units) == UNITS
    history, reactor = cluster.controller.history, Reactor()
    inputs = iter(enumerate(history, start=1))
    while A not in reactor.state.leaving_jobs:
        count, (at, body) = next(inputs)
        reactor.handle(input_from(body), at)
    write(tmp_path / "journal.sqlite", history[:count])
    return tmp_path / "journal.sqlite"


async def told(service: LiveService) -> list[Any]:
    """All that is told of the sweep, in pages of every kind."""
    found = [await service.ask(GetSweep(job=A)), await service.ask(GetLedger(job=A))]
    found += (await service.ask(ListJobs(ended=True, name="a"))).jobs
    for first in range(UNITS + 2):
        found.append(await service.ask(GetLedger(job=A, from_unit=first, limit=4)))
        found.append(await service.ask(GetSweep(job=A, from_trial=first, limit=2)))
    for far in (2**40, 2**63 - 1):
        found.append(await service.ask(GetLedger(job=A, from_unit=far)))
        found.append(await service.ask(GetSweep(job=A, from_trial=far)))
    return found


async def it_leaves(service: LiveService) -> None:
    assert A in service.loop.committed.state.jobs
    service.take(builders.submission("b"))
    await service.loop.caught_up()
    assert list(service.loop.committed.state.jobs) == ["b-2"]
    assert service.loop.committed.totals.sweeps == {}


@pytest.fixture
async def service(path: Path) -> AsyncIterator[LiveService]:
    made = LiveService(path.parent)
    yield made
    made.loop.close()


async def test_replies_about_a_sweep_are_equal_before_and_after_it_left_and_after_a_restart(
    path: Path,
) -> None:
    service = LiveService(path.parent)
    before = await told(service)
    await it_leaves(service)
    assert await told(service) == before
    service.loop.close()
    again = LiveService(path.parent)
    assert await told(again) == before
    again.loop.close()

    assert len(before[0].trials) == 3
    assert before[0].trials[0].metrics
    assert len(before[1].units) == before[1].units_total == UNITS
    with contextlib.closing(Reader(path)) as reader:
        assert list(problems(reader)) == []


async def test_a_sweep_that_left_cannot_be_changed(service: LiveService) -> None:
    await it_leaves(service)
    with pytest.raises(BadFieldError, match="a-1 has succeeded"):
        await service.ask(ChangeSweep(job=A, change="stop", trial=0))


def damage(path: Path, name: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        select = "SELECT max(at) FROM job_records WHERE list = ?"
        update = f"UPDATE job_records SET body = x'90' WHERE list = ? AND at = ({select})"  # noqa: S608
        assert database.execute(update, (name, name)).rowcount == 1
        database.commit()


async def test_a_damaged_trial_is_named_and_a_damaged_ledger_is_refused(
    service: LiveService, path: Path
) -> None:
    whole = await service.ask(GetSweep(job=A))
    await it_leaves(service)
    damage(path, "trials")
    damage(path, "units")

    shown = await service.ask(GetSweep(job=A))
    assert shown.trials[:2] == whole.trials[:2]
    assert (shown.trials[2].reason, shown.trials[2].metrics) == (ended.HISTORY_DAMAGED, ())
    with pytest.raises(JournalError, match="the journal's sweep a-1: its units are damaged"):
        await service.ask(GetLedger(job=A))
    assert len((await service.ask(GetLedger(job=A, limit=5))).units) == 5

    damage(path, "counts")
    with pytest.raises(JournalError, match="the journal's sweep a-1: its counts are damaged"):
        await service.ask(GetSweep(job=A))
    assert len((await service.ask(ListJobs(ended=True))).jobs) == 2

    with contextlib.closing(Reader(path)) as reader:
        assert len(list(reader.problems())) == 3


async def test_a_forgotten_sweep_leaves_no_records(service: LiveService, path: Path) -> None:
    await it_leaves(service)
    with contextlib.closing(open_for_reading(path)) as database:
        assert forget_ended(database, before=1e12) == (A,)
        kept = "SELECT count(*) FROM job_records WHERE job = ?"
        assert database.execute(kept, (A,)).fetchone() == (0,)
