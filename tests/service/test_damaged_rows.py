"""A damaged row of the past of jobs is told by its name, and everything else is told as before."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from controlplane.journal.backup import problems
from controlplane.journal.database import JournalError
from controlplane.journal.reader import Reader
from schemas.wire.client import ExplainJob, GetJob, ListJobs
from tests.support import builders
from tests.support.builders import A, B
from tests.support.service import LiveService

PAST: Final = ("job_records", "recent_records")
NEWEST: Final = "SELECT body FROM recent_records WHERE list = 'epochs' ORDER BY at DESC"
OTHER: Final = "wrong checksum"
EPOCH: Final = "at = (SELECT min(at) FROM {} WHERE list = 'epochs')"
SETTLED: Final = (
    "INSERT INTO job_records SELECT job, list, at, body, crc FROM recent_records",
    "DELETE FROM recent_records",
)


def change(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def change_first_epoch(path: Path, how: str, table: str = "recent_records") -> None:
    change(path, f"UPDATE {table} SET {how} WHERE {EPOCH.format(table)}")  # noqa: S608


def damage(path: Path) -> list[str]:
    with contextlib.closing(Reader(path)) as reader:
        return list(problems(reader))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LiveService]:
    """Job a has ended and left after three epochs, job b waits; the controller began anew."""
    made = LiveService(tmp_path)
    made.loop.begin("0")
    made.train()
    for epoch in range(1, 4):
        made.tell(builders.epoch_end(A, epoch))
    made.finish()
    made.take(builders.submission("b"))
    await made.loop.caught_up()
    yield made
    made.loop.close()


@pytest.mark.parametrize(("table", "how"), [
    *((table, "body = x'81'") for table in PAST),
    *((table, "body = 'text'") for table in PAST),
    *((table, "at = at + 1") for table in PAST),
    *((table, "job = 'b-2'") for table in PAST),
    *((table, "list = 'promises'") for table in PAST),
    *((table, "crc = crc + 1") for table in PAST),
    ("ended_jobs", "body = x'81'"),
    ("ended_jobs", "number = 9"),
    ("ended_jobs", "job = 'a-9'"),
    ("ended_jobs", "user = 'bob'"),
    ("ended_jobs", "name = 'b'"),
    ("ended_jobs", "state = 'failed'"),
    ("ended_jobs", "key = NULL"),
    ("ended_jobs", "ended = ended + 1"),
])  # fmt: skip
@pytest.mark.usefixtures("service")
def test_every_change_of_a_row_is_detected(table: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert damage(path) == []
    if table == "ended_jobs":
        change(path, f"UPDATE ended_jobs SET {how}")  # noqa: S608
    else:
        change(path, *(SETTLED if table == "job_records" else ()))
        change_first_epoch(path, how, table)

    (found,) = damage(path)
    assert found.endswith(OTHER)


async def test_a_damaged_epoch_is_omitted_with_a_note(service: LiveService, tmp_path: Path) -> None:
    whole = await service.ask(GetJob(job=A))
    explained = await service.ask(ExplainJob(job=A))
    change_first_epoch(tmp_path / "journal.sqlite", f"body = ({NEWEST})")

    with capture_logs() as logs:
        detail = await service.ask(GetJob(job=A))
        assert await service.ask(GetJob(job=A)) == detail

    assert (detail.history, detail.versions) == (whole.history, whole.versions)
    assert detail.epochs == whole.epochs[1:]
    (said,) = [line["row"] for line in logs]
    assert said.startswith("epochs of a-1, record of input ")
    note = f"omitted because damaged in the journal: {said} (`ones admin check`)"
    assert (detail.notes, explained.notes) == ((note,), ())
    assert await service.ask(ExplainJob(job=A)) == replace(explained, notes=(note,))


async def test_a_damaged_ended_job_is_listed_and_its_details_are_refused(
    service: LiveService, tmp_path: Path
) -> None:
    change(tmp_path / "journal.sqlite", "UPDATE ended_jobs SET body = x'81'")

    jobs = (await service.ask(ListJobs(ended=True))).jobs
    assert [(one.job, one.state) for one in jobs] == [(A, "succeeded"), (B, "queued")]
    assert jobs[0].reason == "its row in the journal is damaged: run `ones admin check`"
    with pytest.raises(JournalError, match=f"ended job a-1: {OTHER}"):
        await service.ask(GetJob(job=A))
    assert (await service.ask(GetJob(job=B))).summary.state == "queued"
    assert service.loop.reader.ended.latest(10) == []
