"""What happened to jobs is in the journal's tables, once, whoever wrote the journal."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Final

import pytest

from controlplane.core.history import CHANGES, EPOCHS, GROUPS, PROMISES, JobHistories
from controlplane.journal import records as job_records
from controlplane.journal import take_snapshot as completing
from controlplane.journal.database import open_for_writing
from controlplane.journal.reader import Reader
from controlplane.journal.records import COMPLETE, JobRecords
from controlplane.journal.replay import replay
from controlplane.journal.take_snapshot import complete_records
from schemas.ids import JobId
from tests.support import builders
from tests.support.builders import A
from tests.support.recorded_history import GOLDEN
from tests.support.service import LiveService

OLD: Final = [GOLDEN / "schema-2-jobs.sqlite", GOLDEN / "schema-2-sweeps.sqlite"]


def in_memory(path: Path) -> JobHistories:
    """The past of all jobs as it follows from all inputs."""
    histories = JobHistories()
    with contextlib.closing(Reader(path)) as reader:
        replay(reader.inputs(), histories.add)
    return histories


def rows(path: Path) -> list[tuple[str, str, int, bytes]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT * FROM job_records").fetchall()


@pytest.fixture
def copied(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "journal.sqlite"
    shutil.copy(request.param, path)
    open_for_writing(path).close()
    return path


def complete(path: Path) -> None:
    with contextlib.closing(Reader(path)) as reader:
        complete_records(path, reader)


@pytest.mark.parametrize("copied", OLD, indirect=True, ids=lambda path: path.stem)
def test_a_journal_of_the_former_release_gets_the_past_that_its_inputs_lead_to(
    copied: Path,
) -> None:
    complete(copied)

    expected = in_memory(copied)
    with contextlib.closing(Reader(copied)) as reader:
        assert reader.records.complete
        assert {name: reader.records.of(name) for name in expected.jobs} == expected.jobs
    assert expected.jobs


@pytest.mark.parametrize("copied", OLD[:1], indirect=True, ids=lambda path: path.stem)
def test_an_old_journal_whose_completion_was_cut_off_is_completed_at_the_next_start(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copied.with_name("whole.sqlite")
    shutil.copy(copied, whole)
    complete(whole)
    monkeypatch.setattr(completing, "ROWS_PER_TRANSACTION", 20)
    write = completing._write
    monkeypatch.setattr(completing, "_write", lambda *_: (write(*_), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        complete(copied)
    monkeypatch.setattr(completing, "_write", write)
    assert 0 < len(rows(copied)) < len(rows(whole))

    complete(copied)

    assert rows(copied) == rows(whole)


def test_records_are_durable_with_their_input_and_a_restart_writes_none_again(
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
        service = LiveService(tmp_path)
        assert service.loop.records.complete
        service.loop.close()

    asyncio.run(live())
    before, expected = rows(path), in_memory(path)
    assert len({row[:3] for row in before}) == len(before)
    with contextlib.closing(Reader(path)) as reader:
        assert reader.records.of(A) == expected.of(A)
        assert len(expected.of(A).epochs) == 4
    asyncio.run(again())
    assert rows(path) == before


def test_a_page_goes_on_behind_its_position_and_says_what_became_of_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "PAGE", 2)
    path = tmp_path / "journal.sqlite"
    shutil.copy(OLD[0], path)
    open_for_writing(path).close()
    complete(path)
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


def test_of_an_unknown_job_nothing_is_known(tmp_path: Path) -> None:
    database = open_for_writing(tmp_path / "journal.sqlite")
    records, ghost = JobRecords(database), JobId("ghost-1")

    assert records.of(ghost) == JobHistories().of(ghost)
    assert {records.last(ghost, name) for name in (CHANGES, GROUPS, EPOCHS, PROMISES)} == {0}
    assert (list(records.decisions(ghost, 0)), records.processes(ghost)) == ([], {})
    assert database.execute("SELECT * FROM meta WHERE key = ?", (COMPLETE,)).fetchall() == []
    database.close()
