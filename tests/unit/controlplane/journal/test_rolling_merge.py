"""The past of jobs moves into the order of jobs with every commit, and is always read whole, once."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.history import EPOCHS, PROMISES, EndPromised
from controlplane.journal import records as rolling_merge
from controlplane.journal.database import open_for_writing
from controlplane.journal.ended import forget_ended
from controlplane.journal.records import (
    IDLE,
    JobRecords,
    Pass,
    append_rows,
    drop_oldest,
    merge,
    rows_of,
)
from schemas.ids import JobId, Seconds
from schemas.wire.client import PromiseInfo

LEAST: Final = 12
JOBS: Final = tuple(JobId(f"j-{number}") for number in range(1, 5))
MANY: Final = 10 * LEAST
MOST: Final = 2 * LEAST + 2 * 8  # records of the younger level: two passes and two commits

Past = dict[JobId, list[float]]  # promises of each job, by their ends


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling_merge, "MERGE_THRESHOLD", LEAST)


@contextlib.contextmanager
def journal() -> Iterator[sqlite3.Connection]:
    with contextlib.closing(open_for_writing(Path(":memory:"))) as database:
        yield database


def add(database: sqlite3.Connection, number: int, jobs: list[JobId], done: Pass) -> Pass:
    """A commit with an input for each of `jobs`, the first of which has `number`."""
    rows = [
        (at, row) for at, job in enumerate(jobs, number) for row in rows_of([promised(job, at)])
    ]
    database.execute("BEGIN IMMEDIATE")
    merged = merge(database, done, append_rows(database, rows))
    database.execute("COMMIT")
    return merged


def promised(job: JobId, at: int) -> EndPromised:
    return EndPromised(job=job, promise=PromiseInfo(time=Seconds(0.0), end=Seconds(float(at))))


def past(database: sqlite3.Connection) -> Past:
    records = JobRecords(database)
    return {job: [float(one.end or 0.0) for _, one in records.promises(job, 0)] for job in JOBS}


def count(database: sqlite3.Connection, table: str) -> int:
    (found,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608
    return int(found)


commits = st.lists(st.sampled_from(JOBS), max_size=8)
steps = st.lists(
    st.one_of(
        commits.map(lambda jobs: ("commit", jobs)),
        st.sampled_from(JOBS).map(lambda job: ("drop", [job])),
        st.sampled_from(JOBS).map(lambda job: ("forget", [job])),
        st.just(("restart", [])),
    ),
    max_size=60,
)


@given(steps)
def test_every_history_is_complete_and_in_order_after_any_steps(
    taken: list[tuple[str, list[JobId]]],
) -> None:
    expected: Past = {job: [] for job in JOBS}
    number, done = 1, IDLE
    with journal() as database:
        for what, jobs in taken:
            match what:
                case "commit":
                    done = add(database, number, jobs, done)
                    for at, job in enumerate(jobs, number):
                        expected[job].append(float(at))
                    number += len(jobs)
                case "drop":
                    drop_oldest(database, jobs[0], keep=3, most=100)
                    first, rest = expected[jobs[0]][:1], expected[jobs[0]][1:]
                    expected[jobs[0]] = first + rest[-3:]
                case "forget":
                    left = (
                        "INSERT INTO ended_jobs VALUES (1, ?, 'u', 'n', 's', NULL, 0.0, x'', 0, 0)"
                    )
                    database.execute(left, jobs)
                    forget_ended(database, before=1.0)
                    expected[jobs[0]] = []
                case "restart":
                    done = IDLE
            assert past(database) == expected
            if "restart" not in (step for step, _ in taken):
                assert count(database, "recent_records") <= MOST
        latest = {job: JobRecords(database).last(job, PROMISES) >> 16 for job in JOBS}
        assert latest == {job: int(max(ends, default=0)) for job, ends in expected.items()}


def test_a_pass_moves_every_record_that_existed_at_its_start() -> None:
    with journal() as database:
        done, number = IDLE, 1
        while done == IDLE and number < MANY:
            done = add(database, number, [JOBS[number % 4]], done)
            number += 1
        began = number - 1
        while done != IDLE and number < MANY:
            done = add(database, number, [JOBS[number % 4]], done)
            number += 1
        (oldest,) = database.execute("SELECT min(id) FROM recent_records").fetchone()
        kept = count(database, "recent_records")
        assert (began, oldest) == (LEAST + 1, LEAST + 2)
        assert count(database, "job_records") + kept == number - 1
        assert kept <= LEAST + 2


def test_the_merge_of_a_rolled_back_commit_is_repeated() -> None:
    with journal() as database:
        done = IDLE
        for number in range(1, 40):
            database.execute("BEGIN IMMEDIATE")
            rows = [(number, row) for row in rows_of([promised(JOBS[0], number)])]
            merge(database, done, append_rows(database, rows))
            database.execute("ROLLBACK")
            done = add(database, number, [JOBS[0]], done)

            assert past(database)[JOBS[0]] == [float(at) for at in range(1, number + 1)]


def test_a_commit_without_records_merges_none() -> None:
    with journal() as database:
        done = add(database, 1, [JOBS[0]] * (LEAST + 1), IDLE)
        assert done != IDLE

        assert add(database, 100, [], done) == done


def test_a_pass_does_not_overwrite_merged_records() -> None:
    with journal() as database:
        done = add(database, 1, [JOBS[0]] * (LEAST + 1), IDLE)
        moved = count(database, "job_records")
        database.execute("UPDATE job_records SET crc = 1")
        assert moved

        for number in range(LEAST + 2, MANY):
            done = add(database, number, [JOBS[1]], done)

        (kept,) = database.execute("SELECT count(*) FROM job_records WHERE crc = 1").fetchone()
        assert kept == moved


def test_a_job_in_both_levels_keeps_its_latest_records() -> None:
    with journal() as database:
        done = add(database, 1, [JOBS[0]] * (LEAST + 1), IDLE)
        done = add(database, LEAST + 2, [JOBS[0], JOBS[1]], done)
        assert count(database, "job_records")

        dropped = drop_oldest(database, JOBS[0], keep=3, most=100)

        assert dropped == LEAST + 2 - 4
        assert past(database)[JOBS[0]] == [1.0, *(float(LEAST + at) for at in range(3))]
        assert past(database)[JOBS[1]] == [float(LEAST + 3)]


def test_a_pass_without_records_left_ignores_later_records() -> None:
    with journal() as database:
        done = add(database, 1, [JOBS[0]] * (LEAST + 1), IDLE)
        drop_oldest(database, JOBS[0], keep=1, most=100)
        assert count(database, "recent_records") == 0

        for number in range(LEAST + 2, LEAST + 6):
            done = add(database, number, [JOBS[0]], done)

        later = [float(at) for at in range(LEAST + 1, LEAST + 6)]
        assert past(database)[JOBS[0]] == [1.0, *later]


def test_settling_a_list_leaves_other_lists() -> None:
    with journal() as database:
        add(database, 1, list(JOBS), IDLE)

        rolling_merge.settle(database, JOBS[0], PROMISES)
        rolling_merge.settle(database, JOBS[1], EPOCHS)

        assert database.execute("SELECT job FROM job_records").fetchall() == [(JOBS[0],)]
        assert count(database, "recent_records") == 3


WRITES: Final = """
import os, sys
from pathlib import Path
from controlplane.core.history import EndPromised
from controlplane.core.inputs import NodeHeard
from controlplane.journal import records as rolling_merge
from controlplane.journal.database import Entry
from controlplane.journal.writer import Writer
from schemas.ids import JobId, NodeId, Seconds
from schemas.wire.client import PromiseInfo

