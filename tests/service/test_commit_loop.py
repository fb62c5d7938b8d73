"""Nothing leaves before it is durable, whatever an input, an effect or the disk does."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from controlplane.core import reactor
from controlplane.core.commands import Announce, Command
from controlplane.core.handler_context import HandlerContext
from controlplane.core.inputs import CancelRequested, Input, InputSkipped, JobSubmitted
from controlplane.journal import writer as writer_module
from controlplane.journal.database import JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.replay import replay
from controlplane.service import commit_loop
from controlplane.service.commit_loop import CommitLoop
from schemas.ids import JobId
from tests.support.builders import submission
from tests.support.service import full_disk, until

LIMIT_S: Final = 60.0
BAD: Final = CancelRequested(job=JobId("j-1"), user="ada")


class Life:
    """One incarnation of a commit loop, and what left it."""

    def __init__(self, path: Path, refuse: Callable[[Command], bool] = lambda _: False) -> None:
        self.path = path
        self.left: list[str] = []
        self._refuse = refuse
        self._changed = asyncio.Event()
        self.loop = CommitLoop(path, self._perform)

    def _perform(self, command: Command) -> None:
        if self._refuse(command):
            raise RuntimeError("an effect that fails")
        if isinstance(command, Announce):
            self.left.append(command.event.event)
        self._changed.set()

    def submit(self, number: int, padding: int = 1) -> None:
        self.loop.handle(submission(f"j{number}", user="x" * padding))

    async def have_left(self, many: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.left) < many:
                self._changed.clear()
                await self._changed.wait()


def kinds(path: Path) -> list[type[Input]]:
    reader = Reader(path)
    try:
        return [type(event) for _, event in reader.inputs()]
    finally:
        reader.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture(autouse=True)
def retried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", 0.001)


@pytest.fixture
def bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BAD` changes the state and then turns out not to be possible."""

    def halfway(ctx: HandlerContext, _: CancelRequested) -> None:
        ctx.state.jobs.clear()
        ctx.announce("job.cancelled")
        raise RuntimeError("a state that cannot be")

    monkeypatch.setattr(reactor, "HANDLERS", {**reactor.HANDLERS, CancelRequested: halfway})


@asynccontextmanager
async def stalled_life(path: Path) -> AsyncIterator[Life]:
    """A life with a durable submission and another one that a full disk holds back."""
    life = Life(path)
    life.submit(0)
    await life.have_left(1)
    with full_disk(life.loop):
        life.submit(1, padding=200_000)
        await until(lambda: life.loop.stalled)
        yield life


# --- impossible inputs


@pytest.mark.usefixtures("bad_input")
async def test_an_impossible_input_is_replaced_by_a_skip(path: Path) -> None:
    life = Life(path)
    life.submit(0)
    life.loop.handle(BAD)
    life.submit(1)
    await life.have_left(2)

    assert life.left == ["job.submitted", "job.submitted"]
    assert [job.spec.name for job in life.loop.reactor.state.jobs.values()] == ["j0", "j1"]
    life.loop.close()
    reader = Reader(path)
    assert replay(reader.inputs()).state == life.loop.reactor.state
    assert [event.seq for event in reader.feed(1, 10)] == [1, 2]
    reader.close()

    assert kinds(path) == [JobSubmitted, InputSkipped, JobSubmitted]


@pytest.mark.usefixtures("bad_input")
async def test_a_skip_on_a_full_disk_has_no_effect_before_it_is_durable(path: Path) -> None:
    async with stalled_life(path) as life:
        life.loop.handle(BAD)
        life.submit(2)
        names = [job.spec.name for job in life.loop.reactor.state.jobs.values()]

        assert names == ["j0", "j1", "j2"]
        assert life.left == ["job.submitted"]
        assert kinds(path) == [JobSubmitted]
    await life.have_left(3)
    life.loop.close()

    assert kinds(path) == [JobSubmitted, JobSubmitted, InputSkipped, JobSubmitted]


async def test_an_input_that_cannot_be_encoded_is_skipped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(ctx: HandlerContext, _: CancelRequested) -> None:
        ctx.announce("job.cancelled", detail={"epochs": 2**64})

    monkeypatch.setattr(reactor, "HANDLERS", {**reactor.HANDLERS, CancelRequested: too_large})

    life = Life(path)
    life.loop.handle(BAD)
    life.submit(0)
    await life.have_left(1)

    assert life.left == ["job.submitted"]
    life.loop.close()

    assert kinds(path) == [InputSkipped, JobSubmitted]


