"""Workers that a zygote starts, and starts that fail."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import msgspec
import pytest
import torch

from elastic.collectives.process_group import ProcessGroup
from elastic.group import membership
from elastic.worker import zygote as zygote_module
from nodeagent.errors import NodeStartError
from nodeagent.folders import NodeFolders, WorkerFolder
from nodeagent.zygotes import ZygoteConnection, peer_of
from schemas.host import fork_server
from schemas.ids import WorkerId
from schemas.wire.agent import ScriptFailed
from schemas.wire.worker import ExitStatus
from tests.support.builders import S0, S1, A, assignment, run
from tests.training.peers import FORKS

pytestmark = pytest.mark.slow
LIMIT_S: Final = 60.0


@dataclass
class Node:
    zygote: ZygoteConnection
    socket: Path  # of the zygote
    folder: WorkerFolder
    work: Path

    async def fork(self, enter: Callable[[int], None] | None = None) -> str:
        try:
            await asyncio.wait_for(self.zygote.fork(self.folder.path, enter), LIMIT_S)
        except NodeStartError as error:
            return error.message
        return ""

    async def ended(self) -> ExitStatus:
        async with asyncio.timeout(LIMIT_S):
            while (status := self.folder.exit()) is None or not status.cpu_s:
                await asyncio.sleep(0.005)
        return status


def serve(path: Path, full: str) -> None:
    sys.argv = ["zygote", "--socket", str(path)]
    if full:
        zygote_module.write_message = fork_server.write_message = disk_without_room(full)
    zygote_module.main()


def disk_without_room(name: str) -> Callable[[Path, Any], None]:
    write = fork_server.write_message

    def written(path: Path, message: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, message)

    return written


async def connected(path: Path) -> ZygoteConnection:
    reader, writer = await asyncio.open_unix_connection(path)
    return ZygoteConnection(reader, writer, peer_of(writer.get_extra_info("socket")))


@contextlib.asynccontextmanager
async def node(
    home: Path, script: str, *, full: str = "", env: Mapping[str, str] | None = None
) -> AsyncIterator[Node]:
    """Start a zygote; `full` is the file for which its disk has no room."""
    folders = NodeFolders(home / "r", home / "w", home / "c")
    folders.make()
    work = folders.job(A)
    work.mkdir()
    given = assignment(run(A))
    spec = msgspec.structs.replace(given.spec, record_samples=True, env=dict(env or {}))
    given = msgspec.structs.replace(
        given, workdir=str(work), spec=spec, user="alice", env=dict(env or {})
    )
    (work / given.spec.script).write_text(script)
    folder = folders.worker(WorkerId(f"{A}.v1.r0"))
    folder.write_assignment(given)
    path = folders.sockets / "zygote.sock"
    process = FORKS.Process(target=serve, args=(path, full))
    process.start()
    async with asyncio.timeout(LIMIT_S):
        while not path.exists():
            await asyncio.sleep(0.005)
    zygote = await connected(path)
    here = Node(zygote, path, folder, work)
    try:
        yield here
    finally:
        here.zygote.close()
        process.kill()
        process.join()


async def test_a_full_disk_at_the_start_is_the_nodes_fault(tmp_path: Path) -> None:
    async with node(tmp_path, "print('began')", full="process") as here:
        said = await here.fork()

    mark = here.folder.path / "process"
    assert said == f"cannot start a worker: {mark}: No space left on device"
    assert here.folder.exit() is None
    assert (here.folder.path / "log").read_text() == ""


@pytest.mark.parametrize(("lost", "why"), [
    ("log", "Is a directory"),
    ("reports", "Is a directory"),
    *((lost, "No such file or directory") for lost in ("samples", "assignment", "")),
])  # fmt: skip
async def test_a_failed_start_is_the_nodes_fault(tmp_path: Path, lost: str, why: str) -> None:
    async with node(tmp_path, "print('began')") as here:
        path = here.folder.path / lost if lost else here.work
        if lost in {"log", "reports"}:
            path.mkdir()
        elif lost == "samples":
            path.symlink_to(tmp_path / "gone" / "samples")
        else:
            path.rename(tmp_path / "elsewhere")

        assert await here.fork() == f"cannot start a worker: {path}: {why}"
        assert here.folder.exit() is None


async def test_a_zygote_survives_a_failed_start(tmp_path: Path) -> None:
    async with node(tmp_path, "raise SystemExit(3)") as here:
        here.work.rename(tmp_path / "elsewhere")
        first = await here.fork()
        (tmp_path / "elsewhere").rename(here.work)

        assert (bool(first), await here.fork(), (await here.ended()).code) == (True, "", 3)


async def test_a_zygote_recreates_its_socket(tmp_path: Path) -> None:
    async with node(tmp_path, "raise SystemExit(3)") as here:
        here.zygote.close()
        here.socket.unlink()
        async with asyncio.timeout(LIMIT_S):
            while not here.socket.exists():
                await asyncio.sleep(0.005)
        here.zygote = await connected(here.socket)

        assert (await here.fork(), (await here.ended()).code) == ("", 3)


async def test_a_zygote_without_an_agent_ends_when_its_folder_is_deleted(tmp_path: Path) -> None:
    async with node(tmp_path, "") as here:
        pidfd = os.pidfd_open(here.zygote._peer.pid)
        here.zygote.close()
        shutil.rmtree(here.socket.parent)

        async with asyncio.timeout(LIMIT_S):
            while not select.select([pidfd], [], [], 0)[0]:
                await asyncio.sleep(0.005)


async def test_a_zygote_does_not_replace_another_file(tmp_path: Path) -> None:
    async with node(tmp_path, "raise SystemExit(3)") as here:
        other = here.socket.with_suffix(".other")
        other.touch()
        other.rename(here.socket)

        assert await here.fork() == ""
        await here.ended()
        assert here.socket.is_file()


RAISED: Final = "from elastic.training_errors import {0}\nraise {0}('no', 'do that')"


@pytest.mark.parametrize(("script", "error", "refused"), [
    ("import os; raise OSError(28, os.strerror(28), 'model.pt')", "OSError: [Errno 28] No space left on device: 'model.pt'", False),
    (RAISED.format("UsageError"), "UsageError: no; do that", True),
    (RAISED.format("ElasticError"), "ElasticError: no; do that", False),
])  # fmt: skip
async def test_an_error_of_the_script_is_reported(
    tmp_path: Path, script: str, error: str, *, refused: bool
) -> None:
    async with node(tmp_path, script) as here:
        assert (await here.fork(), (await here.ended()).code) == ("", 1)

    told = [report for report in here.folder.reports(0)[0] if isinstance(report, ScriptFailed)]
    assert [(report.error, report.refused) for report in told] == [(error, refused)]


HASH: Final = int(  # of "abc" with the seed 7
    subprocess.run(
        [sys.executable, "-c", "print(hash('abc'))"],
        env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    ).stdout
)  # fmt: skip
STARTUP: Final = """
import faulthandler, os, sys, time, mylib, torch
from torch._logging._internal import log_state
print([
    mylib.NAME, hash("abc"), time.tzname[1], "error::ResourceWarning" in sys.warnoptions,
    faulthandler.is_enabled(), sys.flags.optimize, sys.stdout.encoding, bool(log_state.log_qname_to_level),
    os.environ["HF_HOME"], torch.get_num_threads(), __name__,
])
raise SystemExit(3)
"""


async def test_variables_that_act_when_python_starts_act_in_workers(tmp_path: Path) -> None:
    env = {
        "PYTHONPATH": "src", "PYTHONHASHSEED": "7", "TZ": "America/New_York", "PYTHONFAULTHANDLER": "1",
        "PYTHONWARNINGS": "error::ResourceWarning", "PYTHONOPTIMIZE": "1", "PYTHONIOENCODING": "ascii",
        "TORCH_LOGS": "+dynamo", "HF_HOME": "/models", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    async with node(tmp_path, STARTUP, env=env) as here:
        (here.work / "src").mkdir()
        (here.work / "src" / "mylib.py").write_text("NAME = 'mylib'")
        said, status = await here.fork(), await here.ended()
        mark = here.folder.mark()

    found = ["mylib", HASH, "EDT", True, True, 1, "ascii", True, "/models", 1, "__main__"]
    assert (said, status.code, mark is not None) == ("", 3, True)
    assert (here.folder.path / "log").read_text().splitlines()[0] == f"{found}"


LATER: Final = {
    "HF_HOME": "/models", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_HOME": "/models",
}  # fmt: skip


async def test_other_variables_cost_no_new_interpreter(tmp_path: Path) -> None:
    script = "import sys; print('elastic.worker.zygote' in sys.orig_argv)"
    async with node(tmp_path, script, env=LATER) as here:
        assert (await here.fork(), (await here.ended()).code) == ("", 0)

    assert (here.folder.path / "log").read_text() == "False\n"


async def test_a_missing_script_is_the_jobs_fault(tmp_path: Path) -> None:
    async with node(tmp_path, "") as here:
        for path in here.work.iterdir():
            path.unlink()

        assert (await here.fork(), (await here.ended()).code) == ("", 2)


async def test_a_worker_starts_after_its_placement(tmp_path: Path) -> None:
    entered: list[tuple[int, bool]] = []
    async with node(tmp_path, "print('began')") as here:
        said = await here.fork(
            lambda pid: entered.append((pid, (here.folder.path / "process").exists()))
        )
        mark = here.folder.mark()
        code = (await here.ended()).code

    assert (said, entered, code) == ("", [(mark.pid, False)], 0)


def no_group(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cgroup.procs")


async def test_a_worker_without_placement_does_not_start(tmp_path: Path) -> None:
    async with node(tmp_path, "print('began')") as here:
        said = await here.fork(no_group)

    assert said == (
        "cannot start a worker: its control group: [Errno 28] No space left on device: "
        "'cgroup.procs'"
    )
    assert (here.folder.mark(), here.folder.exit()) == (None, None)


async def test_a_held_worker_ends_with_its_agent(tmp_path: Path) -> None:
    held: list[int] = []
    async with node(tmp_path, "print('began')") as here:
        asked = asyncio.create_task(here.fork(held.append))
        here.zygote._let_go = lambda _, message: asyncio.sleep(held.append(message.pid) or 0)  # type: ignore[assignment, func-returns-value]
        async with asyncio.timeout(LIMIT_S):
            while not held:
                await asyncio.sleep(0.005)
            pidfd = os.pidfd_open(held[0])
            here.zygote.close()
            await asyncio.to_thread(select.select, [pidfd], [], [])
        os.close(pidfd)

    asked.cancel()
    assert (here.folder.mark(), here.folder.exit()) == (None, None)


TITLES: Final = """
import json, os, pathlib
shown = [pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in (os.getpid(), os.getppid())]
pathlib.Path("titles").write_text(json.dumps([text.rstrip(chr(0)) for text in shown]))
"""


async def test_processes_have_titles(tmp_path: Path) -> None:
    async with node(tmp_path, TITLES) as here:
        assert await here.fork() == ""
        await here.ended()

        titles = json.loads((here.work / "titles").read_text())
        assert titles == [f"ones: alice/{A} rank 0", f"ones: zygote {here.socket}"]


@pytest.mark.parametrize(("title", "after"), [
    (f"ones: alice/{A} rank 2", f"ones: alice/{A} rank 0"),
    ("python train.py rank 2", "python train.py rank 2"),
    ("ones: zygote /run/z.sock", "ones: zygote /run/z.sock"),
])  # fmt: skip
def test_a_workers_title_follows_its_rank(
    monkeypatch: pytest.MonkeyPatch, title: str, after: str
) -> None:
    titles = [title]
    monkeypatch.setattr(membership, "getproctitle", lambda: titles[-1])
    monkeypatch.setattr(membership, "setproctitle", titles.append)
    delta = run(A, on={S0: 32, S1: 32})
    member = membership.Membership.begin(assignment(delta, rank=1), torch.device("cpu"))
    group = ProcessGroup(2, 0, 1, torch.device("cpu"))

    member.enter(Mock(group=delta.group), group)
    member.enter(Mock(group=delta.group), group)

    assert titles == ([title] if after == title else [title, after])
