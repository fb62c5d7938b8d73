"""A pid file has one owner, and says who that is, until it ends in whatever way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.file_lock import pid_of, take_pid_file

OWNER = """
import sys
from pathlib import Path
from schemas.file_lock import take_pid_file
take_pid_file(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "agent-1.pid"


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_a_pid_file_names_its_owner_and_refuses_another(
    path: Path, owner: subprocess.Popen[str]
) -> None:
    assert (pid_of(path), path.read_text()) == (owner.pid, f"{owner.pid}\n")

    with pytest.raises(SettingsError) as refused:
        take_pid_file(path)

    assert str(refused.value) == (
        f"pid_file: {path} is held by process {owner.pid}; "
        "stop that one, or give each daemon a pid file of its own"
    )


@pytest.mark.slow
def test_a_pid_file_whose_owner_was_killed_is_nobodys(
    path: Path, owner: subprocess.Popen[str]
) -> None:
    owner.kill()
    owner.wait()

    assert (pid_of(path), path.read_text()) == (None, f"{owner.pid}\n")


def test_a_pid_file_that_is_not_there_is_nobodys(path: Path) -> None:
    assert pid_of(path) is None
