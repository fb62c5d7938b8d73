"""Inputs are replayed by the release that wrote them, or with the stored events as the truth."""

import contextlib
import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.core.state import State
from controlplane.journal import releases
from controlplane.journal.backup import back_up, problems
from controlplane.journal.database import JournalError, open_for_reading
from controlplane.journal.reader import Reader
from controlplane.journal.releases import (
    KEPT,
    child_environment,
    code_of,
    delete_old_code,
    keep_own_code,
    own_release,
)
from controlplane.journal.replay import recover
from controlplane.journal.take_snapshot import take_snapshot

# A controller that is killed: its journal ends with inputs that no snapshot covers.
KILLED = """
import asyncio, os, sys
from pathlib import Path
from controlplane.core.inputs import CommitsResumed
from controlplane.journal.releases import keep_own_code, own_release
from controlplane.service.commit_loop import CommitLoop

async def main(journal):
    keep_own_code(journal)
    loop = CommitLoop(journal, lambda command: None)
    loop.begin(own_release())
    loop.handle(CommitsResumed(reason="full", since=1.0))
    await loop.caught_up()
    print(loop.committed.state.feed_seq, own_release(), flush=True)
    os._exit(9)

asyncio.run(main(Path(sys.argv[1])))
"""
ANNOUNCED = 'ctx.announce("controller.started", detail'
HANDLERS = "controlplane/core/handlers/nodes.py"


