"""What a job with a uid of its own leaves outside its folders, and processes that resist."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import pytest

from nodeagent import ended_jobs
from nodeagent.ended_jobs import DiskLimits
from nodeagent.folders import NodeFolders
from nodeagent.owned_files import SHARED_OBJECTS, remove_shared
from nodeagent.process_identity import end_all_of
from schemas.ids import JobId
from tests.support.file_trees import let_pass

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users"),
]
UID, OTHER = 1_900_000_001, 1_900_000_002
LIMIT_S = 20.0


def as_user(uid: int, code: str, *words: str, held: int | None = None) -> subprocess.Popen[bytes]:
    """Start a program as a user; it inherits the descriptor `held`."""
    return subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", code, *words], user=uid, group=uid, extra_groups=[],
        pass_fds=() if held is None else (held,),
    )  # fmt: skip


LEAVE = """
import ctypes, os, sys
place = sys.argv[1]
os.makedirs(f"{place}/left/deep/" + "x/" * 200)
open(f"{place}/left/deep/file", "w").write("x")
os.chmod(f"{place}/left/deep", 0o500)
os.chmod(f"{place}/left", 0o500)
os.symlink("/etc/passwd", f"{place}/link")
libc = ctypes.CDLL(None)
libc.shmget(0, 4096, 0o1600); libc.semget(0, 1, 0o1600); libc.msgget(0, 0o1600)
"""


def objects_of(uid: int) -> list[str]:
    return [
        kind
        for kind in SHARED_OBJECTS
        for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
        if str(uid) in row.split()
    ]


def test_files_and_objects_of_a_user_are_removed_and_no_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    let_pass(tmp_path)
    for uid in (UID, OTHER):
        (shared / str(uid)).mkdir()
        os.chown(shared / str(uid), uid, uid)
        assert as_user(uid, LEAVE, str(shared / str(uid))).wait(LIMIT_S) == 0

    remove_shared(UID, [shared, tmp_path / "missing"])

    left = [path.name for path in shared.iterdir()], objects_of(UID), objects_of(OTHER)
    remove_shared(OTHER, [shared])
    assert left == ([str(OTHER)], [], ["shm", "sem", "msg"])
    assert (list(shared.iterdir()), objects_of(OTHER)) == ([], [])
    assert Path("/etc/passwd").exists()


DEAD_LEADER = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of the first thread only
"""
CHAIN = """
import os, time
until = time.time() + 60
while time.time() < until:
    if os.fork():
        os._exit(0)
"""


STOPPER = """
import os, signal
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "code",
    [DEAD_LEADER, CHAIN, STOPPER],
    ids=["dead first thread", "chain of forks", "stops all others"],
)
def test_no_process_of_a_user_survives(code: str) -> None:
    reader, writer = os.pipe()  # held open by each of the processes
    child = as_user(UID, f"import os\nos.write({writer}, b'!')\n{code}", held=writer)
    os.close(writer)
    assert os.read(reader, 1) == b"!"

    end_all_of(UID)

    ended, _, _ = select.select([reader], [], [], LIMIT_S)
    assert (ended, os.read(reader, 1)) == ([reader], b"")
    os.close(reader)
    child.wait(LIMIT_S)


def test_output_of_zygotes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_jobs, "MAX_ZYGOTE_OUTPUT", 1 << 20)
    folders = NodeFolders(tmp_path / "run", tmp_path / "work", tmp_path / "checkpoints")
    folders.make()
    folders.zygotes.mkdir()
    folders.job(JobId("a-1")).mkdir()
    os.chown(folders.job(JobId("a-1")), UID, UID)
    limits = DiskLimits(folders, lambda: 0, list, lambda *_: None)
    found: list[int] = []
    for name, size in ((f"{UID}-z.log", 1 << 20), (f"{OTHER}-z.log", 2 << 20), (f"{UID}-y.log", 1)):
        (folders.zygotes / name).write_bytes(bytes(size))
        found.append(limits.exceeded(JobId("a-1")))

    assert found == [0, 0, 1 << 20]
