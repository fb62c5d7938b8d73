"""A copy is whole, goes back where nobody is, and begins a term that no node has heard of."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from controlplane.cli.admin import admin
from controlplane.cli.output import Exit
from controlplane.core.inputs import CancelRequested
from controlplane.journal.backup import back_up, problems, restore
from controlplane.journal.database import JournalError, checksum
from controlplane.journal.reader import Reader
from controlplane.journal.replay import recover
from controlplane.journal.take_snapshot import take_snapshot
from controlplane.journal.writer import Writer
from controlplane.service.commit_loop import CommitLoop
from schemas.codec import encode
from tests.support.builders import A
from tests.support.recorded_history import of_jobs, snapshot_at, write

SEED: Final = 3
BOUND: Final = 1_600_000_000  # terms behind a restore are seconds since the epoch


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "journal.sqlite"
    write(path, of_jobs(SEED, 100).history)
    take_snapshot(path)
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return Path(shutil.copy(made, tmp_path / "state" / "journal.sqlite"))


def change(path: Path, statement: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(statement, values)


def found_in(path: Path) -> list[str]:
    with contextlib.closing(Reader(path)) as reader:
        return list(problems(reader))


def state_of(path: Path) -> Any:
    with contextlib.closing(Reader(path)) as reader:
        return recover(reader).reactor.state


def ones_admin(*words: str | Path) -> int:
    code: int = admin([str(word) for word in words], result_action="return_value")
    return code


# --- copies


def test_a_copy_is_taken_beside_the_writer_and_is_one_file(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    writer = Writer(path, lambda _: None)
    back_up(path, copy)
    writer.close()

    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.sqlite", "state"]
    assert state_of(copy) == state_of(path)
    assert found_in(copy) == []


def test_an_existing_copy_is_replaced_by_force_only(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    copy.write_text("something else")

    with pytest.raises(JournalError, match="already exists; name another file or use --force"):
        back_up(path, copy)
    assert copy.read_text() == "something else"

    back_up(path, copy, force=True)
    assert found_in(copy) == []


def test_damaged_inputs_are_neither_copied_nor_restored(path: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.sqlite", tmp_path / "other" / "journal.sqlite"
    change(path, "UPDATE inputs SET at = at + 1 WHERE id = 7")

    with pytest.raises(JournalError, match="input 7: wrong checksum"):
        back_up(path, copy)
    with pytest.raises(JournalError, match="input 7: wrong checksum"):
        restore(path, other)

    assert not copy.exists()
    assert not other.exists()


def test_damage_of_records_is_copied_and_new_damage_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, other = tmp_path / "copy.sqlite", tmp_path / "other" / "journal.sqlite"
    update = "UPDATE recent_records SET crc = crc + 1 WHERE at = (SELECT {} FROM recent_records)"
    change(path, update.format("min(at)"))
    (damage,) = found_in(path)

    back_up(path, copy)
    restore(copy, other)
    assert found_in(copy) == found_in(other) == [damage]

    copy_file = shutil.copyfile

    def copied_badly(source: Path, target: Path) -> None:
        copy_file(source, target)
        change(target, update.format("max(at)"))

    monkeypatch.setattr(shutil, "copyfile", copied_badly)
    with pytest.raises(JournalError, match="wrong checksum; the copy was not used"):
        restore(copy, other, force=True)
    assert found_in(other) == [damage]


def test_a_journal_with_a_history_is_replaced_by_force_only_and_kept(
    path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.sqlite"
    back_up(path, copy)
    change(path, "DELETE FROM snapshots")
    with pytest.raises(
        JournalError, match="already has inputs; use --force; the former journal is kept"
    ):
        restore(copy, path)

    kept = restore(copy, path, force=True)

    assert kept is not None
    with contextlib.closing(Reader(kept)) as reader:
        assert reader.snapshots() == ()
    with contextlib.closing(Reader(path)) as reader:
        assert len(reader.snapshots()) == 1


def test_a_journal_of_a_running_controller_is_not_replaced(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    back_up(path, copy)
    writer = Writer(path, lambda _: None)

    with pytest.raises(JournalError, match="is held by another process"):
        restore(copy, path, force=True)
    writer.close()


def test_the_term_after_a_restore_is_above_all_known_terms(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    back_up(path, copy)
    restore(copy, path, force=True)

    async def begin() -> list[int]:
        terms = []
        for _ in range(2):
            loop = CommitLoop(path, lambda _: None)
            terms.append(int(loop.begin("0")))
            loop.close()
        return terms

    first, second = asyncio.run(begin())
    assert first > BOUND
    assert second == first + 1


# --- checks


def test_a_replaced_input_is_found(path: Path) -> None:
    body = encode(CancelRequested(job=A, user="eve"))
    with contextlib.closing(Reader(path)) as reader:
        number, at, _ = next(
            row for row in reader.numbered_inputs() if type(row[2]).__name__ == "NodeReported"
        )
    crc = checksum(number, at, body)
    change(path, "UPDATE inputs SET body = ?, crc = ? WHERE id = ?", body, crc, number)

    found = found_in(path)

    assert found
    assert all("checksum" not in problem for problem in found)


def test_a_replaced_event_is_found(path: Path) -> None:
    with contextlib.closing(Reader(path)) as reader:
        (event,) = reader.feed(5, 1)
    body = encode(msgspec.structs.replace(event, event="job.invented"))
    change(path, "UPDATE feed SET body = ?, crc = ? WHERE seq = 5", body, checksum(5, 0.0, body))

    (problem,) = found_in(path)

    assert problem.startswith("event 5 of input ")
    assert problem.endswith(
        f", {event.event} of {event.job}, is stored as job.invented of {event.job}"
    )


def test_a_snapshot_of_another_state_is_found(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    write(other, of_jobs(SEED + 1, 100).history)
    take_snapshot(other)
    with contextlib.closing(sqlite3.connect(other)) as database:
        ((body,),) = database.execute("SELECT body FROM snapshot_parts").fetchall()
        ((size, crc),) = database.execute("SELECT bytes, crc FROM snapshots").fetchall()
    change(path, "UPDATE snapshot_parts SET body = ?", body)
    change(path, "UPDATE snapshots SET bytes = ?, crc = ?", size, crc)

    (problem,) = found_in(path)

    assert problem.endswith("differs from the state that its inputs lead to")


# --- on the command line


@pytest.mark.parametrize("named", ["folder", "file", "settings", "home"])
def test_the_journal_is_found_by_its_folder_its_file_the_settings_and_the_home(
    named: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "controller.toml"
    settings.write_text('state = "state"\n')
    words = {
        "folder": ["--of", path.parent],
        "file": ["--of", path],
        "settings": ["--of", settings],
        "home": ["--home", tmp_path],
    }[named]

    assert ones_admin("check", *words, "-o", "json") == Exit.OK

    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_a_check_prints_damage_and_exits_with_1(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(path, "UPDATE feed SET body = x'00' WHERE seq = 3")

    assert ones_admin("check", "--of", path) == Exit.JOB_FAILED

    assert "feed event 3: wrong checksum\n" in capsys.readouterr().out


def test_backup_and_restore_move_a_state_to_another_folder(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()

    assert restore(path, tmp_path / "other" / "journal.sqlite") is None
    assert state_of(tmp_path / "other" / "journal.sqlite") == state_of(path)
    assert ones_admin("backup", tmp_path / "copy", "--of", path) == Exit.OK
    assert ones_admin("restore", tmp_path / "copy", "--of", tmp_path / "elsewhere") == Exit.OK

    assert state_of(tmp_path / "elsewhere" / "journal.sqlite") == state_of(path)


def test_compact_deletes_old_rows_and_keeps_the_state(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.journal.retention.PIECE", 20)
    settings = tmp_path / "controller.toml"
    settings.write_text('state = "state"\n[journal]\nkeep_inputs_s = 0\nkeep_events_s = 0\n')
    before, size = state_of(path), path.stat().st_size
    change(path, "DELETE FROM snapshots")
    for last in (50, 100):
        snapshot_at(path, last)

    assert ones_admin("compact", "--of", settings) == Exit.OK

    with contextlib.closing(Reader(path)) as reader:
        assert reader.first_and_last()[0] == 101
        assert reader.first_event() > 1
    assert state_of(path) == before
    assert path.stat().st_size < size
    assert found_in(path) == []


def test_decode_prints_inputs_between_two_numbers_that_name_a_job(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(Reader(path)) as reader:
        job = next(iter(recover(reader, most=60).reactor.state.jobs))

    assert ones_admin("decode", "--of", path, "--from", "2", "--to", "60", "--job", job) == Exit.OK

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert all(2 <= line["input"] <= 60 and job in json.dumps(line) for line in lines)
    assert {"core.plan_proposed.1", "core.node_reported.1"} <= {line["type"] for line in lines}
