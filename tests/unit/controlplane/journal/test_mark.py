"""A journal that lost acknowledged inputs is refused, and says which."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from controlplane.cli.admin import admin
from controlplane.cli.output import Exit
from controlplane.core.inputs import ControllerStarted
from controlplane.journal.backup import accept_loss, back_up, restore
from controlplane.journal.database import Entry, JournalError
from controlplane.journal.mark import SLOT_BYTES, losses, mark_path, read_mark
from controlplane.journal.writer import Writer
from schemas.ids import Seconds, Term
from tests.unit.controlplane.journal.test_journal import Durable, entry, numbers

EARLY: Final = 20  # inputs of the older copy
LAST: Final = 40  # inputs of the journal


def copied(path: Path, to: Path, *suffixes: str) -> None:
    to.mkdir(exist_ok=True)
    for suffix in suffixes or ("", "-wal"):
        shutil.copy(path.with_name(path.name + suffix), to / (path.name + suffix))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a controller that was killed, and an older copy of them in `early`."""
    home = tmp_path_factory.mktemp("killed")
    path, durable = home / "live" / "journal.sqlite", Durable()
    path.parent.mkdir()
    writer = Writer(path, durable)
    for number in range(1, LAST + 1):
        writer.append(entry(number))
        durable.wait_for(number)  # a commit for each
        if number == EARLY:
            copied(path, home / "early")
    copied(path, home / "late")
    shutil.copy(mark_path(path), home / "late")
    writer.close()
    return home


@pytest.fixture
def path(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed / "late", tmp_path / "state")
    return tmp_path / "state" / "journal.sqlite"


def wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))


def cut_the_log(path: Path) -> None:
    os.truncate(wal(path), wal(path).stat().st_size - 1000)


def damage_the_middle_of_the_log(path: Path) -> None:
    flip(wal(path), wal(path).stat().st_size // 2)


def remove_the_log(path: Path) -> None:
    wal(path).unlink()


def empty_the_file(path: Path) -> None:
    os.truncate(path, 0)


def remove_the_file(path: Path) -> None:
    path.unlink()


def remove_all_but_output(path: Path) -> None:
    for file in (path, wal(path), mark_path(path)):
        file.unlink()
    (path.parent / "logs" / "a-1.stdout").mkdir(parents=True)


def damage_the_mark(path: Path) -> None:
    flip(mark_path(path), 3)
    flip(mark_path(path), SLOT_BYTES + 3)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut_the_log, "inputs 40 to 40 were acknowledged and are missing"),
        (damage_the_middle_of_the_log, "of journal.sqlite-wal is damaged, "),
        (remove_the_log, "were acknowledged and are missing"),
        (empty_the_file, "is missing or empty, inputs 1 to 40 were acknowledged"),
        (remove_the_file, "is missing or empty, inputs 1 to 40 were acknowledged"),
        (remove_all_but_output, "logs has files of jobs"),
        (damage_the_mark, "journal.mark is damaged"),
    ],
)
def test_a_damaged_journal_is_refused_and_left_as_it_is(
    path: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(path)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}

    with pytest.raises(JournalError) as raised:
        Writer(path, lambda _: None)

    assert named in str(raised.value)
    assert "`ones admin accept-loss`" in str(raised.value)
    after = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    del after["journal.lock"]
    new = {name for name in after.keys() - before.keys() if not name.endswith("-shm")}
    assert {name: after[name] for name in before} == before
    assert {name for name in new if after[name]} == set()


def test_an_older_copy_of_the_files_is_refused(killed: Path, path: Path) -> None:
    copied(killed / "early" / path.name, path.parent)

    with pytest.raises(JournalError, match=f"inputs {EARLY + 1} to {LAST} were acknowledged"):
        Writer(path, lambda _: None)


def test_a_killed_controller_lost_nothing(path: Path) -> None:
    assert list(losses(path)) == []
    Writer(path, lambda _: None).close()
    assert numbers(path) == list(range(1, LAST + 1))


def test_a_torn_mark_is_read_from_its_other_half(path: Path) -> None:
    whole = read_mark(path)
    newest = int.from_bytes(mark_path(path).read_bytes()[8:16], "little") == LAST
    flip(mark_path(path), 3 if newest else SLOT_BYTES + 3)

    assert whole is not None
    assert read_mark(path) == whole._replace(input=LAST - 1, crc=read_mark(path).crc)  # type: ignore[union-attr]
    assert list(losses(path)) == []


def test_what_is_left_is_used_after_an_admin_accepts_the_loss(path: Path) -> None:
    remove_the_log(path)
    left = numbers(path)
    copied(path, path.parent.parent / "kept", "")

    lost, kept = accept_loss(path)

    assert lost == [f"inputs {len(left) + 1} to {LAST} were acknowledged and are missing"]
    assert kept is not None
    Writer(path, lambda _: None).close()
    assert numbers(path) == left


def test_a_log_without_its_file_is_not_applied_to_a_new_one(path: Path) -> None:
    path.unlink()

    _, kept = accept_loss(path)

    assert kept is not None
    assert wal(kept).exists()
    Writer(path, lambda _: None).close()
    assert numbers(path) == []


def test_numbers_of_jobs_continue_after_the_loss(path: Path) -> None:
    writer = Writer(path, lambda _: None)
    start = ControllerStarted(term=Term(1), release="1")
    writer.append(Entry(at=Seconds(50.0), input=start, jobs=57))
    writer.close()
    former = read_mark(path)
    path.unlink()

    accept_loss(path)

    writer = Writer(path, lambda _: None)
    assert former is not None
    assert (writer.jobs_floor, former.jobs) == (57, 57)
    assert writer.journal_id != former.journal
    writer.close()


def test_a_copy_on_another_host_skips_numbers(path: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.sqlite", tmp_path / "other" / "journal.sqlite"
    other.parent.mkdir()
    back_up(path, copy)

    restore(copy, other)

    writer = Writer(other, lambda _: None)
    assert writer.jobs_floor == LAST + 1000  # each input submitted a job
    writer.close()


def test_check_names_lost_inputs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_the_log(path)
    left = len(numbers(path))

    code: Any = admin(["check", "--of", str(path), "-o", "json"], result_action="return_value")

    (lost,) = json.loads(capsys.readouterr().out)["problems"]
    assert lost == f"inputs {left + 1} to {LAST} were acknowledged and are missing"
    assert code == Exit.JOB_FAILED
