"""What a node reads of its jobs: their folders, frames of their zygote, questions of their owners."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any, Final

from nodeagent.errors import StartError
from nodeagent.folders import FRAME, NodeFolders, WorkerFolder
from nodeagent.job_folders import answer, is_laid_out
from nodeagent.zygotes import Peer, ZygoteConnection
from schemas.codec import (
    ASSIGNMENT,
    EXIT_STATUS,
    FROM_SHIPPER,
    FROM_ZYGOTE,
    PROCESS_MARK,
    REPORT,
    encode,
)
from schemas.host.state_files import StateFile
from schemas.wire.files import AskFiles, AskPiece, FileList, FilePiece
from tests.fuzz.choices import Choices
from tests.fuzz.hostile_messages import Known, hostile_bytes
from tests.fuzz.targets.folders import folder, without_log_lines

SECRET: Final = b"nobody's business"
FOLDER: Final = "w/a-1.v1.r0"
ZYGOTE: Final[Known] = {"folder": [FOLDER]}
PATHS: Final = (
    "out.txt", "d/out.txt", "../secret", "link", "linkdir/secret", "d/../../secret", "/etc/passwd", "", ".", "..",
    "d", "loop", "fifo", "d/up", "x" * 5000, "1-2-3.state", "a\0b", ".ones-snapshot", "d//out.txt", "é",
)  # fmt: skip


def worker_folders(data: bytes) -> None:
    """A worker's files are its script's to damage; each report is read once, whatever lies around."""
    choices = Choices(data)
    with folder() as here:
        worker = WorkerFolder(here / "a-1.v1.r0")
        worker.path.mkdir()
        for name, codec in (
            ("assignment", ASSIGNMENT), ("process", PROCESS_MARK), ("exit", EXIT_STATUS),
        ):  # fmt: skip
            if choices.often():
                (worker.path / name).write_bytes(hostile_bytes(choices, codec.tags))
        worker.assignment()
        worker.mark()
        worker.exit()
        position, many, whole = 0, 0, 0
        with (worker.path / "reports").open("ab", buffering=0) as file:
            for _ in range(choices.below(8)):
                body = hostile_bytes(choices, REPORT.tags)
                length = len(body) if choices.often() else abs(choices.whole()) % 2**32
                file.write(FRAME.pack(length) + body)
                whole += 1
                found, after = worker.reports(position)
                assert after >= position
                position, many = after, many + len(found)
        assert repr(worker.reports(0)) == repr(worker.reports(0))
        assert many == len(worker.reports(0)[0])


def zygotes(data: bytes) -> None:
    """The interpreter of a job says anything: a worker starts, or is known not to."""
    with contextlib.suppress(StartError):
        asyncio.run(_fork(Choices(data)))


async def _fork(choices: Choices) -> None:
    reader = asyncio.StreamReader()
    connection = ZygoteConnection(reader, _Writer(), Peer(os.getpid(), os.getuid()))  # type: ignore[arg-type]
    strays: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(context))
    asked = asyncio.ensure_future(connection.fork(Path(FOLDER)))
    await asyncio.sleep(0)
    for _ in range(choices.below(6)):
        body = hostile_bytes(choices, FROM_ZYGOTE.tags, ZYGOTE)
        length = len(body) if choices.often() else abs(choices.whole()) % 2**32
        reader.feed_data(FRAME.pack(length) + body)
        await asyncio.sleep(0)
    reader.feed_eof()
    try:
        async with asyncio.timeout(60.0):
            await asked
    finally:
        connection.close()
        await asyncio.gather(connection._task, return_exceptions=True)
    assert not strays, strays[0]


class _Writer:
    @property
    def transport(self) -> _Writer:
        return self

    def abort(self) -> None:
        """Nothing is open."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    async def drain(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


def job_files(data: bytes) -> None:
    """A user asks for a file of his job: he gets none of anybody else's, whatever lies there."""
    without_log_lines()
    choices = Choices(data)
    with folder() as here:
        folders = NodeFolders(here / "run", here / "work", here / "checkpoints")
        (here / "secret").write_bytes(SECRET)
        job = here / "work" / "a-1"
        (job / "d").mkdir(parents=True)
        (job / "out.txt").write_bytes(b"mine")
        (job / "d" / "out.txt").write_bytes(b"mine")
        _mischief(choices, job, here)
        name = choices.pick(("a-1", "a-1", "a-1", "..", ".", "", "a-1/..", "/", choices.text()))
        asked: Any = AskFiles(request="r", job=name)  # type: ignore[arg-type]
        if choices.often():
            path = choices.pick(PATHS) if choices.often() else choices.text()
            asked = AskPiece(
                request="r", job=name, area=choices.pick(("work", "checkpoints", "states")), path=path,  # type: ignore[arg-type]
                offset=choices.pick((0, 0, 1, 100, 2**53)),
            )  # fmt: skip
        reply = answer(asked, folders)
        FROM_SHIPPER.decode(encode(reply))
        if isinstance(reply, FilePiece):
            assert SECRET not in reply.data
        elif isinstance(reply, FileList):
            assert not any(info.path == "secret" for info in reply.files)


def _mischief(choices: Choices, job: Path, here: Path) -> None:
    """What a script might leave in its folder."""
    made: dict[str, Any] = {
        "link": lambda path: path.symlink_to(here / "secret"),
        "linkdir": lambda path: path.symlink_to(here),
        "loop": lambda path: path.symlink_to(path),
        "fifo": os.mkfifo,
        "d/up": lambda path: path.symlink_to("../../../secret"),
        ".ones-snapshot": lambda path: path.write_bytes(choices.take(choices.below(60))),
        "1-2-3.state": lambda path: path.mkdir(),
        "d": lambda path: (path / "x").symlink_to("/"),
        os.fsdecode(b"\xff\xfe"): lambda path: path.write_bytes(b"mine"),
    }
    for name, make in made.items():
        if choices.flag():
            make(job / name)
    is_laid_out(job, choices.text())
    StateFile.of(choices.text())
