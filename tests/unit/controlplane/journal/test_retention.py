"""What is kept of a journal: what a restart needs, and as much of the past as was asked for."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from controlplane.core.history import EPOCHS as EPOCHS_LIST
from controlplane.core.history import PROMISES, EndPromised
from controlplane.core.reactor import Reactor
from controlplane.journal import retention
from controlplane.journal.database import RECORD_TABLES, open_for_writing
from controlplane.journal.ended import USAGE_ROW_BYTES, EndedRow, UsageRow
from controlplane.journal.reader import Reader
from controlplane.journal.records import JobRecords, RecordRow, append_rows, drop_oldest, rows_of
from controlplane.journal.replay import recover
from controlplane.journal.retention import Retention, forget, forget_records, used_bytes
from schemas.ids import JobId, Seconds
from schemas.wire.client import PromiseInfo
from tests.bench.long_journal import AT, Size, history, write
from tests.support.recorded_history import snapshot_at

EPOCHS: Final = 200
NOW: Final = Seconds(AT + 1000.0)
FOREVER: Final = 1e12
MUCH: Final = 1 << 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PIECE", 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "journal.sqlite"
    write(found, history(Size(nodes=1, jobs=4, training=4), EPOCHS), Reactor())
    return found


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(open_for_writing(path)) as opened:
        yield opened


def keeps(
    inputs_s: float = FOREVER,
    events_s: float = FOREVER,
    used_bytes: int = MUCH,
    records: int = MUCH,
) -> Retention:
    return Retention(inputs_s=inputs_s, events_s=events_s, used_bytes=used_bytes, records=records)


def first_input(path: Path) -> int:
    with contextlib.closing(Reader(path)) as reader:
        return reader.first_and_last()[0]


def first_event(path: Path) -> int:
    with contextlib.closing(Reader(path)) as reader:
        return reader.first_event()


def forget_all(database: sqlite3.Connection, keep: Retention) -> list[int]:
    pieces = []
    while piece := forget(database, keep, NOW):
        pieces.append(piece)
    return pieces


def test_inputs_that_no_second_snapshot_covers_are_never_deleted(
    path: Path, database: sqlite3.Connection
) -> None:
    before = recovered(path)
    assert forget_all(database, keeps(inputs_s=0.0, used_bytes=0)) == [10] * (
        first_event(path) // 10
    )
    assert first_input(path) == 1

    snapshot_at(path, 150)
    assert forget_all(database, keeps(inputs_s=0.0)) == []

    snapshot_at(path, 200)
    forget_all(database, keeps(inputs_s=0.0))
    assert first_input(path) == 151
    assert recovered(path) == before


def recovered(path: Path) -> object:
    with contextlib.closing(Reader(path)) as reader:
        return recover(reader).reactor.state


def test_inputs_go_piece_by_piece_when_they_are_too_old(
    path: Path, database: sqlite3.Connection
) -> None:
    snapshot_at(path, 150)
    snapshot_at(path, 200)
    with contextlib.closing(Reader(path)) as reader:
        at = [when for when, _ in reader.inputs()]

    pieces = forget_all(database, keeps(inputs_s=NOW - at[47]))

    assert pieces == [10, 10, 10, 10, 7]
    assert first_input(path) == 48


def test_a_file_above_its_limit_keeps_only_inputs_for_a_restart(
    path: Path, database: sqlite3.Connection
) -> None:
    snapshot_at(path, 150)
    snapshot_at(path, 200)

    forget_all(database, keeps(used_bytes=used_bytes(database) - 1))
    assert 1 < first_input(path) < 151, "no more than has to go"

    forget_all(database, keeps(used_bytes=0))
    assert first_input(path) == 151


def test_events_go_piece_by_piece_when_they_are_too_old(
    path: Path, database: sqlite3.Connection
) -> None:
    with contextlib.closing(Reader(path)) as reader:
        events = reader.feed(1, 10**6)

    pieces = forget_all(database, keeps(events_s=NOW - events[47].time))

    assert pieces == [10] * 4
    assert first_event(path) == 41
    with contextlib.closing(Reader(path)) as reader:
        assert reader.feed(1, 10**6) == events[40:]


def test_free_pages_are_returned_to_the_file_system(
    path: Path, database: sqlite3.Connection
) -> None:
    snapshot_at(path, 150)
    snapshot_at(path, 200)
    (pages,) = database.execute("PRAGMA page_count").fetchone()

    forget_all(database, keeps(inputs_s=0.0, events_s=0.0))

    (left,) = database.execute("PRAGMA page_count").fetchone()
    (free,) = database.execute("PRAGMA freelist_count").fetchone()
    assert left < pages
    assert free <= left / 4


def test_old_jobs_are_deleted_by_age_and_by_file_size(
    database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ENDED_JOBS_PER_PIECE", 2)
    for number in range(1, 7):
        job, ended = JobId(f"a-{number}"), Seconds(NOW - 100.0 * number)
        left = EndedRow(number, job, "ann", "a", "failed", None, ended, b"")
        append_rows(database, [(number, RecordRow(job, EPOCHS_LIST, 0, b"")), (number, left)])
    database.execute("INSERT INTO job_records SELECT job, list, at, body, crc FROM recent_records")
    old = Retention(inputs_s=FOREVER, events_s=FOREVER, used_bytes=MUCH, jobs_s=350.0)

    assert forget_all(database, old) == [2, 1]
    assert jobs_in(database) == ["a-1", "a-2", "a-3"]
    forget_all(database, keeps())
    assert jobs_in(database) == ["a-1", "a-2", "a-3"]

    forget_all(database, keeps(used_bytes=0))
    assert jobs_in(database) == []


def test_the_user_whose_jobs_have_the_most_bytes_loses_history_first(
    database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SHARED_JOBS_PER_PIECE", 1)
    while forget(database, keeps(used_bytes=0), NOW):
        pass
    for number in range(1, 11):  # ann's jobs are the oldest and small, bob's have large records
        ann = EndedRow(number, JobId(f"a-{number}"), "ann", "a", "failed", None, AT, b"a" * 4096)
        name = JobId(f"b-{number}")
        bob = EndedRow(100 + number, name, "bob", "b", "failed", None, NOW, b"")
        record = RecordRow(name, EPOCHS_LIST, 0, b"b" * 65_536)
        append_rows(database, [(number, ann), (number, bob), (number, record)])
    full = used_bytes(database)

    while forget(database, keeps(used_bytes=full - 5 * 65_536), NOW):
        pass

    left = [job for (job,) in database.execute("SELECT job FROM ended_jobs ORDER BY number")]
    assert left == [f"a-{number}" for number in range(1, 11)] + [
        f"b-{number}" for number in range(6, 11)
    ]
    while forget(database, keeps(used_bytes=0), NOW):
        pass
    assert database.execute("SELECT count(*) FROM ended_jobs").fetchone() == (0,)


def test_the_usage_of_the_user_with_the_most_of_it_goes_before_the_history_of_others(
    database: sqlite3.Connection,
) -> None:
    while forget(database, keeps(used_bytes=0), NOW):
        pass
    ann = EndedRow(1, JobId("a-1"), "ann", "a", "failed", None, AT, b"a" * 4096)
    spans = [
        UsageRow(2, JobId("b-2"), "bob", "bob", 1, Seconds(AT + at), Seconds(AT + at + 1))
        for at in range(1000)
    ]
    empty = used_bytes(database)
    append_rows(database, [(1, ann), *((1, span) for span in spans)])
    full = used_bytes(database)

    while forget(database, keeps(used_bytes=(empty + full) // 2), NOW):
        pass

    assert (full - empty) / len(spans) == pytest.approx(USAGE_ROW_BYTES, rel=0.5)
    assert database.execute("SELECT count(*) FROM ended_jobs").fetchone() == (1,)
    kept = [at for (at,) in database.execute("SELECT begin - ? FROM usage", (AT,))]
    assert 0 < len(kept) < 1000
    assert kept == list(range(1000 - len(kept), 1000))


def test_a_running_job_keeps_its_latest_records_and_first_promise(
    database: sqlite3.Connection,
) -> None:
    job, other = JobId("a-1"), JobId("b-2")
    promises = [
        EndPromised(job=job, promise=PromiseInfo(time=Seconds(at), end=Seconds(at + 1.0)))
        for at in range(1, 8)
    ]
    for number, record in enumerate(promises, 1000):
        rows = rows_of([record, EndPromised(job=other, promise=record.promise)])
        append_rows(database, [(number, row) for row in rows])
    records = JobRecords(database)
    ends = [promise.promise for promise in promises]
    assert [one for _, one in records.promises(job, 0)] == ends

    assert drop_oldest(database, job, keep=3, most=2) == 2
    assert [one for _, one in records.promises(job, 0)] == [ends[0], *ends[3:]]
    jobs = deque([job])
    while jobs:
        forget_records(database, jobs, keeps(records=3))

    assert [one for _, one in records.promises(job, 0)] == [ends[0], *ends[4:]]
    assert [one for _, one in records.promises(other, 0)] == ends
    assert (records.dropped(job), records.dropped(other)) == ({PROMISES: 3}, {})


def jobs_in(database: sqlite3.Connection) -> list[str]:
    """Those that left; of them alone there is a past."""
    found = [job for (job,) in database.execute("SELECT job FROM ended_jobs ORDER BY number")]
    for table in RECORD_TABLES:
        select = f"SELECT job FROM {table} WHERE list = 'epochs' AND body = x'' ORDER BY job"  # noqa: S608
        assert [job for (job,) in database.execute(select)] == found
    return found
