"""Pid files have one owner, which they name."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.host.files import _LOCK, pid_of, take_pid_file

OWNER = """
import sys
from pathlib import Path
from schemas.host.files import take_pid_file
take_pid_file(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent-1.pid"


@pytest.mark.slow
def test_a_pid_file_belongs_to_its_owner_until_that_is_killed(path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert (pid_of(path), path.read_text()) == (owner.pid, f"{owner.pid}\n")
        with pytest.raises(SettingsError) as refused:
            take_pid_file(path)
        owner.kill()

    assert str(refused.value) == (
        f"pid_file: {path} is held by process {owner.pid}; "
        "stop that process, or give each daemon a pid file of its own"
    )
    assert (pid_of(path), path.read_text()) == (None, f"{owner.pid}\n")


def test_a_lock_of_an_open_file_has_an_unknown_owner(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with path.open("rb") as file:
        lock = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)

        assert pid_of(path) == 0
        with pytest.raises(SettingsError, match="is held by an unknown process; stop that process"):
            take_pid_file(path)


def test_a_readable_pid_file_becomes_private_and_a_link_is_refused(path: Path) -> None:
    assert pid_of(path) is None
    path.parent.mkdir()
    path.touch(mode=0o644)
    take_pid_file(path)
    assert path.stat().st_mode & 0o777 == 0o600

    link = path.with_name("link.pid")
    link.symlink_to(path.with_name("other"))
    with pytest.raises(OSError, match="symbolic links"):
        take_pid_file(link)
    assert {each.name for each in path.parent.iterdir()} == {path.name, link.name}
