"""Zygotes: their start, and their messages, which are not trusted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nodeagent.accounts import Account
from nodeagent.errors import StartError
from nodeagent.folders import FRAME, NodeFolders
from nodeagent.owned_files import Owner
from nodeagent.settings import Jobs
from nodeagent.zygotes import Peer, ZygoteConnection, ZygotePool, is_zygote, spawn
from schemas.codec import encode
from schemas.wire.worker import Forked, ForkFailed, Held
from tests.support.file_trees import let_pass
from tests.support.sizes import examples

THIS = Peer(os.getpid(), os.getuid())


def script(folder: Path, text: str) -> str:
    python = folder / "python"
    python.write_text(text)
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
def test_a_zygote_gets_listed_variables_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "TORCH_DISTRIBUTED_DEBUG", "WORLD_SIZE", "ONES_HOME", "AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG",
        "HF_HOME", "HF_TOKEN",
    ):  # fmt: skip
        monkeypatch.setenv(name, "DETAIL")
    python = script(tmp_path, "#!/bin/sh\nexec env\n")

    limits = Jobs(variables=("HF_HOME",))
    spawn(python, tmp_path / "socket", tmp_path / "said", limits=limits).wait()

    said = (tmp_path / "said").read_text().splitlines()
    kept = sorted(line for line in said if line.endswith("=DETAIL"))
    assert kept == ["HF_HOME=DETAIL", "NCCL_DEBUG=DETAIL"]
    assert "PYTHONHASHSEED=0" in said  # sets have the same order in all workers of a group


SAYS = """#!/bin/bash
ulimit -Hn
ulimit -Hu
id -u
id -G
umask
grep NoNewPrivs /proc/$$/status
echo $HOME $USER ${CREDENTIALS_DIRECTORY-none} ${XDG_RUNTIME_DIR-none}
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="runs it as another user")
def test_a_zygote_has_the_rights_and_limits_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_pass(tmp_path)
    python = script(tmp_path, SAYS)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    account = Account(Owner(61_003, 61_004), (61_005,), "ann", "/home/ann")

    said = tmp_path / "said"
    limits = Jobs(files=300, pids=70)
    spawn(python, tmp_path / "s", said, account, limits=limits).wait()

    assert said.read_text().splitlines() == [
        "300", "70", "61003", "61004 61005", "0077", "NoNewPrivs:\t1", "/home/ann ann none none",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_limit_of_open_files_applies_where_jobs_run_as_the_agent(tmp_path: Path) -> None:
    python = script(tmp_path, "#!/bin/bash\nulimit -Hn\n")

    spawn(python, tmp_path / "s", tmp_path / "said", limits=Jobs(files=300)).wait()

    assert (tmp_path / "said").read_text() == "300\n"


BOOTING = """
import os, pathlib, socket, struct, sys, time
from schemas.codec import encode
from schemas.wire.worker import ZygoteReady

path = pathlib.Path(sys.argv[-1])
while not path.with_name("import").exists():
    time.sleep(0.01)
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(path))
listener.listen()
said = encode(ZygoteReady(pid=os.getpid(), python="", torch=""))
while True:
    connection = listener.accept()[0]
    connection.sendall(struct.pack(">I", len(said)) + said)
"""


@pytest.mark.slow
async def test_an_agent_waits_for_a_zygote_that_the_last_agent_started(tmp_path: Path) -> None:
    folders = NodeFolders(tmp_path / "r", tmp_path / "w", tmp_path / "c")
    folders.make()
    program = tmp_path / "zygote.py"
    program.write_text(textwrap.dedent(BOOTING))
    python = script(tmp_path, f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    pool = ZygotePool(folders)
    booting = spawn(python, pool._socket(python), tmp_path / "said")
    while not zygotes(folders):
        await asyncio.sleep(0.01)

    waits = asyncio.create_task(pool.get(python))
    await asyncio.sleep(0)
    (folders.sockets / "import").touch()
    zygote = await asyncio.wait_for(waits, 60.0)
    ready = await zygote.ready
    pids = [process.pid for process in zygotes(folders)]
    pool.close()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    booting.wait()

    assert (pids, ready.pid) == ([booting.pid], booting.pid)


def zygotes(folders: NodeFolders) -> list[psutil.Process]:
    """Those of a node, by their command lines."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if is_zygote(process, f"{folders.sockets}/")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "known"), [
    (["python", "-P", "-m", "elastic.worker.zygote", "--socket", "/run/a/z.sock"], True),
    (["ones: zygote /run/a/z.sock", "", ""], True),
    (["ones: zygote /run/b/z.sock"], False),
    (["ones: zygote /mnt/run/a/z.sock"], False),
    (["ones: alice/a-1 rank 0"], False),
    (["bash", "-c", "sleep 5; : elastic.worker.zygote logs to /run/a/z.log"], False),
    (["tail", "-f", "/run/a/z.log"], False),
    (None, False),
])  # fmt: skip
def test_a_zygote_is_recognised_by_command_line_or_title(
    command: list[str] | None, *, known: bool
) -> None:
    assert is_zygote(Mock(info={"cmdline": command}), "/run/a/") is known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "blames_the_node"), [("kill -9 $$", True), ("kill -15 $$", True), ("exit 1", False)]
)
async def test_a_zygote_that_is_killed_during_its_start_is_a_fault_of_the_node(
    tmp_path: Path, end: str, *, blames_the_node: bool
) -> None:
    folders = NodeFolders(tmp_path / "r", tmp_path / "w", tmp_path / "c")
    folders.make()
    python = script(tmp_path, f"#!/bin/sh\n{end}\n")

    with pytest.raises(StartError) as refused:
        await ZygotePool(folders).get(python)

    assert refused.value.node_fault is blames_the_node


@pytest.mark.parametrize("frame", [
    b"\x00\x00\x00\x01\xc1",
    b"\xff\xff\xff\xff" + bytes(100),
], ids=["no message", "a message of four gibibytes"])  # fmt: skip
async def test_an_invalid_message_ends_the_connection_to_a_zygote(frame: bytes) -> None:
    reader, writer = asyncio.StreamReader(), Mock(drain=AsyncMock())
    zygote = ZygoteConnection(reader, writer, THIS)
    asked = asyncio.create_task(zygote.fork(Path("worker")))
    await asyncio.sleep(0)

    reader.feed_data(frame)

    with pytest.raises(StartError, match="its zygote does not follow the protocol") as refused:
        await asked
    assert not refused.value.node_fault
    assert not zygote.alive


async def test_an_exited_zygote_is_not_waited_for() -> None:
    reader = asyncio.StreamReader()
    zygote = ZygoteConnection(reader, Mock(drain=AsyncMock()), THIS)
    reader.feed_eof()
    await zygote._task

    with pytest.raises(StartError, match="the zygote did not fork; it has exited"):
        await asyncio.wait_for(zygote.fork(Path("worker")), 60.0)


# --- hostile messages


LIMIT_S = 60.0
BUSY = ForkFailed(folder="honest", error="busy")


def framed(data: bytes) -> bytes:
    return FRAME.pack(len(data)) + data


async def refusal(said: list[bytes], folder: str) -> str:
    """Request a fork from a zygote that sends these bytes over a real socket; return the error."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(FRAME.size)
        for piece in said:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.close()

    with tempfile.TemporaryDirectory(prefix="ones-") as where:
        server = await asyncio.start_unix_server(speak, f"{where}/z")
        async with server:
            reader, writer = await asyncio.open_unix_connection(f"{where}/z")
            zygote = ZygoteConnection(reader, writer, THIS)
            try:
                await asyncio.wait_for(zygote.fork(Path(folder)), LIMIT_S)
            except StartError as error:
                return error.message
            else:
                return ""
            finally:
                await asyncio.wait_for(asyncio.shield(zygote._task), LIMIT_S)
                writer.close()


anything = st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(framed))


@given(st.lists(anything, max_size=6))
@example([b"\xff\xff\xff\xff", bytes(1000)])
@example([framed(encode(Forked(folder="hostile", pid=1, started_ticks=1)))])
@example([framed(encode(Held(folder="hostile", pid=1)))])
@example([framed(encode(BUSY))[:5], framed(encode(BUSY))[5:]])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_messages_end_a_fork_and_affect_no_other(said: list[bytes]) -> None:
    async def both() -> list[str]:
        return await asyncio.gather(
            refusal(said, "hostile"), refusal([framed(encode(BUSY))], "honest")
        )

    hostile, honest = asyncio.run(both())

    assert (hostile != "", honest) == (True, "busy")
