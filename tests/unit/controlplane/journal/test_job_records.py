"""The history of jobs is in the journal's tables, each record once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from controlplane.core.history import CHANGES, EPOCHS, GROUPS, PROMISES, JobHistories
from controlplane.journal import records as job_records
from controlplane.journal.database import open_for_writing
from controlplane.journal.reader import Reader
from controlplane.journal.records import JobRecords
from controlplane.journal.replay import replay
from schemas.ids import JobId
from tests.support import builders
from tests.support.builders import A
from tests.support.recorded_history import GOLDEN
from tests.support.service import LiveService


def in_memory(path: Path) -> JobHistories:
    """The past of all jobs as it follows from all inputs."""
    histories = JobHistories()
    with contextlib.closing(Reader(path)) as reader:
        replay(reader.inputs(), histories.add)
    return histories


def rows(path: Path) -> list[tuple[str, str, int, bytes]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT * FROM job_records").fetchall()


def test_a_restart_writes_no_record_twice(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.sqlite"

    async def live() -> None:
        service = LiveService(tmp_path)
        service.train()
        for epoch in range(1, 5):
            service.tell(builders.epoch_end(A, epoch))
        service.finish()
        await service.loop.caught_up()
        service.loop.close()

    async def again() -> None:
        LiveService(tmp_path).loop.close()

    asyncio.run(live())
    before, expected = rows(path), in_memory(path)
    assert len({row[:3] for row in before}) == len(before)
    with contextlib.closing(Reader(path)) as reader:
        assert reader.records.of(A) == expected.of(A)
        assert len(expected.of(A).epochs) == 4
    asyncio.run(again())
    assert rows(path) == before


def test_a_page_starts_after_a_position_and_has_the_outcomes_of_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "PAGE", 2)
    path = tmp_path / "journal.sqlite"
    shutil.copy(GOLDEN / "jobs.sqlite", path)
    with contextlib.closing(Reader(path)) as reader:
        records, expected = reader.records, in_memory(path)
        for name, history in expected.jobs.items():
            decided = list(records.decisions(name, 0))
            assert [story.decision for _, story in decided] == history.decisions
            assert [one.version for _, one in decided if one.version] == history.versions
            for place, (at, _) in enumerate(decided):
                assert list(records.decisions(name, at)) == decided[place + 1 :]
            epochs = list(records.epochs(name, 0))
            assert [epoch for _, epoch in epochs] == history.epochs
            assert [at for at, _ in epochs][-1:] == [records.last(name, EPOCHS)][: len(epochs)]
            assert [change for _, change in records.changes(name, 0)] == history.changes
            assert [one for _, one in records.promises(name, 0)] == history.promises
            assert records.processes(name) == history.processes


def test_an_unknown_job_has_an_empty_history(tmp_path: Path) -> None:
    database = open_for_writing(tmp_path / "journal.sqlite")
    records, ghost = JobRecords(database), JobId("ghost-1")

    assert records.of(ghost) == JobHistories().of(ghost)
    assert {records.last(ghost, name) for name in (CHANGES, GROUPS, EPOCHS, PROMISES)} == {0}
    assert (list(records.decisions(ghost, 0)), records.processes(ghost)) == ([], {})
    database.close()
