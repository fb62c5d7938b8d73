"""What a journal said was durable is there, whatever happened next."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from controlplane.core.commands import Announce, Command
from controlplane.core.inputs import JobSubmitted
from controlplane.core.reactor import Reactor
from controlplane.journal import writer as writer_module
from controlplane.journal.database import Entry, JournalError, checksum, input_from
from controlplane.journal.reader import Reader
from controlplane.journal.replay import replay
from controlplane.journal.writer import Writer
from schemas.ids import Seconds
from schemas.wire.feed import FeedEvent
from tests.support.builders import submission
from tests.support.controller import cluster_of, running

LIMIT_S: Final = 60.0


class Durable:
    """What a writer reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, count: int) -> None:
        with self._changed:
            self.counts.append(count)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.counts[-1:] >= [count], LIMIT_S)
            assert done, f"{count} entries were not durable in time: {self.counts}"


def entry(number: int, padding: int = 0) -> Entry:
    return Entry(
        at=Seconds(float(number)), input=submission(f"j{number}", user="x" * max(1, padding))
    )


@contextmanager
def journal(path: Path) -> Iterator[tuple[Writer, Durable]]:
    durable = Durable()
    writer = Writer(path, durable)
    try:
        yield writer, durable
    finally:
        writer.close()


def told(commands: list[Command]) -> tuple[FeedEvent, ...]:
    return tuple(command.event for command in commands if isinstance(command, Announce))


def numbers(path: Path) -> list[int]:
    """Which entries a new connection sees, in order."""
    with closing(Reader(path)) as reader:
        found = list(reader.inputs())
    names = [event.spec.name for _, event in found if isinstance(event, JobSubmitted)]
    assert names == [f"j{at:.0f}" for at, _ in found]
    return [int(at) for at, _ in found]


@contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """Another connection has the database for itself for a moment."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    yield
    database.execute("ROLLBACK")
    database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


# --- durable and in order


def test_a_history_reads_back_in_pages_and_replays_to_the_same_state(path: Path) -> None:
    controller = running(cluster_of(n1=1), epochs=2)
    reactor = Reactor()
    entries = []
    for at, body in controller.history:
        event = input_from(body)
        entries.append(Entry(at=at, input=event, feed=told(reactor.handle(event, at))))
    with journal(path) as (writer, durable):
        for made in entries:
            writer.append(made)
        durable.wait_for(len(entries))
        with closing(Reader(path)) as reader:
            assert list(reader.inputs()) == [(made.at, made.input) for made in entries]
            assert replay(reader.inputs()).state == controller.state
            feed = tuple(event for made in entries for event in made.feed)
            assert reader.feed(0, 1000) == feed
            assert reader.feed(2, 2) == feed[1:3]
            assert reader.feed(len(feed), 2) == feed[-1:]
            assert reader.feed(len(feed) + 1, 2) == ()


def test_closing_commits_queued_entries(path: Path) -> None:
    durable = Durable()
    writer = Writer(path, durable)
    for number in range(500):
        writer.append(entry(number))

    writer.close()

    assert durable.counts[-1] == 500
    assert numbers(path) == list(range(500))


def test_waiting_entries_are_committed_together_and_in_order(path: Path) -> None:
    with journal(path) as (writer, durable):
        with held_by_another(path):
            for number in range(1500):
                writer.append(entry(number))
        durable.wait_for(1500)

        assert len(durable.counts) <= 2, "those queued before the lock was noticed, and the rest"
        assert numbers(path) == list(range(1500))


# --- one owner


def test_a_second_writer_is_refused_with_a_hint(path: Path) -> None:
    with journal(path) as (writer, durable):
        with pytest.raises(JournalError) as refused:
            Writer(path, Durable())
        writer.append(entry(0))
        durable.wait_for(1)

    assert refused.value.message == f"{path.with_suffix('.lock')} is held by another process"
    assert refused.value.hint == "one controller owns a journal; stop the other"
    assert numbers(path) == [0]


def test_each_writer_continues_where_the_last_one_ended(path: Path) -> None:
    for number in range(3):
        with journal(path) as (writer, durable):
            writer.append(entry(number))
            durable.wait_for(1)
            assert numbers(path) == list(range(number + 1))

    assert numbers(path) == [0, 1, 2]


# --- a full disk


@contextmanager
def pages_run_out(writer: Writer, _: Path) -> Iterator[None]:
    database = writer._database
    (used,) = database.execute("PRAGMA page_count").fetchone()
    (before,) = database.execute("PRAGMA max_page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {used}")
    yield
    with suppress(sqlite3.ProgrammingError):  # closed meanwhile
        database.execute(f"PRAGMA max_page_count = {before}")


@contextmanager
def files_stop_growing(_: Writer, path: Path) -> Iterator[None]:
    size = path.with_name(f"{path.name}-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL_DISK = pytest.mark.parametrize(
    ("full_disk", "why"),
    [
        pytest.param(pages_run_out, "database or disk is full", id="pages"),
        pytest.param(files_stop_growing, "disk I/O error", id="bytes"),
    ],
)
FullDisk = Callable[[Writer, Path], AbstractContextManager[None]]


class Retries:
    """Stands in for `time` in the writer: each wait before a retry lasts until it is let go."""

    def __init__(self) -> None:
        self._tried = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def sleep(self, _: float) -> None:
        self._tried.release()
        assert self._go.acquire(timeout=LIMIT_S)

    def wait_for_one(self) -> None:
        assert self._tried.acquire(timeout=LIMIT_S)

    def let_go(self) -> None:
        self._go.release()


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> Retries:
    held = Retries()
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(sleep=held.sleep))
    return held


@FULL_DISK
def test_no_entry_is_reported_as_durable_while_the_disk_is_full(
    path: Path, retries: Retries, full_disk: FullDisk, why: str
) -> None:
    with journal(path) as (writer, durable):
        writer.append(entry(0))
        durable.wait_for(1)
        with full_disk(writer, path):
            writer.append(entry(1, padding=200_000))
            for _ in range(2):
                retries.wait_for_one()
                assert (durable.counts, writer.stalled) == ([1], why)
                retries.let_go()
            retries.wait_for_one()
            writer.append(entry(2))
            assert numbers(path) == [0]
        retries.let_go()
        durable.wait_for(3)

        assert writer.stalled == ""
        assert numbers(path) == [0, 1, 2]


@FULL_DISK
def test_a_writer_gives_up_when_it_is_closed_on_a_full_disk(
    path: Path, retries: Retries, full_disk: FullDisk, why: str
) -> None:
    durable = Durable()
    writer = Writer(path, durable)
    writer.append(entry(0))
    durable.wait_for(1)
    with full_disk(writer, path):
        writer.append(entry(1, padding=200_000))
        retries.wait_for_one()
        closing = threading.Thread(target=writer.close)
        closing.start()
        assert writer._closing.wait(LIMIT_S)
        retries.let_go()
        closing.join(LIMIT_S)

    assert not closing.is_alive()
    assert (durable.counts, writer.stalled) == ([1], why)
    assert numbers(path) == [0]


# --- sudden death

APPENDING = """
import sys
from pathlib import Path
from threading import Semaphore

from controlplane.core.commands import Announce, Command
from controlplane.core.reactor import Reactor
from controlplane.core.reactor import Reactor
from controlplane.journal.database import Entry
from controlplane.journal.writer import Writer
from tests.support.builders import submission

ahead = Semaphore(5000)
said = 0


def committed(count):
    global said
    sys.stdout.write(f"{count}\\n")
    sys.stdout.flush()
    ahead.release(count - said)
    said = count


writer, reactor, number = Writer(Path(sys.argv[1]), committed), Reactor(), 0
while True:
    ahead.acquire()
    event = submission(f"j{number}")
    commands = reactor.handle(event, float(number))
    feed = tuple(command.event for command in commands if isinstance(command, Announce))
    writer.append(Entry(at=float(number), input=event, feed=feed))
    number += 1
