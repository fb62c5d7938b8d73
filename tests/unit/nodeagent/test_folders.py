"""Folders of a node and of its workers, and their locks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from nodeagent.__main__ import _end_workers, end_workers
from nodeagent.folders import FRAME, FolderLocks, NodeFolders, WorkerFolder
from nodeagent.process_identity import open_process, start_ticks
from schemas.codec import encode
from schemas.errors import SettingsError
from schemas.ids import JobId, WorkerId
from schemas.wire import Message
from schemas.wire.agent import ScriptReport
from schemas.wire.feed import LOG, SAMPLES
from schemas.wire.worker import ExitStatus, ProcessMark
from tests.support.builders import A, assignment, epoch_end, formed, job_spec, ready, run

REPORTS: list[ScriptReport] = [ready(A), formed(A), epoch_end(A, 1)]


def framed(message: Message) -> bytes:
    data = encode(message)
    return FRAME.pack(len(data)) + data


@pytest.fixture
def folder(tmp_path: Path) -> WorkerFolder:
    found = WorkerFolder(tmp_path / f"{A}.v1.r0")
    found.path.mkdir()
    return found


@pytest.fixture
def folders(tmp_path: Path) -> NodeFolders:
    made = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    made.make()
    return made


# --- files of one worker


def test_an_assignment_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = WorkerFolder(tmp_path / "workers" / f"{A}.v1.r0")
    folder.write_assignment(assignment(run(A)))

    assert folder.assignment() == assignment(run(A))
    assert [path.name for path in folder.path.iterdir()] == ["assignment"]
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.worker == f"{A}.v1.r0"


def test_a_process_and_its_exit_are_read_from_complete_files(folder: WorkerFolder) -> None:
    mark = ProcessMark(pid=100, started_ticks=7)
    status = ExitStatus(code=None, signal=9, at=1.0, max_rss_bytes=2, cpu_s=3.0)

    assert (folder.assignment(), folder.mark(), folder.exit()) == (None, None, None)
    assert folder.reports(0) == ([], 0)
    for name in ("assignment", "process", "exit"):
        (folder.path / name).write_bytes(encode(assignment(run(A)))[:-5])
    assert (folder.assignment(), folder.mark(), folder.exit()) == (None, None, None)
    (folder.path / "process").write_bytes(encode(mark))
    (folder.path / "exit").write_bytes(encode(status))
    assert (folder.mark(), folder.exit()) == (mark, status)
    assert [folder.stream(name).name for name in (LOG, SAMPLES)] == ["log", "samples"]


# --- reports


def test_reports_are_read_from_a_position(folder: WorkerFolder) -> None:
    path = folder.path / "reports"
    path.write_bytes(framed(REPORTS[0]) + framed(REPORTS[1]))
    first, position = folder.reports(0)
    with path.open("ab") as file:
        file.write(framed(REPORTS[2]))
    second, end = folder.reports(position)

    assert (first, second) == (REPORTS[:2], REPORTS[2:])
    assert (end, folder.reports(end)) == (path.stat().st_size, ([], end))


def test_an_incomplete_report_is_read_later(folder: WorkerFolder) -> None:
    whole = b"".join(framed(report) for report in REPORTS)
    path = folder.path / "reports"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found, position = folder.reports(0)

        assert found == REPORTS[: len(found)]
        assert whole[:position] == b"".join(framed(report) for report in found)
    assert found == REPORTS


def test_a_damaged_report_is_skipped(folder: WorkerFolder) -> None:
    damaged = FRAME.pack(3) + b"\xc1\xc1\xc1"
    (folder.path / "reports").write_bytes(damaged + framed(REPORTS[0]) + damaged)

    found, position = folder.reports(0)

    assert (found, position) == ([REPORTS[0]], (folder.path / "reports").stat().st_size)


# --- folders of a node


def test_folders_are_private_and_every_worker_has_its_own(folders: NodeFolders) -> None:
    for path in (folders.run, folders.run / "workers", folders.sockets, folders.work):
        assert path.stat().st_mode & 0o777 == 0o700
    folders.make()  # a second time harms nothing
    for name in ("b-2.v1.r0", "a-1.v1.r0"):
        folders.worker(WorkerId(name)).path.mkdir()

    assert [folder.worker for folder in folders.workers()] == ["a-1.v1.r0", "b-2.v1.r0"]
    assert folders.job(JobId("a-1")) == folders.work / "a-1"


def test_sockets_of_a_deep_folder_are_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    deep = [NodeFolders(Path("/x" * 40) / name, tmp_path, tmp_path) for name in "ab"]

    assert NodeFolders(Path("/run/ones"), tmp_path, tmp_path).socket == (
        "ipc:///run/ones/sockets/agent.sock"
    )
    assert {folders.sockets.parent for folders in deep} == {tmp_path}
    assert deep[0].sockets != deep[1].sockets
    assert deep[0].sockets == NodeFolders(deep[0].run, tmp_path, tmp_path).sockets


def test_sockets_outside_of_the_run_folder_are_deleted_with_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    deep = NodeFolders(tmp_path / ("x" * 80), tmp_path / "work", tmp_path / "checkpoints")
    short = NodeFolders(tmp_path / "r", tmp_path / "work", tmp_path / "checkpoints")
    for folders in (deep, short):
        folders.make()

        assert end_workers(folders, grace_s=0.0) == 0

    assert (deep.run.exists(), deep.sockets.exists(), short.sockets.exists()) == (True, False, True)


SAVES_ON_TERM = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").write("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow  # starts a program
def test_a_program_saves_its_work_although_nobody_has_reaped_its_dead_shell(
    folders: NodeFolders, tmp_path: Path
) -> None:
    folder, work = folders.worker(WorkerId(f"{A}.v1.r0")), tmp_path / "work.txt"
    command = ("sh", "-c", '"$@"; true', "sh", sys.executable, "-c", SAVES_ON_TERM, str(work))
    spec = job_spec(kind="command", command=command, script="", batch_size=0, slots=1)
    folder.write_assignment(structs.replace(assignment(run(A)), spec=spec))
    shell = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    with shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"ready\n"
        mark = ProcessMark(pid=shell.pid, started_ticks=start_ticks(shell.pid) or 0)
        (folder.path / "process").write_bytes(encode(mark))

        assert end_workers(folders, grace_s=10.0) == 1

    assert (work.read_text(), shell.returncode) == ("saved", -signal.SIGTERM)


def test_sockets_in_a_folder_of_another_user_are_refused(
    folders: NodeFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)

    with pytest.raises(
        SettingsError, match="belongs to another user; choose a shorter path for run"
    ):
        folders.make()


# --- processes


@pytest.mark.slow
def test_a_process_is_identified_by_pid_and_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        descriptor = open_process(child.pid, ticks)
        another = open_process(child.pid, ticks + 1)
        child.communicate(b"\n")

    assert descriptor is not None
    os.close(descriptor)
    assert another is None
    assert (start_ticks(child.pid), open_process(child.pid, ticks)) == (None, None)


def test_a_run_folder_keeps_its_id_until_it_is_replaced(folders: NodeFolders) -> None:
    first = folders.run_id()
    again = folders.run_id()
    shutil.rmtree(folders.run)
    folders.make()

    assert (again, len(first)) == (first, 12)
    assert folders.run_id() not in ("", first)
    (folders.run / "run_id").unlink()
    (folders.run / "run_id.new").mkdir()  # in the way, as a full disk is
    assert folders.run_id() == ""


# --- locks


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


def folders_in(base: Path, run: str = "run", work: str = "work") -> NodeFolders:
    made = NodeFolders(base / run, base / work, base / "shared")
    made.make()
    return made


@pytest.mark.parametrize(
    ("setting", "run", "work"),
    [("run", "run", "other"), ("work", "other", "work"), ("run", "run", "work")],
)
def test_a_second_agent_is_refused_with_the_owner_of_the_folder(
    tmp_path: Path, setting: str, run: str, work: str
) -> None:
    first = FolderLocks(folders_in(tmp_path), "n1")

    with pytest.raises(SettingsError) as refused:
        FolderLocks(folders_in(tmp_path, run, work), "n2")

    owner = f"(node n1, pid {os.getpid()})"
    assert refused.value.field == setting
    assert str(refused.value) == (
        f"{setting} {tmp_path}/{setting} is in use by another agent {owner}; "
        f"stop that agent, or give each agent a {setting} of its own"
    )
    first.close()


def test_agents_with_folders_of_their_own_share_checkpoints_and_a_refused_one_holds_no_lock(
    tmp_path: Path,
) -> None:
    first = FolderLocks(folders_in(tmp_path, work="taken"), "n1")
    with pytest.raises(SettingsError, match="taken is in use"):
        FolderLocks(folders_in(tmp_path, run="other", work="taken"), "n2")

    second = FolderLocks(folders_in(tmp_path, run="other"), "n3")

    for locks in (first, second):
        locks.close()


@pytest.mark.slow
def test_the_next_agent_takes_the_locks_of_one_that_stopped_or_was_killed(tmp_path: Path) -> None:
    first = FolderLocks(folders_in(tmp_path), "n1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        first.close()
        FolderLocks(folders_in(tmp_path), "n1").close()
        started.kill()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SettingsError, match=re.escape(f"(node n1, pid {holder.pid})")):
            FolderLocks(folders_in(tmp_path), "n1")
        holder.kill()

    FolderLocks(folders_in(tmp_path), "n1").close()


def test_workers_are_not_ended_beside_a_running_agent(tmp_path: Path) -> None:
    settings = tmp_path / "agent.toml"
    settings.write_text('node = "n1"\ncheckpoints = "shared"\n')
    locks = FolderLocks(folders_in(tmp_path), "n1")

    owner = re.escape(f"is in use by another agent (node n1, pid {os.getpid()}); stop that agent")
    with pytest.raises(SettingsError, match=owner):
        _end_workers(settings)
    locks.close()

    assert _end_workers(settings) == 0


def test_a_folder_that_cannot_be_locked_does_not_stop_the_agent(tmp_path: Path) -> None:
    there = folders_in(tmp_path)
    (there.work / ".agent.lock").mkdir()

    FolderLocks(there, "n1").close()
