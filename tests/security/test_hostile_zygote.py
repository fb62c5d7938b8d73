"""A job's owner chooses its interpreter, so a zygote may say anything about processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from nodeagent import cgroups, zygotes
from nodeagent.errors import StartError
from nodeagent.folders import FRAME
from nodeagent.process_identity import runs, signal_group, start_ticks
from nodeagent.zygotes import Peer, ZygoteConnection
from schemas.codec import FROM_ZYGOTE, PROCESS_MARK
from schemas.errors import MalformedMessageError
from schemas.host.logging import Audit

FOLDER = "digits-7.v1.r0"
THIS = os.getpid()
LIMIT_S = 60.0


def held(pid: int) -> dict[str, object]:
    return {"type": "zygote.held.1", "folder": FOLDER, "pid": pid}


def forked(pid: int) -> dict[str, object]:
    ticks = start_ticks(pid) or 0
    return {"type": "zygote.forked.1", "folder": FOLDER, "pid": pid, "started_ticks": ticks}


async def start_with(*said: dict[str, object]) -> tuple[StartError, list[int]]:
    """Start a worker on a zygote that sends these messages; return the error and moved processes."""
    moved: list[int] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for message in said:
            await reader.readexactly(FRAME.size)
            data = msgspec.msgpack.encode(message)
            writer.write(FRAME.pack(len(data)) + data)
        await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="ones-") as where:
        async with await asyncio.start_unix_server(speak, f"{where}/z") as server:
            reader, writer = await asyncio.open_unix_connection(f"{where}/z")
            zygote = ZygoteConnection(reader, writer, Peer(THIS, os.getuid()))
            with pytest.raises(StartError) as refused:
                await asyncio.wait_for(zygote.fork(Path(FOLDER), moved.append), LIMIT_S)
            zygote.close()
            await writer.wait_closed()
            server.close()
    return refused.value, moved


NOT_A_CHILD = "its zygote named process {}, which is not its child"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (held(0), "its zygote does not follow the protocol"),
        (held(-1), "its zygote does not follow the protocol"),
        (held(2**31), "its zygote does not follow the protocol"),
        ({**held(THIS), "folder": "other-1"}, "its zygote does not follow the protocol"),
        (held(THIS), NOT_A_CHILD.format(THIS)),
        (held(os.getppid()), NOT_A_CHILD.format(os.getppid())),
        (held(1), NOT_A_CHILD.format(1)),
        (held(2**31 - 1), NOT_A_CHILD.format(2**31 - 1)),
        (forked(THIS), f"its zygote named process {THIS}, which it may not start"),
        (forked(1), "its zygote named process 1, which it may not start"),
    ],
    ids=[
        "held 0",
        "held -1",
        "held 2**31",
        "held for a start that nobody asked for",
        "held itself",
        "held its parent",
        "held 1",
        "held nothing",
        "forked itself",
        "forked 1",
    ],
)
async def test_a_zygote_that_names_another_process_starts_and_moves_nothing(
    said: dict[str, object], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "_AUDIT", Audit())  # without the lines of other tests
    monkeypatch.setattr(zygotes, "LEADER_TIMEOUT_S", 0.0)
    with capture_logs() as logs:
        refused, moved = await start_with(said)

    assert (refused.message.startswith(error), refused.node_fault, moved) == (True, False, [])
    assert [(line["what"], line["peer"]) for line in logs if line["event"] == "audit"] == [
        ("message of a zygote", f"uid {os.getuid()}")
    ]


@pytest.mark.slow
def test_a_child_without_a_session_of_its_own_is_not_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygotes, "LEADER_TIMEOUT_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as child:
        refused, moved = asyncio.run(start_with(held(child.pid)))
        child.kill()

    said = f"its zygote named process {child.pid}, which leads no session"
    assert (refused.message, moved) == (said, [])


@pytest.mark.slow
def test_an_exited_process_that_nobody_waits_for_does_not_run() -> None:
    with subprocess.Popen(["true"]) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert (start_ticks(child.pid), runs(child.pid, ticks)) == (ticks, False)


@pytest.mark.parametrize("pid", [0, -1, -(2**31), 2**31])
def test_no_message_or_file_can_name_such_a_process(pid: int) -> None:
    mark = {"type": "worker.process_mark.1", "pid": pid, "started_ticks": 1}
    for codec, message in ((FROM_ZYGOTE, held(pid)), (PROCESS_MARK, mark)):
        with pytest.raises(MalformedMessageError, match="pid"):
            codec.decode(msgspec.msgpack.encode(message))


def test_the_agent_neither_moves_itself_nor_ends_its_own_group(tmp_path: Path) -> None:
    group = tmp_path / "job-a-1"
    group.mkdir()
    (group / "cgroup.procs").write_text(f"{THIS}\n")

    with pytest.raises(ValueError, match="0 is not the number of a process"):
        cgroups.enter(group, 0)
    with capture_logs() as logs:
        cgroups.end_all(group, limit_s=0.0)
    signal_group(os.getpgrp(), 9)

    assert [line["event"] for line in logs] == ["this process is in the group of a worker"]