@pytest.mark.usefixtures("bad_input")
async def test_skipping_an_input_does_not_read_the_journal(path: Path) -> None:
    life = Life(path)
    for number in range(3):
        life.submit(number)
    await life.have_left(2)
    life.submit(3)
    life.loop.reader.close()
    life.loop.handle(BAD)

    names = [job.spec.name for job in life.loop.reactor.state.jobs.values()]
    assert names == ["j0", "j1", "j2", "j3"]
    life.loop.close()


# --- restarts


async def test_a_restart_uses_the_snapshot_of_the_last_close(path: Path) -> None:
    first = Life(path)
    for number in range(3):
        first.submit(number)
    assert first.loop.tail.inputs == 3
    first.loop.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("DELETE FROM inputs")
    second = Life(path)

    assert second.loop.tail.inputs == 0
    assert second.loop.reactor.state == first.loop.reactor.state
    assert second.loop.committed.state == first.loop.reactor.state
    second.submit(3)
    await second.have_left(1)
    second.loop.close()

    with contextlib.closing(Reader(path)) as reader:
        assert [number for number, _, _ in reader.numbered_inputs()] == [4]
        assert [snapshot.input for snapshot in reader.snapshots()] == [4, 3]


async def test_the_closing_snapshot_excludes_inputs_that_are_not_durable(path: Path) -> None:
    async with stalled_life(path) as life:
        life.loop.close()

    with contextlib.closing(Reader(path)) as reader:
        assert reader.snapshots() == ()


# --- a full disk


async def test_a_commit_releases_no_effect_of_a_later_input(path: Path) -> None:
    life = Life(path)
    life.submit(0)
    deadline = time.monotonic() + LIMIT_S
    while not kinds(path):  # it is durable, and the loop was not told yet
        assert time.monotonic() < deadline
    with full_disk(life.loop):
        life.submit(1, padding=200_000)
        await until(lambda: life.loop.stalled)
        await life.have_left(1)

        assert life.left == ["job.submitted"]
    await life.have_left(2)
    life.loop.close()


async def test_the_end_of_a_full_disk_is_announced_with_reason_and_duration(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_loop, "DEADLINE_TICK_S", 0.001)

    life = Life(path)
    watch = asyncio.create_task(life.loop.keep_deadlines())
    life.submit(0)
    await life.have_left(1)
    with full_disk(life.loop):
        life.submit(1, padding=200_000)
        while life.loop._stall is None:  # noticed
            await asyncio.sleep(0)
        assert life.left == ["job.submitted"]
    await life.have_left(3)
    watch.cancel()
    life.loop.close()

    assert life.left == ["job.submitted", "job.submitted", "controller.stalled"]

    reader = Reader(path)
    (told,) = [event for event in reader.feed(1, 10) if event.event == "controller.stalled"]
    reader.close()
    assert told.detail["reason"] == "database or disk is full"
    assert isinstance(lasted := told.detail["lasted_s"], float)
    assert lasted > 0.0


# --- effects


async def test_a_failing_effect_does_not_stop_the_others(path: Path) -> None:
    life = Life(path, lambda command: "j0" in repr(command))
    done: list[str] = []

    def fails() -> None:
        raise RuntimeError("so does this one")

    def after(commands: list[Command]) -> None:
        done.append(f"{len(commands)} commands")

    life.loop.handle(submission("j0"), before_effects=fails, after_effects=after)
    life.submit(1)
    await life.have_left(1)

    assert (life.left, done) == (["job.submitted"], ["3 commands"])
    life.loop.close()


# --- a journal that is lost


async def test_a_permanent_journal_failure_is_reported(path: Path) -> None:
    life = Life(path)
    life.submit(0)
    await life.have_left(1)
    other = sqlite3.connect(path)
    other.execute("DROP TABLE feed")
    other.close()
    life.submit(1)

    error = await life.loop.failure()

    assert isinstance(error, JournalError)
    assert error.message == (f"{path} cannot be written: OperationalError('no such table: feed')")
    assert error.hint.startswith("look at the disk")
    assert (life.left, life.loop.stalled) == (["job.submitted"], "")
    life.loop.close()

    assert kinds(path) == [JobSubmitted]


async def test_a_failed_fsync_is_not_retried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(path)
    tries: list[Any] = []

    def write(rows: Any) -> None:
        tries.append(rows)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    monkeypatch.setattr(life.loop._writer, "_write", write)
    life.submit(0)

    error = await life.loop.failure()

    assert (len(tries), life.left) == (1, [])
    assert "disk I/O error" in error.message
    life.loop.close()


async def test_a_locked_journal_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(sleep=lambda _: None))

    life = Life(path)
    life.loop._writer._database.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    life.submit(0)
    await until(lambda: life.loop.stalled)

    assert life.loop.stalled == "database is locked"
    other.execute("ROLLBACK")
    other.close()
    await life.have_left(1)
    life.loop.close()
