"""Restarts stay short and files small, and the loop that decides waits for neither."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs

from controlplane.journal import retention
from controlplane.journal.reader import Reader
from controlplane.service import file_keeper
from controlplane.service.commit_loop import CommitLoop
from controlplane.service.file_keeper import JournalKeeper
from controlplane.service.settings import JournalSettings
from schemas.wire.client import GetJob
from tests.support import builders
from tests.support.builders import A, submission
from tests.support.service import LiveService, until

LIMIT_S: Final = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keeper, "TICK_S", 0.001)
    monkeypatch.setattr(file_keeper, "FORGET_S", 0.001)
    monkeypatch.setattr(retention, "PIECE", 5)


async def submitted(loop: CommitLoop, many: int) -> None:
    for number in range(many):
        loop.handle(submission(f"j{number}"))
    await loop.caught_up()


def snapshots(path: Path) -> list[int]:
    with contextlib.closing(Reader(path)) as reader:
        return [one.input for one in reader.snapshots()]


def first_rows(path: Path) -> tuple[int, int]:
    with contextlib.closing(Reader(path)) as reader:
        return reader.first_and_last()[0], reader.first_event()


async def test_excess_records_of_a_running_job_are_dropped_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_keeper, "RECORDS_S", 0.001)

    service = LiveService(tmp_path)
    service.train()
    for epoch in range(1, 31):
        service.tell(builders.epoch_end(A, epoch))
    await service.loop.caught_up()
    assert (await service.ask(GetJob(job=A))).notes == ()
    settings = JournalSettings(keep_records=10)
    keeper = asyncio.create_task(
        JournalKeeper(service.loop, tmp_path / "journal.sqlite", settings).run()
    )
    await until(lambda: service.loop.records.dropped(A) == {"epochs": 20})
    keeper.cancel()
    detail = await service.ask(GetJob(job=A))
    assert [epoch.epoch for epoch in detail.epochs] == list(range(21, 31))
    assert detail.notes == ("older records are not kept: 20 of epochs (keep_records)",)
    service.loop.close()


@pytest.mark.slow
async def test_a_child_takes_snapshots_and_old_rows_are_deleted(path: Path) -> None:
    loop = CommitLoop(path, lambda _: None)
    settings = JournalSettings(snapshot_inputs=20, keep_inputs_s=0.0, keep_events_s=0.0)
    keeper = asyncio.create_task(JournalKeeper(loop, path, settings).run())
    for taken in (20, 40):
        await submitted(loop, 20)
        await until(lambda taken=taken: taken in snapshots(path))  # type: ignore[misc]
        await until(lambda: loop.tail.inputs == 0)
    await until(lambda: first_rows(path) == (21, 36))
    keeper.cancel()
    loop.close()

    assert snapshots(path) == [40, 20]
    again = CommitLoop(path, lambda _: None)
    assert again.reactor.state == loop.reactor.state
    again.close()


async def test_inputs_handled_during_a_snapshot_count_towards_the_next(path: Path) -> None:
    loop = CommitLoop(path, lambda _: None)
    await submitted(loop, 40)
    whole = loop.tail

    loop.snapshot_taken(30)

    assert whole.inputs == 40
    assert tuple(loop.tail) == (10, pytest.approx(whole.seconds / 4))
    loop.close()


async def test_no_snapshot_is_taken_while_the_last_one_has_inputs_without_acknowledgement(
    path: Path,
) -> None:
    loop = CommitLoop(path, lambda _: None)
    await submitted(loop, 3)
    keeper = JournalKeeper(loop, path, JournalSettings(snapshot_inputs=1))
    due = []
    for last in (3, 4):
        keeper._snapshot_input = last
        due.append(keeper._is_snapshot_due())
    loop.close()

    assert due == [True, False]


@pytest.mark.slow
async def test_a_failed_snapshot_is_logged_and_retried_later(path: Path) -> None:
    loop = CommitLoop(path, lambda _: None)
    await submitted(loop, 3)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE inputs SET crc = 1 WHERE id = 2")
    keeper = JournalKeeper(loop, path, JournalSettings(snapshot_inputs=1))

    with capture_logs() as logs:
        await keeper.take_snapshot()

    assert loop.tail.inputs == 3
    (said,) = [line for line in logs if line["log_level"] == "error"]
    assert said["event"] == "snapshot of the state failed"
    assert "input 2: wrong checksum" in said["why"]
    assert keeper._not_before > asyncio.get_running_loop().time() + 50.0
    loop.close()


async def test_work_between_commits_runs_in_order_and_is_rolled_back_without_room(
    path: Path,
) -> None:
    loop = CommitLoop(path, lambda _: None)
    seen: list[int] = []

    def count(database: sqlite3.Connection) -> None:
        seen.append(database.execute("SELECT count(*) FROM inputs").fetchone()[0])

    def find_no_room(database: sqlite3.Connection) -> None:
        database.execute("BEGIN")
        database.execute("DELETE FROM inputs")
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    for number in range(3):
        loop.handle(submission(f"j{number}"))
        loop.between_commits(count)
    loop.between_commits(find_no_room)
    loop.between_commits(count)
    await submitted(loop, 1)

    assert seen == [1, 2, 3, 3]
    loop.close()