rolling_merge.MERGE_THRESHOLD = 12
writer = Writer(Path(sys.argv[1]), lambda count: os.write(1, b"%d\\n" % (writer.base + count)))
number = writer.base
while True:
    for _ in range(20):
        number += 1
        promise = PromiseInfo(time=Seconds(0.0), end=Seconds(float(number)))
        record = EndPromised(job=JobId(f"j-{number % 4 + 1}"), promise=promise)
        heard = NodeHeard(node=NodeId("n1"))
        writer.append(Entry(at=Seconds(1.0), input=heard, feed=(), records=(record,)))
    while number - writer.durable > 100:
        os.sched_yield()
"""


@pytest.mark.slow
def test_kills_during_merges_lose_no_record(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.sqlite"
    for commits in range(2, 12, 2):
        writes = [sys.executable, "-c", WRITES, str(path)]
        with subprocess.Popen(writes, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(commits):
                said = int(writer.stdout.readline())
            writer.kill()
            said = max([said, *map(int, writer.stdout.read().split()[:-1])])  # the last may be cut

        with contextlib.closing(open_for_writing(path)) as database:
            (last,) = database.execute("SELECT max(id) FROM inputs").fetchone()
            assert last >= said
            assert past(database) == {
                job: [float(at) for at in range(1, last + 1) if at % 4 + 1 == int(job[2:])]
                for job in JOBS
            }
    with contextlib.closing(open_for_writing(path)) as database:
        assert count(database, "job_records")