"""


@pytest.mark.slow
def test_entries_reported_before_a_kill_survive_it(path: Path) -> None:
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", APPENDING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) > 2000:
                break
        child.send_signal(signal.SIGKILL)
        reported = int(([line, *child.stdout.read().split()])[-1])

    found = numbers(path)
    assert len(found) >= reported > 2000
    assert found == list(range(len(found)))
    with journal(path) as (writer, durable):
        writer.append(entry(len(found)))
        durable.wait_for(1)
    with closing(Reader(path)) as reader:
        assert replay(reader.inputs()).state.jobs_accepted == len(found) + 1
        assert [event.seq for event in reader.feed(1, 10**6)] == list(range(1, len(found) + 1))


@pytest.mark.parametrize("lost", [1, 100, 4096, 5000, 9000, 20_000])
def test_a_torn_tail_loses_whole_entries_at_the_end_only(
    path: Path, tmp_path: Path, lost: int
) -> None:
    copy = tmp_path / "crashed.db"
    with journal(path) as (writer, durable):
        for number in range(10):
            writer.append(entry(number))
            durable.wait_for(number + 1)
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    wal = Path(f"{copy}-wal")
    with wal.open("r+b") as file:
        file.truncate(max(0, wal.stat().st_size - lost))

    found = numbers(copy)

    assert found == list(range(len(found)))
    assert len(found) < 10
    with journal(copy) as (writer, durable):
        writer.append(entry(len(found)))
        durable.wait_for(1)
    assert numbers(copy) == list(range(len(found) + 1))


# --- files that cannot be used


@pytest.mark.parametrize("version", [6, 8], ids=["older", "newer"])
@pytest.mark.parametrize(
    "use", [Reader, lambda path: Writer(path, Durable())], ids=["read", "write"]
)
def test_a_journal_of_another_schema_is_refused_and_not_held(
    path: Path, use: Callable[[Path], object], version: int
) -> None:
    with journal(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(version),))

    for _ in range(2):
        with pytest.raises(JournalError) as refused:
            use(path)

        assert refused.value.message == f"{path} has schema {version}"
        assert refused.value.hint == (
            "this release reads schema 7: use the release that wrote it, or let its jobs end "
            "there, move the file away, and start with a new one"
        )


def test_a_reader_does_not_create_a_missing_journal(path: Path) -> None:
    path.parent.mkdir()

    with pytest.raises(JournalError) as refused:
        Reader(path)

    assert refused.value.message == f"{path}: there is no such file"
    assert refused.value.hint == "name the file journal.sqlite in a controller's state folder"
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("use", "content", "problem"),
    [
        (Reader, b"", "no such table: meta"),
        (Reader, b"no database" * 1000, "file is not a database"),
        (lambda path: Writer(path, Durable()), b"no database" * 1000, "file is not a database"),
    ],
    ids=["read empty", "read text", "write"],
)
def test_a_file_that_is_no_journal_is_refused_and_unchanged(
    use: Callable[[Path], object], content: bytes, problem: str, path: Path
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)

    with pytest.raises(JournalError) as refused:
        use(path)

    assert refused.value.message == f"{path}: {problem}"
    assert refused.value.hint.startswith("check the disk and the file's owner")
    assert path.read_bytes() == content


def test_a_damaged_schema_table_is_refused(path: Path) -> None:
    with journal(path) as (writer, durable):
        writer.append(entry(0))
        durable.wait_for(1)
    broken = path.read_bytes().replace(b"CREATE TABLE meta", b"CREATE \xf8\xf8\xf8\xf8\xf8 meta")
    path.write_bytes(broken.replace(b"tablemetameta", b"table\xf8etameta"))

    with pytest.raises(JournalError, match="codec can't decode"):
        Reader(path)


OTHER: Final = b"\x81\xa4type\xa1n"
INPUT: Final = "INSERT INTO inputs VALUES (2, 1.0, ?, ?)"


@pytest.mark.parametrize(
    ("change", "values", "problem"),
    [
        (INPUT, (OTHER, -1), "input 2: wrong checksum; restore a b"),
        (INPUT, ("text", -1), "input 2: wrong checksum; restore a b"),
        (INPUT, (OTHER, checksum(2, 1.0, OTHER)), "input 2: Invalid value 'n'"),
        ("INSERT INTO feed VALUES (7, ?, 1)", (OTHER,), "feed event 7: wrong checksum; restore"),
        ("INSERT INTO feed VALUES (7, ?, 1)", ("text",), "feed event 7: wrong checksum; restore"),
        ("DROP TABLE feed", (), "no such table: feed; restore a backup"),
        ("UPDATE inputs SET body = CAST(replace(body, 'j0', 'j1') AS BLOB)", (), "input 1: wrong"),
        ("UPDATE inputs SET at = 8.0", (), "input 1: wrong checksum"),
        ("UPDATE inputs SET id = 2", (), "input 2: wrong checksum"),
    ],
)
def test_a_damaged_row_is_named(
    change: str, values: tuple[bytes | str | int, ...], problem: str, path: Path
) -> None:
    with journal(path) as (writer, durable):
        writer.append(entry(0))
        durable.wait_for(1)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(change, values)

        with (
            closing(Reader(path)) as reader,
            pytest.raises(JournalError, match=rf"^{path}: {problem}"),
        ):
            _ = [*reader.inputs(), *reader.feed(1, 10)]
