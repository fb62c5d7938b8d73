"""A run folder and a work folder have one agent, until it ends in whatever way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.folders import FolderLocks, NodeFolders
from schemas.errors import SettingsError

HOLDER = """
import sys
from pathlib import Path
from nodeagent.folders import FolderLocks
from nodeagent.folders import NodeFolders
base = Path(sys.argv[1])
held = FolderLocks(NodeFolders(base / "run", base / "work", base / "shared"), "n1")
print("held", flush=True)
sys.stdin.read()
"""


def folders(base: Path, run: str = "run", work: str = "work") -> NodeFolders:
    made = NodeFolders(base / run, base / work, base / "shared")
    made.make()
    return made


@pytest.mark.parametrize(
    ("setting", "run", "work"),
    [("run", "run", "other"), ("work", "other", "work"), ("run", "run", "work")],
)
def test_a_second_agent_is_refused_and_told_whose_folder_it_is(
    tmp_path: Path, setting: str, run: str, work: str
) -> None:
    first = FolderLocks(folders(tmp_path), "n1")

    with pytest.raises(SettingsError) as refused:
        FolderLocks(folders(tmp_path, run, work), "n2")

    owner = f"(node n1, pid {os.getpid()})"
    assert refused.value.field == setting
    assert str(refused.value) == (
        f"{setting} {tmp_path}/{setting} is in use by another agent {owner}; "
        f"stop that agent, or give each agent a {setting} of its own"
    )
    first.close()


def test_an_agent_that_was_refused_holds_nothing(tmp_path: Path) -> None:
    first = FolderLocks(folders(tmp_path, work="taken"), "n1")
    with pytest.raises(SettingsError, match="taken is in use"):
        FolderLocks(folders(tmp_path, run="other", work="taken"), "n2")

    third = FolderLocks(folders(tmp_path, run="other"), "n3")

    for locks in (first, third):
        locks.close()


def test_agents_with_folders_of_their_own_share_checkpoints(tmp_path: Path) -> None:
    for locks in [
        FolderLocks(folders(tmp_path, f"run-{node}", f"work-{node}"), node) for node in ("1", "2")
    ]:
        locks.close()


@pytest.mark.slow
def test_the_next_agent_begins_where_one_was_stopped_whatever_that_one_started(
    tmp_path: Path,
) -> None:
    first = FolderLocks(folders(tmp_path), "n1")
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first.close()

    FolderLocks(folders(tmp_path), "n1").close()

    started.kill()
    started.communicate()


@pytest.mark.slow
def test_the_next_agent_begins_where_one_was_killed(tmp_path: Path) -> None:
    folders(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SettingsError, match=re.escape(f"(node n1, pid {holder.pid})")):
            FolderLocks(folders(tmp_path), "n1")
        holder.kill()

    FolderLocks(folders(tmp_path), "n1").close()


def test_a_folder_that_takes_no_lock_keeps_no_agent_from_saying_that_it_is_ill(
    tmp_path: Path,
) -> None:
    there = folders(tmp_path)
    (there.work / ".agent.lock").mkdir()

    FolderLocks(there, "n1").close()
