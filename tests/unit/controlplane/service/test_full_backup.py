"""A backup of everything goes back into an empty folder, and never over existing files."""

from __future__ import annotations

import contextlib
import json
import tarfile
from pathlib import Path

import msgspec
import pytest

from controlplane.cli.admin import admin
from controlplane.cli.output import Exit
from controlplane.journal.database import JournalError
from controlplane.journal.reader import Reader
from controlplane.journal.releases import FOLDER, own_release
from controlplane.journal.replay import recover
from controlplane.service import full_backup
from controlplane.service.full_backup import back_up_all, restore_all
from schemas.errors import SettingsError
from schemas.ids import JobId
from schemas.transport.keys import write_keys
from tests.support.builders import cancelled, submission
from tests.support.controller import cluster_of
from tests.support.recorded_history import write

QUEUED, ENDED = "a" * 64, "b" * 64  # digests of working directories


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings of a controller with a queued job and an ended job."""
    home = tmp_path / "home"
    state = home / "state"
    (state / FOLDER).mkdir(parents=True)
    (state / "snapshots").mkdir()
    (home / "keys").mkdir()
    write_keys(home / "keys", "server")
    (home / "keys" / "authorised.toml").write_text("")
    (home / "client.toml").write_text('endpoint = "tcp://127.0.0.1:7702"\n')
    (home / "controller.toml").write_text('state = "state"\n')
    (state / "keys.json").write_text('{"keys": []}')
    (state / FOLDER / f"{own_release()}.zip").write_bytes(b"code")
    controller = cluster_of(n1=1)
    for name, digest in (("a", QUEUED), ("b", ENDED)):
        controller.take(msgspec.structs.replace(submission(name), snapshot=digest))
    controller.take(cancelled(JobId("b-2")))
    write(state / "journal.sqlite", controller.history)
    for digest in (QUEUED, ENDED):
        (state / "snapshots" / digest).write_text(digest)
    return home / "controller.toml"


def ones_admin(*words: str) -> None:
    assert admin(list(words), result_action="return_value") == Exit.OK


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("journal.")
    }


def test_a_backup_restores_everything_but_archives_of_ended_jobs(
    config: Path, tmp_path: Path
) -> None:
    file = back_up_all(config, tmp_path / "all.tar")
    before = files_below(config.parent)

    restored = restore_all(file, tmp_path / "new")

    del before[f"state/snapshots/{ENDED}"]
    assert restored == tmp_path / "new" / "controller.toml"
    assert files_below(tmp_path / "new") == before
    assert (tmp_path / "new" / "keys" / "server.key_secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "state").stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(Reader(tmp_path / "new" / "state" / "journal.sqlite")) as reader:
        state = recover(reader).reactor.state
    assert list(state.active) == ["a-1"]


def test_keys_and_state_elsewhere_return_to_where_the_settings_name_them(
    config: Path, tmp_path: Path
) -> None:
    key, state = tmp_path / "secret" / "key", tmp_path / "var"
    key.parent.mkdir()
    (config.parent / "keys" / "server.key_secret").rename(key)
    (config.parent / "state").rename(state)
    config.write_text(f'state = "{state}"\n[keys]\nserver = "{key}"\n')
    secret = key.read_bytes()
    file = back_up_all(config, tmp_path / "all.tar")
    with pytest.raises(SettingsError, match=r"journal\.sqlite already exists"):
        restore_all(file, tmp_path / "new")
    key.unlink()
    state.rename(tmp_path / "former")

    restore_all(file, tmp_path / "new")

    assert key.read_bytes() == secret
    assert (state / "journal.sqlite").is_file()


def test_named_files_and_linked_keys_are_part_of_the_backup(config: Path, tmp_path: Path) -> None:
    home, vault = config.parent, tmp_path / "vault"
    vault.mkdir()
    (home / "keys" / "server.key_secret").rename(vault / "server")
    (home / "keys" / "server.key_secret").symlink_to(vault / "server")
    (home / "keys" / "users").mkdir()
    (home / "keys" / "users" / "ann.key").write_text("ann's")
    (home / "chat.secret").write_text("chat's")
    (model := tmp_path / "model.npz").write_text("weights")
    config.write_text(
        f'state = "state"\n[policy]\nname = "drl"\noptions = {{model = "{model}"}}\n'
        '[[webhooks]]\nname = "chat"\nurl = "http://host/"\nkey = "chat.secret"\n'
    )
    file, new = back_up_all(config, tmp_path / "all.tar"), tmp_path / "new"
    secret = (vault / "server").read_bytes()
    model.unlink()

    restore_all(file, new)

    assert (new / "keys" / "server.key_secret").read_bytes() == secret
    assert not (new / "keys" / "server.key_secret").is_symlink()
    assert (new / "keys" / "users" / "ann.key").read_text() == "ann's"
    assert (new / "chat.secret").read_text() == "chat's"
    assert model.read_text() == "weights"


def test_a_failure_leaves_no_file_behind(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise JournalError("no room", "free space")

    folder = tmp_path / "backups"
    folder.mkdir()
    monkeypatch.setattr(full_backup, "_needed_archives", fail)
    with pytest.raises(JournalError):
        back_up_all(config, folder)
    monkeypatch.undo()
    file = back_up_all(config, tmp_path / "all.tar")
    monkeypatch.setattr(full_backup, "restore", fail)
    with pytest.raises(JournalError):
        restore_all(file, tmp_path / "new")
    monkeypatch.undo()

    assert list(folder.iterdir()) == []
    assert files_below(tmp_path / "new") == {}
    restore_all(file, tmp_path / "new")


def test_nothing_is_restored_over_a_file(config: Path, tmp_path: Path) -> None:
    config.with_name("client.toml").write_text("before")
    file = back_up_all(config, tmp_path / "all.tar")
    config.with_name("client.toml").write_text("after")
    before = files_below(config.parent)

    with pytest.raises(SettingsError, match=r"already exists; restore FILE\.tar into"):
        restore_all(file, config.parent)

    assert files_below(config.parent) == before


def test_a_folder_keeps_the_newest_backups(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    for day in range(3):
        (folder / f"ones-2020010{day}T000000Z.tar").touch()
    (folder / "ones-before-upgrade.tar").touch()
    (folder / "ones-20990101T000000Z.tar").touch()  # written before a clock was set back

    newest = back_up_all(config, folder, keep=2)

    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ("ones-20990101T000000Z.tar", newest.name, "ones-before-upgrade.tar")
    )
    with pytest.raises(SettingsError, match="already exists"):
        back_up_all(config, newest)


def test_a_key_that_cannot_be_read_fails_the_backup(config: Path, tmp_path: Path) -> None:
    (config.parent / "keys" / "server.key_secret").unlink()

    with pytest.raises(SettingsError, match="No such file"):
        back_up_all(config, tmp_path / "all.tar")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_the_command_line_writes_and_restores_such_a_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "all.tar", tmp_path / "new"

    ones_admin("backup", str(file), "--all", "--of", str(config), "-o", "json")
    assert json.loads(capsys.readouterr().out)["file"] == str(file)
    ones_admin("restore", str(file), "--home", str(new))

    assert (new / "controller.toml").read_bytes() == config.read_bytes()


def test_a_tar_file_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.tar"
    with tarfile.open(other, "w"):
        pass

    with pytest.raises(SettingsError, match="No such file"):
        restore_all(other, tmp_path / "new")
