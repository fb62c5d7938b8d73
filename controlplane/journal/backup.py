"""Backup, restore, compaction and verification of journals.

Verification replays all inputs and compares the results with the stored events and snapshots.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from controlplane.core.commands import CoreError
from controlplane.journal.database import (
    CHECK_DISK,
    JOURNAL_ID,
    TERM_FLOOR,
    JournalError,
    meta,
    new_id,
    open_for_reading,
    open_for_writing,
)
from controlplane.journal.mark import (
    LostInputsError,
    Mark,
    MarkFile,
    has_tables,
    losses,
    mark_path,
    read_mark,
)
from controlplane.journal.reader import Reader
from controlplane.journal.replay import EventCheck, earliest, recover
from controlplane.journal.retention import Retention, forget
from controlplane.journal.snapshots import FORMAT, image_of, round_trips
from controlplane.journal.take_snapshot import LOCK_SUFFIX, take_snapshot
from controlplane.journal.writer import take_lock
from schemas.ids import Seconds

FILE_SUFFIXES: Final = ("", "-wal", "-shm")  # the files of one database
FORCE: Final = "name another file or use --force"
JOBS_GAP: Final = 1000  # job numbers that are skipped if the number of accepted jobs is unknown


def back_up(journal: Path, copy: Path, *, force: bool = False) -> None:
    """Copy a journal at one point in time, even while a controller writes it.

    Args:
        copy: target file, which is written completely or not at all.

    Raises:
        JournalError: if `copy` exists, there is no room, or the copied data is damaged.
    """
    if copy.exists() and not force:
        raise JournalError(f"{copy} already exists", FORCE)
    part = copy.with_name(f"{copy.name}.part")
    with _as_journal_errors(copy):
        copy_database(journal, part)
        _verify(part, journal)
        # With a snapshot the copy needs no other release. Without one it is complete nevertheless.
        with contextlib.suppress(JournalError, CoreError):
            take_snapshot(part)
        part.with_suffix(LOCK_SUFFIX).unlink(missing_ok=True)
        _durable(part)
        part.replace(copy)
        _durable(copy.parent)


def copy_database(journal: Path, copy: Path) -> None:
    """Copy the rows of a journal at one point in time. The copy is neither verified nor durable.

    Raises:
        JournalError: if there is no room, or a file cannot be used.
    """
    with _as_journal_errors(copy):
        copy.unlink(missing_ok=True)
        with (
            contextlib.closing(open_for_reading(journal)) as source,
            contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target,
        ):
            copy.chmod(0o600)
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")


def adopt(copy: Path, journal: Path, jobs: int) -> None:
    """Replace a journal by a copy of the same journal, made by `copy_database` on another host.

    Args:
        jobs: number of accepted jobs in the copied journal.

    Raises:
        JournalError: if a controller uses the journal, it has inputs of another journal, the copy
            is damaged, or there is no room. The existing journal is then unchanged.
    """
    with _locked(journal), _as_journal_errors(journal):
        with contextlib.closing(open_for_reading(copy)) as database:
            journal_id = meta(database, JOURNAL_ID)
        own = _id_of(journal)
        if own not in {"", journal_id} and _has_inputs(journal):
            what = f"{journal} is journal {own}, the active controller has {journal_id}"
            raise LostInputsError(what, "if it is no longer needed, move it to another folder")
        with contextlib.closing(Reader(copy)) as reader:
            for problem in reader.problems_of_state():
                raise JournalError(f"{copy}: {problem}", "the copy was not used")
            last = recover(reader).last
        _durable(copy)
        mark_path(journal).unlink(missing_ok=True)
        _set_aside(journal)
        copy.replace(journal)
        _durable(journal.parent)
        MarkFile(journal, Mark(journal_id, last, 0, jobs)).close()


def begin_anew(journal: Path) -> None:
    """Replace an unusable journal by an empty one, which awaits a copy. The former one is kept.

    Raises:
        JournalError: if a controller uses the journal, or there is no room.
    """
    with _locked(journal), _as_journal_errors(journal):
        mark_path(journal).unlink(missing_ok=True)
        _set_aside(journal)
        open_for_writing(journal).close()


def _id_of(journal: Path) -> str:
    try:
        with contextlib.closing(open_for_reading(journal)) as database:
            return meta(database, JOURNAL_ID)
    except (JournalError, sqlite3.Error):
        return ""


def restore(copy: Path, journal: Path, *, force: bool = False) -> Path | None:
    """Replace a journal by a copy. No controller may be using the journal.

    The controller's next run gets a term that is above every term that a node might have seen, and
    new jobs get numbers that no job had. The journal gets a new id, so that its new jobs differ
    from jobs that the replaced journal accepted after the copy was made.

    Args:
        copy: file made by `back_up`, or any journal that no controller writes.
        journal: path of the journal that the controller will open.
        force: True if even a journal that has inputs may be replaced.

    Returns:
        New path of the replaced journal, or None if no journal existed.

    Raises:
        JournalError: if a controller uses the journal, it has inputs and is not forced, the copy
            is damaged, or there is no room. The existing journal is then unchanged.
    """
    with _locked(journal), _as_journal_errors(journal):
        if journal.exists() and not force and _has_inputs(journal):
            raise JournalError(
                f"{journal} already has inputs", "use --force; the former journal is kept"
            )
        part = journal.with_name(f"{journal.name}.part")
        with contextlib.closing(open_for_reading(copy)):
            pass
        shutil.copyfile(copy, part)
        part.chmod(0o600)
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as database:
            insert = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
            database.execute(insert, (TERM_FLOOR, str(int(time.time()))))
            database.execute(insert, (JOURNAL_ID, journal_id := new_id()))
            database.execute("PRAGMA journal_mode=DELETE")
        _verify(part, copy)
        _durable(part)
        mark = _mark_of(part, journal_id, _known_mark(journal))
        kept = _set_aside(journal)
        part.replace(journal)
        _durable(journal.parent)
        MarkFile(journal, mark).close()
    return kept


def _known_mark(journal: Path) -> Mark | None:
    try:
        return read_mark(journal)
    except JournalError:
        return None


def _mark_of(part: Path, journal_id: str, known: Mark | None) -> Mark:
    """Return the mark of a copy. Its number of jobs also covers jobs of the replaced journal."""
    with contextlib.closing(Reader(part)) as reader:
        found = recover(reader)
    accepted = found.reactor.state.jobs_accepted
    jobs = known.jobs if known is not None else accepted + JOBS_GAP if accepted else 0
    return Mark(journal_id, found.last, 0, max(jobs, accepted))


def accept_loss(journal: Path) -> tuple[list[str], Path | None]:
    """Continue with what a journal still contains. No controller may be using the journal.

    The controller's next run starts as after `restore`. A missing or empty journal is replaced by
    a new journal.

    Returns:
        Descriptions of what was lost, and the new path of the former file, or None without a file.

    Raises:
        JournalError: if a controller uses the journal, its content cannot be copied, or there is no
            room. The existing journal is then unchanged.
    """
    try:
        lost = list(losses(journal))
    except JournalError as error:
        lost = [error.message]
    with tempfile.TemporaryDirectory(dir=journal.parent, prefix=".copy-") as folder:
        copy = Path(folder, "journal.sqlite")
        with _as_journal_errors(journal):
            if has_tables(journal):
                back_up(journal, copy)
            else:
                open_for_writing(copy).close()
        return lost, restore(copy, journal, force=True)


def compact(journal: Path, keep: Retention, now: Seconds) -> tuple[int, int]:
    """Shrink a journal as far as possible. No controller may be using the journal.

    Args:
        keep: limits for rows that a restart does not need.
        now: seconds since the epoch.

    Returns:
        Size of the file in bytes before and after.

    Raises:
        JournalError: if a controller uses the journal, it is damaged, or there is no room for a
            temporary second copy.
        CoreError: if this release cannot handle the inputs.
    """
    with _locked(journal), _as_journal_errors(journal):
        if not journal.is_file():
            raise JournalError(
                f"{journal}: there is no such file",
                "name the journal in a controller's state folder",
            )
        before = journal.stat().st_size
        with contextlib.closing(open_for_writing(journal)) as database:
            take_snapshot(journal)
            while forget(database, keep, now):
                pass
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return before, journal.stat().st_size


def _verify(copy: Path, original: Path) -> None:
    """Check that a copy has an intact state, and no damage that the original does not have."""
    with contextlib.closing(Reader(copy)) as reader:
        problems = list(reader.problems_of_state())
        past = reader.problems_of_past()
    if past:
        known = set(_past_problems(original))
        problems += [problem for problem in past if problem not in known]
    for problem in problems:
        raise JournalError(f"{copy}: {problem}", "the copy was not used; nothing was changed")


def _past_problems(journal: Path) -> list[str]:
    with contextlib.closing(Reader(journal)) as reader:
        return reader.problems_of_past()


def _has_inputs(journal: Path) -> bool:
    try:
        with contextlib.closing(Reader(journal)) as reader:
            return reader.first_and_last() != (0, 0)
    except JournalError:
        return True  # damaged, but not empty


def _set_aside(journal: Path) -> Path | None:
    """Rename all files of a journal, and return the new path, which includes the current time.

    Return None if there is no file. A write-ahead log without a database is renamed, too, because
    SQLite would apply it to the next database.
    """
    if not any(journal.with_name(journal.name + end).exists() for end in FILE_SUFFIXES):
        return None
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    kept = journal.with_name(f"{journal.name}.before-{stamp}")
    for end in FILE_SUFFIXES:
        file = journal.with_name(journal.name + end)
        if file.exists():
            file.replace(kept.with_name(kept.name + end))
    return kept


@contextlib.contextmanager
def _locked(journal: Path) -> Iterator[None]:
    """Lock the journal, so that no controller starts in the meantime."""
    lock = take_lock(journal.with_suffix(".lock"))
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _as_journal_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise JournalError(f"{path}: {error}", CHECK_DISK) from None
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}", CHECK_DISK) from None


def _durable(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def differences(reader: Reader) -> Iterator[str]:
    """Yield each difference between the stored rows and a replay from the earliest stored state.

    Inputs that another release handled are not replayed if a snapshot covers them.

    Raises:
        JournalError: if the journal is damaged.
        CoreError: if this release cannot handle the inputs.
    """
    reactor, first, *_ = earliest(reader, own_inputs=True)
    snapshots = {one.input: one for one in reader.snapshots() if one.input > first}
    events = EventCheck(reader, reactor.state.feed_seq)
    for number, at, event in reader.numbered_inputs(first):
        yield from events.differences(number, reactor.handle(event, at))
        snapshot = snapshots.get(number)
        if snapshot is not None and snapshot.format == FORMAT:
            image = zlib.decompress(reader.body_of(snapshot))
            if not (image == image_of(reactor) or round_trips(image, reactor)):
                yield f"snapshot {number} differs from the state that its inputs lead to"
    last = reactor.state.feed_seq
    if events.last != last:
        yield f"the feed ends with event {events.last}, the inputs lead to event {last}"


def problems(reader: Reader) -> Iterator[str]:
    """Yield every problem of a journal, including a replay that fails."""
    found = False
    try:
        for problem in reader.problems_of_state():
            found = True
            yield problem
        yield from reader.problems_of_past()
        if not found:
            yield from differences(reader)
    except JournalError as error:
        yield error.message
    except Exception as error:  # noqa: BLE001 - a handler may raise anything
        yield f"this release cannot replay the inputs: {error!r}"