def run_killed(journal: Path, code: Path | None = None) -> tuple[int, str]:
    """Return the last event and the release of a controller that ran `code` and was killed."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(journal)],
        env=child_environment(code),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    events, release = done.stdout.split()
    return int(events), release


def other_release(folder: Path) -> Path:
    """Code of another release, which announces one event fewer at a controller's start."""
    changed = folder / "other.zip"
    with zipfile.ZipFile(keep_own_code(folder / "x")) as own, zipfile.ZipFile(changed, "w") as new:
        for name in own.namelist():
            text = own.read(name)
            if name == HANDLERS:
                assert ANNOUNCED.encode() in text
            text = text.replace(ANNOUNCED.encode(), b"dict(detail")
            new.writestr(name, text)
    return changed


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Path of a journal in a state folder of its own."""
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "journal.sqlite"


def recovered(journal: Path) -> State:
    """State after the last input of a journal."""
    with contextlib.closing(Reader(journal)) as reader:
        return recover(reader).reactor.state


@pytest.mark.slow
def test_inputs_of_another_release_are_replayed_by_its_own_code(
    tmp_path: Path, journal: Path
) -> None:
    events, release = run_killed(journal, other_release(tmp_path))
    assert release != own_release()

    state = recovered(journal)

    assert (state.feed_seq, state.term) == (events, 1)
    with contextlib.closing(open_for_reading(journal)) as database:
        assert database.execute("SELECT input, release FROM snapshots").fetchall() == [(2, release)]


@pytest.mark.slow
def test_each_release_replays_its_part_of_the_journal(tmp_path: Path, journal: Path) -> None:
    run_killed(journal)
    run_killed(journal, other_release(tmp_path))
    events, _ = run_killed(journal)
    assert events == 2 + 1 + 2

    assert recovered(journal).feed_seq == events
    take_snapshot(journal)
    assert recovered(journal).feed_seq == events
    with contextlib.closing(Reader(journal)) as reader:
        assert list(problems(reader)) == []


@pytest.mark.slow
def test_a_journal_without_the_code_of_its_release_is_refused_if_events_differ(
    tmp_path: Path, journal: Path
) -> None:
    _, release = run_killed(journal, other_release(tmp_path))
    (journal.parent / releases.FOLDER / f"{release}.zip").unlink()

    with pytest.raises(JournalError) as refused:
        recovered(journal)

    assert str(refused.value) == (
        f"{journal}: this release does not reproduce the inputs of release {release}: event 1 of "
        "input 1, controller.started of None, is stored as controller.stalled of None; start "
        f"release {release} once and stop it, which writes a snapshot; or restore a backup"
    )


@pytest.mark.slow
def test_a_journal_without_the_code_of_its_release_is_used_if_all_events_are_equal(
    tmp_path: Path, journal: Path
) -> None:
    code = tmp_path / "comment.zip"
    code.write_bytes(keep_own_code(tmp_path / "x").read_bytes())
    with zipfile.ZipFile(code, "a") as archive:
        archive.writestr("controlplane/more.py", "# a file that this release lacks\n")
    events, release = run_killed(journal, code)
    stored = journal.parent / releases.FOLDER / f"{release}.zip"
    stored.write_bytes(stored.read_bytes()[:-100])  # damaged

    assert recovered(journal).feed_seq == events


@pytest.mark.slow
def test_a_replay_that_ends_before_the_stored_events_is_refused(journal: Path) -> None:
    run_killed(journal)
    with contextlib.closing(open_for_reading(journal)) as database:
        database.execute("INSERT INTO feed SELECT seq + 1, body, crc FROM feed WHERE seq = 2")

    with pytest.raises(JournalError, match="the inputs lead to event 2, the last is 3"):
        recovered(journal)


@pytest.mark.slow
def test_a_snapshot_is_taken_although_another_release_has_to_begin_it(
    tmp_path: Path, journal: Path
) -> None:
    run_killed(journal, other_release(tmp_path))
    events, _ = run_killed(journal)

    assert take_snapshot(journal) == 4
    assert recovered(journal).feed_seq == events


@pytest.mark.slow
def test_a_recovery_waits_for_a_snapshot_that_another_process_takes(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, _ = run_killed(journal, other_release(tmp_path))
    lock = os.open(journal.with_suffix(".snapshot.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(releases.time, "sleep", lambda _: os.close(lock))

    assert recovered(journal).feed_seq == events


def test_damaged_code_is_replaced(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    intact = (own := keep_own_code(journal)).read_bytes()
    assert code_of(journal, own_release()) == own
    own.write_bytes(intact[:2000] + bytes(64) + intact[2064:])  # within the first files

    assert code_of(journal, own_release()) is None
    assert keep_own_code(journal).read_bytes() == intact


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
def test_no_damage_of_the_code_raises_an_error(tmp_path: Path, at: float, bit: int) -> None:
    journal = tmp_path / "journal.sqlite"
    own = keep_own_code(journal)
    intact = own.read_bytes()
    damaged = bytearray(intact)
    damaged[int(at * len(damaged))] ^= 1 << bit
    own.write_bytes(damaged)

    if code_of(journal, own_release()) is None:
        assert keep_own_code(journal).read_bytes() == intact
    own.write_bytes(intact)


def test_only_the_newest_releases_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / releases.FOLDER
    folder.mkdir()
    for number in range(KEPT + 1):
        (folder / f"{number}.zip").touch()

    own = keep_own_code(tmp_path / "journal.sqlite")
    assert len(list(folder.glob("*"))) == KEPT + 2  # until the journal needs the oldest no more
    delete_old_code(tmp_path / "journal.sqlite")

    assert own.name == f"{own_release()}.zip"
    assert own.is_file()
    assert len(list(folder.glob("*"))) == KEPT


@pytest.mark.slow
def test_a_backup_needs_no_other_release(tmp_path: Path, journal: Path) -> None:
    run_killed(journal, other_release(tmp_path))
    events, _ = run_killed(journal)
    recovered(journal)
    (tmp_path / "new").mkdir()

    back_up(journal, copy := tmp_path / "new" / "journal.sqlite")

    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
    with contextlib.closing(open_for_reading(copy)) as database:
        assert database.execute("SELECT max(input) FROM snapshots").fetchall() == [(4,)]
    assert recovered(copy).feed_seq == events
